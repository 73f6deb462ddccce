"""Groups of sorted rows, cut into tiles of one group each: which rows of which group each tile has."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trellis.mesh.manual.ops import vary, varying_axes

ROWS, LANES = 8, 128  # of a TPU's tile, and numbers in one
# How much longer than a streaming copy libtpu takes to lay out again slices that come together along the last dimension
# and do not end with a tile, and along the one before. By its cycles for GPT-OSS and Qwen3 on v5p and v6e.
ACROSS_LANES, ACROSS_ROWS = 4.6, 2.5


class Tiles(NamedTuple):
    """Tiles of one group's rows each: the first begins where its group does, and the last may end before it is full.

    Attributes:
        count: `i32[""]`, how many there are.
        begins, ends: `i32["groups"]`, where each group's rows are.
        last: `i32["groups"]`, the number of tiles up to and with those of each group.
        rows: of a tile.
    """

    count: jax.Array
    begins: jax.Array
    ends: jax.Array
    last: jax.Array
    rows: int

    def group(self, tile: jax.Array) -> jax.Array:
        """The group of a tile, or of each of several."""
        return jnp.searchsorted(self.last, tile, side="right").astype(jnp.int32)

    def first(self, tile: jax.Array) -> jax.Array:
        """The first row of a tile, or of each of several."""
        group = self.group(tile)
        before = jnp.where(group > 0, self.last[group - 1], 0)
        return self.begins[group] + (tile - before) * self.rows


def shaped(shape: tuple[int, ...], dtype, *arrays: jax.Array) -> tuple[jax.ShapeDtypeStruct, tuple[jax.Array, ...]]:
    """The type of a kernel's result, which varies along all manual mesh axes along which an operand varies, and the
    operands, varying along them too.
    """
    axes = varying_axes(*arrays)
    arrays = tuple(vary(a, axes) for a in arrays)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(arrays[0]).manual_axis_type), arrays


def slower_than_a_copy(shape: tuple[int, ...], gathered: int, ways: int, itemsize: int) -> float:
    """How much longer than a streaming copy libtpu takes to lay out what was gathered, before a kernel reads it; 0 if
    it comes together as it lies.

    Args:
        shape: of the whole array.
        gathered: the dimension along which slices come together.
        ways: of how many devices.
        itemsize: bytes of an item.

    >>> slower_than_a_copy((8, 14336, 4096), 2, 16, 2), slower_than_a_copy((32, 2880, 2880), 2, 64, 2)
    (0.0, 4.6)
    """
    last = len(shape) - 1
    rows = ROWS * 4 // itemsize  # of a tile
    for dimension, fills, slower in ((last, LANES, ACROSS_LANES), (last - 1, rows, ACROSS_ROWS)):
        if gathered == dimension:
            return slower if shape[gathered] // ways % fills else 0.0
    return 0.0


def tiles_of(sizes: jax.Array, rows: int) -> Tiles:
    """The tiles of groups.

    Args:
        sizes: `i32["groups"]`.
        rows: of a tile.

    >>> import jax.numpy as jnp
    >>> tiles = tiles_of(jnp.array([5, 0, 2]), 4)
    >>> number = jnp.arange(int(tiles.count))
    >>> tiles.group(number).tolist(), tiles.first(number).tolist()
    ([0, 0, 2], [0, 4, 5])
    """
    sizes = sizes.astype(jnp.int32)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(-(-sizes // rows))
    return Tiles(last[-1], ends - sizes, ends, last, rows)


def visits_of(sizes: jax.Array, count: int, tile: int) -> tuple[jax.Array, ...]:
    """The pairs of a group and a tile that has rows of it; an empty group is paired with any tile.

    Args:
        sizes: `i32["groups"]`.
        count: of all rows there is room for.
        tile: rows of a tile; unlike those of `tiles_of`, tiles begin where the rows do.

    Returns:
        How many there are, the group and the tile of each, and where each group begins and ends.
    """
    sizes = sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    begins, tiles = ends - sizes, -(-count // tile)
    first = jnp.minimum(begins // tile, tiles - 1)
    last = jnp.cumsum(jnp.where(sizes > 0, (ends - 1) // tile - first + 1, 1))
    number = jnp.arange(tiles + sizes.shape[0], dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right").astype(jnp.int32), sizes.shape[0] - 1)
    before = jnp.where(group > 0, last[group - 1], 0)
    return last[-1], group, jnp.minimum(first[group] + number - before, tiles - 1), begins, ends


def side_of(size: int, most: int) -> int:
    """The largest multiple of the lanes that divides the size; all of it if none does and it is small."""
    sides = [side for side in range(LANES, most + 1, LANES) if size % side == 0]
    return sides[-1] if sides else min(size, most)
