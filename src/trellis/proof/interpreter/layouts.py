"""Types of HLO with the order of their elements in memory, and bitcasts, which read the same memory as another type."""

import dataclasses
import functools
import math
import re

import numpy as np

from trellis.inspect.hlo import tuple_parts
from trellis.proof.interpreter.values import NO_DATA, NotInterpreted

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type of an array.

    Attributes:
        dtype: as HLO writes it.
        shape: sizes of its dimensions.
        order: its dimensions from minor to major.
        tiles: tiles of the minor dimensions, the outermost first, as in `T(8,128)(2,1)`.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...] = ()


Type = ArrayType | tuple


@functools.lru_cache(maxsize=65536)
def parse_type(text: str) -> Type:
    """Reads a type; tuples become tuples.

    >>> parse_type("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}")
    ArrayType(dtype='bf16', shape=(8, 128), order=(1, 0), tiles=((8, 128), (2, 1)))
    >>> parse_type("(f32[2], u32[])")[1]
    ArrayType(dtype='u32', shape=(), order=(), tiles=())
    """
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if text.startswith("("):
        return tuple(map(parse_type, tuple_parts(text)))
    found = _ARRAY.match(text)
    if found is None:
        raise NotInterpreted(f"the type {text}")
    shape = tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size)
    order, _, more = (found[3] or "").partition(":")
    minor_first = tuple(int(d) for d in order.split(",") if d) or tuple(reversed(range(len(shape))))
    tiled = re.search(r"T((?:\([^)]*\))+)", more)
    levels = re.findall(r"\(([^)]*)\)", tiled[1]) if tiled else []
    if any("*" in level for level in levels):
        raise NotInterpreted(f"tiles over joined dimensions, in {text}")
    return ArrayType(found[1], shape, minor_first, tuple(tuple(map(int, level.split(","))) for level in levels))


@functools.lru_cache(maxsize=1024)
def _memory(shape: tuple[int, ...], order: tuple[int, ...], tiles: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """For each place in memory, the number of the element there, counted in row-major order, or -1 for padding."""
    at = np.arange(math.prod(shape)).reshape(shape).transpose(order[::-1])
    for tile in tiles:
        rank = len(tile)
        at = at.reshape((1,) * (rank - at.ndim) + at.shape)
        lead = at.ndim - rank
        padding = [(0, 0)] * lead + [(0, -size % t) for size, t in zip(at.shape[lead:], tile)]
        at = np.pad(at, padding, constant_values=-1)
        cut = [part for size, t in zip(at.shape[lead:], tile) for part in (size // t, t)]
        at = at.reshape(*at.shape[:lead], *cut)
        at = at.transpose(*range(lead), *range(lead, at.ndim, 2), *range(lead + 1, at.ndim, 2))
    return at.reshape(-1)


def in_memory(kind: ArrayType) -> np.ndarray:
    """For each place in an array's memory, the number of the element there, or -1 for padding."""
    return _memory(kind.shape, kind.order, kind.tiles)


@functools.lru_cache(maxsize=4096)
def _moved(before: ArrayType, after: ArrayType) -> np.ndarray | None:
    """For each element after a bitcast, the number of the element before, -1 for padding; None if the order stays."""
    source, target = in_memory(before), in_memory(after)
    if len(source) != len(target):  # padded differently: the elements follow each other in memory
        source, target = source[source >= 0], target[target >= 0]
        if len(source) != len(target):
            raise NotInterpreted(f"a bitcast from {before} to {after}")
    found = np.full(math.prod(after.shape), -1)
    found[target[target >= 0]] = source[target >= 0]
    return None if np.array_equal(found, np.arange(math.prod(before.shape))) else found


class Overfull(np.ndarray):
    """An array whose memory has more than its elements: a bitcast to a smaller shape hides some, another may show them.

    Attributes:
        memory: what is in memory, `device place`.
        kind: the type that says where in memory the elements are.
    """

    memory: np.ndarray | None = None
    kind: ArrayType | None = None


def bitcast(x: np.ndarray, before: ArrayType, after: ArrayType) -> np.ndarray:
    """Reads the same memory as another shape or order. What was padding is not known, and becomes NaN if it can.

    Args:
        x: `device dim ...`, in the type `before`.
        before: its type.
        after: the other type, of elements as wide.
    """
    shape = (len(x), *after.shape)
    before, after = _tiled_alike(before, after)
    if before.shape == after.shape and before.order == after.order:
        return x
    moved = _moved(dataclasses.replace(before, dtype=""), dataclasses.replace(after, dtype=""))
    flat = np.ascontiguousarray(x).reshape(len(x), -1)
    if moved is None:
        return flat.reshape(shape)
    missing = moved < 0
    out = flat[:, moved]
    if missing.any() or out.shape[1] < flat.shape[1]:
        return _through_memory(x, before, after)
    return out.reshape(shape)


def _tiled_alike(before: ArrayType, after: ArrayType) -> tuple[ArrayType, ArrayType]:
    """Both types in the tiles of one of them, if the other is a matrix or more and has none.

    libtpu of JAX 0.12 writes results of products without tiles. They are in tiles nevertheless: the windows that it
    moves over them have as many steps as there are tiles, and the numbers would be wrong if they were read in rows.
    """
    if not before.tiles and len(before.shape) > 1:
        before = dataclasses.replace(before, tiles=after.tiles)
    if not after.tiles and len(after.shape) > 1:
        after = dataclasses.replace(after, tiles=before.tiles)
    return before, after


def _through_memory(x: np.ndarray, before: ArrayType, after: ArrayType) -> np.ndarray:
    """A bitcast to more elements or to fewer, through what is in memory, padding and hidden elements too."""
    source, target = in_memory(before), in_memory(after)
    if len(source) != len(target):
        raise NotInterpreted(f"a bitcast from {before} to {after}")
    if isinstance(x, Overfull) and x.kind is not None and _places(x.kind) == _places(before):
        memory = x.memory.copy()
    else:
        memory = np.full((len(x), len(source)), np.nan if x.dtype.kind == "f" else 0, x.dtype)
    memory[:, source >= 0] = np.asarray(x).reshape(len(x), -1)[:, source[source >= 0]]
    out = np.empty((len(x), math.prod(after.shape)), x.dtype)
    out[:, target[target >= 0]] = memory[:, target >= 0]
    found = out.reshape(len(x), *after.shape).view(Overfull)
    found.memory, found.kind = memory, after
    return found


def _places(kind: ArrayType) -> tuple:
    return kind.shape, kind.order, kind.tiles


def blank(kind: Type, devices: int, held_as) -> object:
    """Memory that has not been written: NaN if a type has it.

    Args:
        kind: the type.
        devices: the size of the dimension of devices.
        held_as: from an element type to the numpy type it is held in.
    """
    if isinstance(kind, tuple):
        return tuple(blank(part, devices, held_as) for part in kind)
    if kind.dtype in NO_DATA:
        return None
    dtype = held_as(kind.dtype)
    return np.full((devices, *kind.shape), np.nan if dtype.kind == "f" else 0, dtype)
