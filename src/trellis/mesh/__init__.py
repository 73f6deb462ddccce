"""Meshes, layouts, `reshard`, and typed `shard_map`."""

from .layout import Layout, current_layout
from .manual import shard_map, shift
from .meshes import MeshError, make_mesh
from .reshard import ReshardError, all_gather, all_reduce, all_to_all, reduce_scatter, reshard

__all__ = [
    "Layout",
    "MeshError",
    "ReshardError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "current_layout",
    "make_mesh",
    "reduce_scatter",
    "reshard",
    "shard_map",
    "shift",
]
