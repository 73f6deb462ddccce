"""Named arrays and their operations."""

from trellis.frames import hide_frames as _hide_frames
from trellis.named import operators, random
from trellis.named.array import NamedArray, is_named, named
from trellis.named.axis import Axis, NamesError
from trellis.named.contract import dot, einsum
from trellis.named.control import fold, map, scan, vmap
from trellis.named.create import arange, from_numpy, full, linspace, one_hot, ones, tril, triu, zeros
from trellis.named.elementwise import ELEMENTWISE, lift
from trellis.named.index import index, take
from trellis.named.jit import abstract, named_jit, shard
from trellis.named.placing import settle
from trellis.named.reduce import ALONG, REDUCTIONS, argmax, argmin, lift_along, lift_reduction, top_k
from trellis.named.reshape import (
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
from trellis.named.saving import Keep, checkpoint, save
from trellis.named.stacked import Stacked

_hide_frames(__file__)

globals().update({**ELEMENTWISE, **REDUCTIONS, **ALONG})

__all__ = [name for name in dir() if not name.startswith("_")]
