"""Types of a program's values: where they lie, and how much of them is on one device."""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType

from trellis.notation.state import State, mode_of
from trellis.notation.typeof import short_dtype


def state_at(aval, *, auto: bool = False) -> State:
    """Where a value lies by its type, along explicit mesh axes; with `auto`, also along those left to the compiler.

    `spec.partitions` is read, never the spec's items: JAX refuses to index a spec that has states.
    """
    sharding, ndim = getattr(aval, "sharding", None), len(getattr(aval, "shape", ()))
    mesh = getattr(sharding, "mesh", None)
    return _nowhere(ndim) if mesh is None or mesh.empty else _state(sharding, ndim, auto)


def state_by(sharding: jax.sharding.NamedSharding, ndim: int) -> State:
    """Where an array of so many dimensions lies by a sharding, along explicit mesh axes and those of the compiler."""
    return _state(sharding, ndim, True)


@functools.cache
def _nowhere(ndim: int) -> State:
    return State("none", ((),) * ndim)


@functools.lru_cache(4096)  # a program has few of them, and reads them by the ten thousand
def _state(sharding: jax.sharding.NamedSharding, ndim: int, auto: bool) -> State:
    mesh, spec = sharding.mesh, sharding.spec
    kinds = (AxisType.Explicit, AxisType.Auto) if auto else (AxisType.Explicit,)
    known = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind in kinds}
    dims = [tuple(axis for axis in _axes(entry) if axis in known) for entry in spec.partitions]
    dims += [()] * (ndim - len(dims))
    pending, copied = (frozenset(axes or ()) & known for axes in (spec.unreduced, spec.reduced))
    return State(mode_of(mesh), tuple(dims), pending, copied)


def _axes(entry) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    return tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if isinstance(axis, str))


def is_auto(aval) -> bool:
    """Whether a type says nothing of some mesh axis because that one is left to the compiler."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Auto in getattr(mesh, "axis_types", ())


@functools.lru_cache(256)
def itemsize(dtype) -> float:
    """Bytes of one element; random keys count as their words, tangents of whole numbers as nothing."""
    if dtype == jax.dtypes.float0:
        return 0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype.itemsize
    return jax.dtypes.itemsize_bits(dtype) / 8


def num_bytes(aval) -> int:
    """Bytes of a whole array."""
    return int(math.prod(aval.shape) * itemsize(aval.dtype))


def local_shape(aval) -> tuple[int, ...]:
    """The shape on one device of a value whose type, or whose sharding, says how it is sliced."""
    shape = list(getattr(aval, "shape", ()))
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.empty:
        return tuple(shape)
    for index, count in _counts(sharding):
        shape[index] = -(-shape[index] // count)
    return tuple(shape)


def tiles_filled(shape: Sequence[int]) -> int:
    """The tiles of a TPU, of 8 rows of 128 numbers, that an array of this shape fills.

    >>> tiles_filled((32, 2880, 2880)) // 32, tiles_filled((2880,)), tiles_filled(())
    (8280, 23, 1)
    """
    *outer, rows, columns = (1, 1, *shape)
    return math.prod(outer) * -(-rows // 8) * -(-columns // 128)


def shape_at(aval, state: State) -> tuple[int, ...]:
    """The shape on one device of a value that lies so."""
    sizes = aval.sharding.mesh.shape
    return tuple(-(-n // math.prod(sizes[a] for a in axes)) for n, axes in zip(aval.shape, state.axes, strict=True))


@functools.lru_cache(4096)
def _counts(sharding: jax.sharding.NamedSharding) -> tuple[tuple[int, int], ...]:
    """The dimensions that are sliced, and the slices of each."""
    sizes = sharding.mesh.shape
    counts = (math.prod(sizes.get(axis, 1) for axis in _axes(entry)) for entry in sharding.spec.partitions)
    return tuple((index, count) for index, count in enumerate(counts) if count > 1)


def local_bytes(aval) -> int:
    """Bytes on one device."""
    return int(math.prod(local_shape(aval)) * itemsize(aval.dtype)) if hasattr(aval, "dtype") else 0


def typed(aval, names: tuple[str, ...] | None = None, placed: State | None = None) -> str:
    """A type in the notation: `f32[batch/data pos embed]`, with sizes if there are no names; `placed` is where it lies,
    if a compiler places it."""
    return f"{short_dtype(aval.dtype)}[{(placed or state_at(aval, auto=True)).words(names or aval.shape)}]"


def window_pairs(steps: int, taps: int, length: int, *, stride: int, spread: int, gaps: int, before: int) -> int:
    """How many elements a convolution's windows see along a dimension, all windows together.

    Args:
        steps: windows.
        taps: elements of a window.
        length: elements of the array.
        stride: how far a window moves on.
        spread: from one tap to the next.
        gaps: from one element to the next; zeros between them are not seen.
        before: positions before the first element, of padding.

    >>> window_pairs(4, 3, 4, stride=1, spread=1, gaps=1, before=1)
    10
    >>> window_pairs(7, 3, 4, stride=1, spread=1, gaps=2, before=1)
    10
    """
    # A tap sees an element where step * stride + tap * spread - before = element * gaps: one step in every so many.
    common = math.gcd(stride, gaps)
    every, inverse = gaps // common, pow(stride // common, -1, gaps // common)
    first = np.arange(taps, dtype=np.int64) * spread - before  # the place of each tap in the first window
    low = np.maximum(-(first // stride), 0)  # the first step at or after the first element
    high = np.minimum((length * gaps - gaps - first) // stride + 1, steps)  # that after the last element
    step = low + (-first // common * inverse - low) % every
    seen = np.maximum(high - step + every - 1, 0) // every
    return int(seen[first % common == 0].sum())
