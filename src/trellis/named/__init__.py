"""Named arrays and their operations."""

from . import operators, random
from .array import NamedArray, is_named, named
from .axis import Axis, NamesError
from .contract import dot, einsum
from .control import fold, map, scan, vmap
from .create import arange, from_numpy, full, linspace, one_hot, ones, tril, triu, zeros
from .elementwise import ELEMENTWISE, lift
from .index import index, take
from .jit import abstract, named_jit, shard
from .placing import settle
from .reduce import ALONG, REDUCTIONS, argmax, argmin, lift_along, lift_reduction, top_k
from .reshape import (
    broadcast_to,
    concatenate,
    merge_axes,
    pad,
    rearrange,
    rename,
    roll,
    split,
    split_axis,
    stack,
    transpose,
    unbind,
)
from .saving import Keep, checkpoint, save
from .stacked import Stacked

globals().update({**ELEMENTWISE, **REDUCTIONS, **ALONG})

__all__ = [name for name in dir() if not name.startswith("_")]
