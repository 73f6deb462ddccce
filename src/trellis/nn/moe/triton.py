"""Grouped products on NVIDIA GPUs, by kernels of our own in Pallas's dialect for Triton.

There XLA makes `jax.lax.ragged_dot` a dense product, as many times the work as there are groups. These kernels multiply
only the rows that there are, and what completes the last tile of each group. Rows may be those of another array, and
are then read (`sources` says which) or written (`targets`) where they are: no sorted copy is made (Tan et al., 2024,
arXiv:2403.08245).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from trellis.nn.moe.tiles import shaped, tiles_of
from trellis.program.said import as_it_lies, grouped_work

# A program's tile of the result, and how much of the sum it loads at once (half as much of float32). Programs that
# run together share operands in the cache if they walk over a few tiles of rows before the next one of columns.
ROWS, COLUMNS, SUMMED, ACROSS = 128, 256, 64, 8
LAUNCH = plgpu.CompilerParams(num_warps=8, num_stages=3)
# The sum over gathered rows loads each of them by its place; with these tiles it takes 0.71 to 0.74 of the time on an
# H200, where the other kernels would take up to 1.5 times theirs (benchmarks/results/accelerator_h200.txt).
GATHERED_COLUMNS, GATHERED_LAUNCH = 128, plgpu.CompilerParams(num_warps=4, num_stages=4)
LEAST = 16  # a tile's shortest side: less fills no matrix unit
NOWHERE = 2**31 - 1  # a place in no array


def multiply(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    outer: int = 0,
    swapped: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """As `grouped_matmul`; rows after the last group are not written.

    Args:
        rows: `rows in`, or with `sources` any number of rows.
        weights: `groups in out`, or `groups out in` if they are swapped.
        sizes: `i32["groups"]`.
        sources: `i32["rows"]`, which of `rows` each row is, anything past the last group; None for the rows as is.
        targets: `i32["rows"]`, where in the result each row is written, no two in one place; None for in order.
        outer: see `grouped_products`.
        swapped: see `weights`.
        interpret: runs the kernel on any backend, slowly.
    """
    return _multiplied([(rows, weights, outer)], sizes, sources, targets, swapped=swapped, interpret=interpret)


def rows_gradient(
    d: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    sizes: jax.Array,
    *,
    sources: jax.Array | None = None,
    targets: jax.Array | None = None,
    outer: Sequence[int] = (),
    interpret: bool = False,
) -> jax.Array:
    """The gradient of rows that went into several products, through all of these, summed in float32: `rows in`.

    One kernel makes it: to sum arrays made by one kernel each would read and write all of them once more.

    Args:
        d: the gradient of each product's result, `rows out`, or with `sources` any number of rows.
        weights: of each product, `groups in out`.
        sizes: `i32["groups"]`.
        sources: of all of `d`, as in `multiply`.
        targets: as there.
        outer: see `grouped_products`; none is 0 for all.
        interpret: runs the kernel on any backend, slowly.
    """
    products = list(zip(d, weights, outer or (0,) * len(d), strict=True))
    return _multiplied(products, sizes, sources, targets, swapped=True, interpret=interpret)


def _multiplied(
    products: Sequence[tuple[jax.Array, jax.Array, int]],
    sizes: jax.Array,
    sources: jax.Array | None,
    targets: jax.Array | None,
    *,
    swapped: bool,
    interpret: bool,
) -> jax.Array:
    """The sum of several products of the same number of rows, each with its own weights and outermost dimension."""
    count, dtype = (products[0][0] if sources is None else sources).shape[0], products[0][0].dtype
    groups, columns = sizes.shape[0], products[0][1].shape[1 if swapped else 2]
    across, summed = _side(columns, COLUMNS), [_side(x.shape[1], SUMMED * 2 // dtype.itemsize) for x, *_ in products]
    down = min(-(-count // ROWS) + groups, count)  # tiles of rows, at most
    tiles = tiles_of(sizes, ROWS)
    number = jnp.arange(down, dtype=jnp.int32)
    group = jnp.minimum(tiles.group(number), groups - 1)
    first, end = (jnp.where(number < tiles.count, x, 0) for x in (tiles.first(number), tiles.ends[group]))
    outer = [o for *_, o in products]
    with as_it_lies():
        pairs = [x for rows, weights, o in products for x in (rows, jnp.moveaxis(weights, o, 0))]
    listed = {name: x for name, x in (("gathers", sources), ("scatters", targets)) if x is not None}
    shape, given = shaped((count, columns), dtype, group, first, end, *listed.values(), *pairs)
    how = dict(across=across, summed=summed, down=down, swapped=swapped, outer=outer, listed=tuple(listed))
    call = pl.pallas_call(
        functools.partial(_product, **how),
        name="_".join(["grouped_product", *["swapped"] * swapped, *listed]) + _suffix(*outer),
        grid=(down * -(-columns // across),),
        out_shape=shape,
        compiler_params=LAUNCH,
        interpret=interpret,
    )
    inner = sum(rows.shape[1] for rows, *_ in products)
    with grouped_work(count, inner, columns, groups=groups, tile=ROWS):
        return call(*given)


def _product(
    group,
    first,
    end,
    *given,
    across: int,
    summed: Sequence[int],
    down: int,
    swapped: bool,
    outer: Sequence[int],
    listed: tuple[str, ...],
):
    lists, pairs, out = dict(zip(listed, given, strict=False)), given[len(listed) : -1], given[-1]
    columns = out.shape[1]
    row, column = _walk(pl.program_id(0), down, -(-columns // across))
    begin, past = first[row], end[row]
    columns_here, column_first = column * across + jnp.arange(across), column * across

    @pl.when(begin < past)
    def _():
        own = begin + jnp.arange(ROWS) < past
        shown = columns_here < columns
        mine, (of_rows, of_out) = group[row], (_places(lists.get(x), begin, ROWS, own) for x in ("gathers", "scatters"))

        def added(total, rows, weights, most: int, outer: int):
            def add(i, total):
                terms = i * most + jnp.arange(most) < rows.shape[1]
                x = _load(_tile(rows, of_rows, i * most, most), own[:, None] & terms[None])
                of_terms, of_columns = pl.ds(i * most, most), pl.ds(column_first, across)
                sides = (of_columns, of_terms) if swapped else (of_terms, of_columns)
                y = weights.at[_lying(outer, mine, *sides)]
                if swapped == (outer == 2):
                    return total + _dot(x, _load(y, terms[:, None] & shown[None]), (1, 0))
                return total + _dot(x, _load(y, shown[:, None] & terms[None]), (1, 1))

            return lax.fori_loop(0, -(-rows.shape[1] // most), add, total)

        total = jnp.zeros((ROWS, across), jnp.float32)
        for each in zip(pairs[::2], pairs[1::2], summed, outer, strict=True):
            total = added(total, *each)
        place = _tile(out, of_out, column_first, across)
        plgpu.store(place, total.astype(out.dtype), mask=own[:, None] & shown[None])


def weights_gradient(
    rows: jax.Array,
    d: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    sources: jax.Array | None = None,
    d_sources: jax.Array | None = None,
    outer: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """For each group, the products of its rows with their gradients, summed: `groups in out`; zeros for an empty one.

    Args:
        rows: `rows in`, or with `sources` any number of rows.
        d: `rows out`, or with `d_sources` any number of rows.
        sizes: `i32["groups"]`.
        dtype: of the result; sums are float32.
        sources, d_sources: of the rows, and of their gradients, as in `multiply`.
        outer: of the result, see `grouped_products`.
        interpret: runs the kernel on any backend, slowly.
    """
    count, groups = (rows if sources is None else sources).shape[0], sizes.shape[0]
    inner, columns = rows.shape[1], d.shape[1]
    gathers = {name: x for name, x in (("rows", sources), ("d", d_sources)) if x is not None}
    most, launch = (GATHERED_COLUMNS, GATHERED_LAUNCH) if gathers else (COLUMNS, LAUNCH)
    down, across, summed = _side(inner, ROWS), _side(columns, most), SUMMED * 2 // rows.dtype.itemsize
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    lying = _lying(outer, groups, inner, columns)
    shape, given = shaped(lying, dtype, ends - sizes, ends, *gathers.values(), rows, d)
    how = dict(down=down, across=across, summed=summed, outer=outer, gathers=tuple(gathers))
    call = pl.pallas_call(
        functools.partial(_gradient, **how),
        name="_gathers_".join(["grouped_gradient", *gathers]) + _suffix(outer),
        grid=(-(-inner // down) * -(-columns // across), groups),
        out_shape=shape,
        compiler_params=launch,
        interpret=interpret,
    )
    with grouped_work(count, inner, columns, groups=groups, tile=summed, over_rows=True):
        made = call(*given)
    with as_it_lies():
        return jnp.moveaxis(made, 0, outer)


def _gradient(begins, ends, *given, down: int, across: int, summed: int, outer: int, gathers: tuple[str, ...]):
    *sources, rows, d, out = given
    sources = dict(zip(gathers, sources, strict=True))
    inner, columns = rows.shape[1], d.shape[1]
    row, column = _walk(pl.program_id(0), -(-inner // down), -(-columns // across))
    group = pl.program_id(1)
    begin, past = begins[group], ends[group]
    inside, shown = row * down + jnp.arange(down) < inner, column * across + jnp.arange(across) < columns

    def add(i, total):
        first = begin + i * summed
        own = first + jnp.arange(summed) < past
        of_rows, of_d = (_places(sources.get(name), first, summed, own) for name in ("rows", "d"))
        x = _load(_tile(rows, of_rows, row * down, down), own[:, None] & inside[None])
        y = _load(_tile(d, of_d, column * across, across), own[:, None] & shown[None])
        return total + (_dot(y, x, (0, 0)) if outer == 2 else _dot(x, y, (0, 0)))

    sides = (across, down) if outer == 2 else (down, across)
    total = lax.fori_loop(0, pl.cdiv(past - begin, summed), add, jnp.zeros(sides, jnp.float32))
    place = out.at[_lying(outer, group, pl.ds(row * down, down), pl.ds(column * across, across))]
    mask = shown[:, None] & inside[None] if outer == 2 else inside[:, None] & shown[None]
    plgpu.store(place, total.astype(out.dtype), mask=mask)


def _lying(outer: int, *sides):
    """Three dimensions, the outermost first."""
    return sides[outer], *sides[:outer], *sides[outer + 1 :]


def _suffix(*outer: int) -> str:
    """The suffix of a kernel's name that tells a reader of the compiled program how each weight lies."""
    return "_outer_" + "_".join(map(str, outer)) if any(outer) else ""


