"""Meshes, layouts, `reshard`, and typed `shard_map`."""

from trellis.frames import hide_frames
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.manual.pending import pending
from trellis.mesh.manual.shard_map import shard_map
from trellis.mesh.manual.shift import shift
from trellis.mesh.meshes import MeshError, make_mesh
from trellis.mesh.reshard import ReshardError, all_gather, all_reduce, all_to_all, reduce_scatter, reshard
from trellis.mesh.topology import TopologyError, slice_names, target_devices

hide_frames(__file__)

__all__ = [
    "Layout",
    "MeshError",
    "ReshardError",
    "TopologyError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "current_layout",
    "make_mesh",
    "pending",
    "reduce_scatter",
    "reshard",
    "shard_map",
    "shift",
    "slice_names",
    "target_devices",
]
