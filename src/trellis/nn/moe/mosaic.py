"""Grouped products on TPUs: `jax.lax.ragged_dot`, and kernels of our own for its two gradients.

From `ragged_dot` libtpu makes a kernel that multiplies only the rows that there are. For its gradient by the rows it
first copies all weights, transposed; its gradient by the weights becomes a dense product, every row with every weight.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trellis.nn.moe.tiles import LANES, shaped, side_of, visits_of
from trellis.program.said import grouped_work

# The largest sides of a tile of the result; the larger they are, the fewer times rows are read. With float32 sums, and
# operands and results on their way, they take a third of the vector memory of the smallest chip.
DOWN, ACROSS = 1024, 1024
# The most terms of a sum that are multiplied at once: if these are all of them, a group's weights are read once.
SUMMED = 4096
VECTOR_MEMORY = 48 * 2**20


def multiply(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """As `grouped_matmul`."""
    return lax.ragged_dot(rows, weights, sizes)


def rows_gradient(
    d: Sequence[jax.Array], weights: Sequence[jax.Array], sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The gradient of rows that went into several products, through all of these, summed in float32: `rows in`.

    One kernel makes it: to sum arrays made by one kernel each would read and write all of them once more.

    Args:
        d: the gradient of each product's result, `rows out`.
        weights: of each product, `groups in out`.
        sizes: `i32["groups"]`.
        interpret: runs the kernel on any backend, slowly.
    """
    (groups, columns, _), count, dtype = weights[0].shape, d[0].shape[0], d[0].dtype
    tile, summed = _rows_of_a_tile(count, groups), [_whole_side(x.shape[1], SUMMED // len(d)) for x in d]
    across = _across(columns, tile, sum(summed) * dtype.itemsize)
    parts = [x.shape[1] // most for x, most in zip(d, summed, strict=True)]
    visits, *tables = visits_of(sizes, count, tile)
    pairs = [x for pair in zip(d, weights, strict=True) for x in pair]
    shape, given = shaped((count, columns), dtype, *tables, *pairs)
    specs, first = [], 0
    for most, steps in zip(summed, parts, strict=True):
        # Before and after its own steps a product's operands stay where they are, so that nothing is read.
        at = lambda k, first=first, steps=steps: jnp.clip(k - first, 0, steps - 1)
        specs += [
            pl.BlockSpec((tile, most), lambda j, visit, k, group, place, *_, at=at: (place[visit], at(k))),
            pl.BlockSpec((None, across, most), lambda j, visit, k, group, *_, at=at: (group[visit], j, at(k))),
        ]
        first += steps
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        in_specs=specs,
        out_specs=pl.BlockSpec((tile, across), lambda j, visit, k, group, place, *_: (place[visit], j)),
        grid=(pl.cdiv(columns, across), visits, sum(parts)),
        scratch_shapes=[pltpu.VMEM((tile, across), jnp.float32)],
    )
    inner = sum(x.shape[1] for x in d)
    read = sum(x.nbytes for x in d) * pl.cdiv(columns, across) + sum(w.nbytes for w in weights)
    call = pl.pallas_call(
        functools.partial(_product, tile=tile, parts=tuple(parts)),
        name="grouped_rows_gradient",
        grid_spec=grid,
        out_shape=shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VECTOR_MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * inner * columns,
            bytes_accessed=read + count * columns * dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
    )
    with grouped_work(count, inner, columns, groups=groups, tile=2 * tile):
        return call(*given)


def _product(group, place, begins, ends, *given, tile: int, parts: tuple[int, ...]):
    """Multiplies one tile of rows with one group's weights of each product, in as many parts of the sum as each has.
    Tiles that share rows follow each other, so what the group before wrote is still there."""
    *pairs, out, total = given
    visit, part = pl.program_id(1), pl.program_id(2)
    mine = group[visit]
    begin, end, here = begins[mine], ends[mine], place[visit] * tile

    def add(d, weights):
        made = lax.dot_general(d[...], weights[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        total[...] = jnp.where(part == 0, made, total[...] + made)

    first = 0
    for d, weights, steps in zip(pairs[::2], pairs[1::2], parts, strict=True):
        pl.when((begin < end) & (first <= part) & (part < first + steps))(functools.partial(add, d, weights))
        first += steps

    @pl.when((begin < end) & (part == pl.num_programs(2) - 1))
    def _():
        number = here + lax.broadcasted_iota(jnp.int32, out.shape, 0)
        own = (begin <= number) & (number < end)
        out[...] = jnp.where(own, total[...], out[...].astype(jnp.float32)).astype(out.dtype)


def weights_gradient(
    rows: jax.Array,
    d: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    down_to: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """For each group, the products of its rows with their gradients, summed: `groups in out`; zeros for an empty one.

    Args:
        rows: `rows in`.
        d: `rows out`.
        sizes: `i32["groups"]`.
        dtype: of the result; sums are float32.
        down_to: how many rows of a group the result has room for, if more than `in`: any numbers after those.
        interpret: runs the kernel on any backend, slowly.
    """
    (count, inner), columns, groups = rows.shape, d.shape[1], sizes.shape[0]
    tile, down, across = _rows_of_a_tile(count, groups), side_of(inner, DOWN), side_of(columns, ACROSS)
    visits, *tables = visits_of(sizes, count, tile)
    shape, given = shaped((groups, down_to or inner, columns), dtype, *tables, rows, d)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        in_specs=[
            pl.BlockSpec((tile, down), lambda i, j, visit, group, place, *_: (place[visit], i)),
            pl.BlockSpec((tile, across), lambda i, j, visit, group, place, *_: (place[visit], j)),
        ],
        out_specs=pl.BlockSpec((None, down, across), lambda i, j, visit, group, *_: (group[visit], i, j)),
        grid=(pl.cdiv(inner, down), pl.cdiv(columns, across), visits),
        scratch_shapes=[pltpu.VMEM((down, across), jnp.float32)],
    )
    read = rows.nbytes * pl.cdiv(columns, across) + d.nbytes * pl.cdiv(inner, down)
    call = pl.pallas_call(
        functools.partial(_gradient, tile=tile),
        name="grouped_gradient",
        grid_spec=grid,
        out_shape=shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VECTOR_MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * inner * columns,
            bytes_accessed=read + groups * inner * columns * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
    )
    with grouped_work(count, inner, columns, groups=groups, tile=2 * tile, over_rows=True):
        return call(*given)


def _gradient(group, place, begins, ends, rows, d, out, total, *, tile: int):
    visit, mine = pl.program_id(2), group[pl.program_id(2)]
    first = (visit == 0) | (group[jnp.maximum(visit - 1, 0)] != mine)
    last = (visit == pl.num_programs(2) - 1) | (group[jnp.minimum(visit + 1, group.shape[0] - 1)] != mine)
    begin, end, here = begins[mine], ends[mine], place[visit] * tile
    whole = (begin <= here) & (here + tile <= end)

    @pl.when(first)
    def _():
        total[...] = jnp.zeros_like(total)

    def add(x, y):
        total[...] += lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    @pl.when(whole)
    def _():
        add(rows[...], d[...])

    @pl.when(~whole & (begin < end))
    def _():
        # Masks rows of other groups and of none, which may be NaN; in float32, as every chip can.
        def own(x):
            number = here + lax.broadcasted_iota(jnp.int32, x.shape, 0)
            return jnp.where((begin <= number) & (number < end), x.astype(jnp.float32), 0.0).astype(x.dtype)

        add(own(rows[...]), own(d[...]))

    @pl.when(last)
    def _():
        out[...] = total[...].astype(out.dtype)


def _across(columns: int, tile: int, num_bytes: int) -> int:
    """Columns of a tile of the result: as many as have room, if a row of all operands' tiles has `num_bytes` bytes."""
    across = side_of(columns, ACROSS)
    while across > LANES and 2 * (tile + across) * num_bytes > VECTOR_MEMORY * 3 // 4:  # each twice: one is on its way
        across = side_of(columns, max(across // 2 // LANES, 1) * LANES)
    return across


def _rows_of_a_tile(count: int, groups: int) -> int:
    """Many if groups are large, to load operands in long pieces; few if they are small, to multiply few twice."""
    tile = next((t for t in (512, 256) if count >= 16 * t * groups), LANES)
    return min(tile, -(-count // 16) * 16)


def _whole_side(size: int, most: int) -> int:
    """`side_of` of what is summed, where no tile may reach past the end: all of it if nothing divides it."""
    sides = [side for side in range(LANES, min(most, size) + 1, LANES) if size % side == 0]
    return size if size <= most or not sides else sides[-1]