def _walk(number, down: int, across: int):
    """A program's tile of rows and of columns: `ACROSS` tiles of rows, then the next column of these."""
    # `//` asks for a sign, which Pallas reads in the mesh around: inside of a pipeline's stage that is another.
    band = lax.div(number, ACROSS * across)
    height = jnp.minimum(down - band * ACROSS, ACROSS)
    within = number - band * ACROSS * across
    return band * ACROSS + lax.rem(within, height), lax.div(within, height)


def _places(listed, first, size: int, own):
    """Where in their array a tile's rows are: side by side, or as a list says; others are nowhere."""
    return pl.ds(first, size) if listed is None else _load(listed.at[pl.ds(first, size)], own, NOWHERE)


def _tile(array, places, first, size: int):
    """A tile: `size` columns of these rows."""
    if isinstance(places, pl.Slice):
        return array.at[places, pl.ds(first, size)]
    return array.at[places[:, None], first + jnp.arange(size)[None]]


def _load(ref, mask, other: int = 0):
    return plgpu.load(ref, mask=mask, other=other)


def _dot(x, y, summed: tuple[int, int]):
    return lax.dot_general(x, y, (((summed[0],), (summed[1],)), ((), ())), preferred_element_type=jnp.float32)


def _side(size: int, most: int) -> int:
    """A tile's side: a power of two, no larger than what holds all."""
    return min(most, max(LEAST, 2 ** math.ceil(math.log2(size))))
