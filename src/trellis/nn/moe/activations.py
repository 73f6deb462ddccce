"""What experts compute between their products on TPUs, by one kernel a pass: biases, the gate, each row's weight.

A compiler reads and writes the rows several times for these: the biases of a row's expert are a product, whose result
it adds in one pass over all rows and gates in the next, and gradients are made in two. It also does so for all rows of
a buffer. These kernels read and write each array once, and pass over rows that are not there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trellis.nn.gate import ClampedSwiGLU
from trellis.nn.moe import mosaic
from trellis.nn.moe.gradients import Apart, gradient_of, kept, read
from trellis.nn.moe.tiles import LANES, shaped, side_of, visits_of
from trellis.program.said import row_work

# Rows of a tile, for which there must be room: for all operands and results of the backward pass, twice, since one tile
# is computed while the next is on its way.
TILES, ARRAYS, VECTOR_MEMORY = (512, 256, LANES), 6, 24 * 2**20
# Rows that are computed at once: what a register of two-byte numbers holds of a column.
STRIP = 16
# Operations on float32 numbers for each element, by what a plan counts: a sigmoid is sixteen.
_FORWARD, _BACKWARD = 20, 32


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def activate(
    gated: jax.Array,
    upped: jax.Array,
    counted: jax.Array,
    biases: tuple[jax.Array, ...],
    sizes: jax.Array,
    gate: ClampedSwiGLU | None,
    interpret: bool = False,
) -> jax.Array:
    """The operand of the experts' last product, computed in float32 and rounded once: `rows mlp`.

    Args:
        gated, upped: the first two products, `rows mlp`, sorted by expert.
        counted: `f32["rows"]`, by which each row's result is multiplied.
        biases: what is added to each product, `experts mlp`; none or two.
        sizes: `i32["experts"]`, how many rows each has. Rows past the last are not written, nor are their gradients.
        gate: how the two are combined, if not as SwiGLU.
        interpret: runs the kernels on any backend, slowly.
    """
    count, columns = gated.shape
    tile, across = _tile(columns, gated.dtype.itemsize)
    visits, *tables = visits_of(_groups(sizes, biases), count, tile)
    shape, given = shaped(gated.shape, gated.dtype, *tables, gated, upped, _in_lanes(counted, tile), *_rows(biases))
    call = pl.pallas_call(
        functools.partial(_forward_kernel, gate=gate, tile=tile),
        name=f"experts_gate_forward{_named(gate)}",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            in_specs=_specs(tile, across, 2, biases),
            out_specs=_of_rows(tile, across),
            grid=(pl.cdiv(columns, across), visits),
            scratch_shapes=[pltpu.VMEM((tile, LANES), jnp.float32)],
        ),
        out_shape=shape,
        interpret=interpret,
        **_costs(gated, arrays=3, operations=_FORWARD),
    )
    with row_work(_FORWARD):
        return call(*given)


def _activate_forward(gated, upped, counted, biases, sizes, gate, interpret):
    # Calls `activate`: JAX would compute a kernel by itself again even where nothing reads it.
    return activate(gated, upped, counted, biases, sizes, gate, interpret), (gated, upped, counted, biases, sizes)


def _activate_backward(gate, interpret, kept, d):
    gradients, _ = _backward(d, *kept, gate, interpret, again=False)
    return *gradients, None


activate.defvjp(_activate_forward, _activate_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def activated_product(
    gated: jax.Array,
    upped: jax.Array,
    counted: jax.Array,
    biases: tuple[jax.Array, ...],
    weights: jax.Array | Apart,
    sizes: jax.Array,
    gate: ClampedSwiGLU | None,
    interpret: bool = False,
) -> jax.Array:
    """The experts' last product, of what `activate` makes. The backward pass makes that again beside its gradients.

    Args:
        gated, upped, counted, biases, sizes, gate, interpret: as there.
        weights: of the last product, `experts mlp embed`.
    """
    return mosaic.multiply(activate(gated, upped, counted, biases, sizes, gate, interpret), read(weights), sizes)


def _product_forward(gated, upped, counted, biases, weights, sizes, gate, interpret):
    operands, weights = (gated, upped, counted, biases, sizes), kept(weights)
    made = activated_product(gated, upped, counted, biases, weights, sizes, gate, interpret)
    return made, (operands, weights)


def _product_backward(gate, interpret, found, d):
    operands, weights = found
    sizes = operands[-1]
    of_operand = mosaic.rows_gradient((d,), (read(weights),), sizes, interpret=interpret)
    gradients, operand = _backward(of_operand, *operands, gate, interpret, again=True)
    of_weights = gradient_of(weights, mosaic.weights_gradient, operand, d, sizes, interpret=interpret)
    return *gradients, of_weights, None


activated_product.defvjp(_product_forward, _product_backward)


def _backward(d, gated, upped, counted, biases, sizes, gate, interpret: bool, *, again: bool):
    """The gradients by the products, the counts and the biases; and the operand of the last product `again`."""
    count, columns = gated.shape
    tile, across = _tile(columns, gated.dtype.itemsize)
    tiles, parts = pl.cdiv(count, tile), pl.cdiv(columns, across)
    visits, *tables = visits_of(_groups(sizes, biases), count, tile)
    operands = (d, gated, upped, _in_lanes(counted, tile), *_rows(biases))
    rows, given = shaped(gated.shape, gated.dtype, *tables, *operands)
    lanes, of_bias = (parts, tiles, tile // LANES, LANES), (sizes.shape[0], 1, columns)
    of_lanes = pl.BlockSpec((None, None, *lanes[2:]), lambda j, visit, group, place, *_: (j, place[visit], 0, 0))
    outs = [*[(rows, _of_rows(tile, across))] * (2 + again), (shaped(lanes, jnp.float32, *given)[0], of_lanes)]
    outs += [(shaped(of_bias, jnp.float32, *given)[0], _of_groups(across))] * len(biases)
    call = pl.pallas_call(
        functools.partial(_backward_kernel, gate=gate, tile=tile, columns=columns, biased=bool(biases), again=again),
        name=f"experts_gate_backward{_named(gate)}",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            in_specs=_specs(tile, across, 3, biases),
            out_specs=[spec for _, spec in outs],
            grid=(parts, visits),
            scratch_shapes=[pltpu.VMEM((tile, LANES), jnp.float32)] * 2
            + [pltpu.VMEM((STRIP, across), jnp.float32)] * len(biases),
        ),
        out_shape=[shape for shape, _ in outs],
        # In place: nobody reads the operands after this.
        input_output_aliases={len(tables) + n: n for n in range(2 + again)},
        interpret=interpret,
        **_costs(gated, arrays=5 + again, operations=_BACKWARD),
    )
    with row_work(_BACKWARD):
        made = call(*given)
    of_products, operand, (d_counted, *d_biases) = made[:2], made[2 : 2 + again], made[2 + again :]
    of_biases = tuple(x[:, 0].astype(bias.dtype) for x, bias in zip(d_biases, biases, strict=True))
    return (*of_products, d_counted.sum(0).reshape(-1)[:count], of_biases), operand[0] if again else None


def _forward_kernel(group, place, begins, ends, *refs, gate, tile: int):
    gated, upped, counted, *biases, out, column = refs
    visit = _Visit(group, place, begins, ends, tile)
    _to_column(counted, column)

    def strip(at, own):
        act = _combined(gate, *_with_biases(gated[at], upped[at], biases))
        made = (act * column[at, :1]).astype(out.dtype)
        out[at] = jnp.where(own, made, out[at])

    visit.strips(strip)


def _backward_kernel(group, place, begins, ends, *refs, gate, tile: int, columns: int, biased: bool, again: bool):
    given, made = refs[: 4 + 2 * biased], refs[4 + 2 * biased :]
    d, gated, upped, counted, *biases = given
    wide, d_counted, rest = made[: 2 + again], made[2 + again], made[3 + again :]
    of_biases, (column, sums, *totals) = rest[: len(biases)], rest[len(biases) :]
    visit = _Visit(group, place, begins, ends, tile)
    _to_column(counted, column)
    for total in totals:
        pl.when(visit.first)(functools.partial(_clear, total))
    across = gated.shape[1]
    width = columns - pl.program_id(0) * across  # a last tile may reach past the last column

    def strip(at, own):
        operands = _with_biases(gated[at], upped[at], biases)
        act, gradients = jax.vjp(functools.partial(_combined, gate), *operands)
        of_out = d[at].astype(jnp.float32)
        inside = own if columns % across == 0 else own & (lax.broadcasted_iota(jnp.int32, act.shape, 1) < width)
        sums[at] = jnp.broadcast_to(jnp.where(inside, of_out * act, 0.0).sum(1, keepdims=True), (STRIP, LANES))
        changes = gradients(of_out * column[at, :1])
        results = (*changes, act * column[at, :1])[: len(wide)]
        for ref, result in zip(wide, results, strict=True):
            ref[at] = jnp.where(own, result.astype(ref.dtype), ref[at])
        for total, change in zip(totals, changes):
            total[...] += jnp.where(own, change, 0.0)

    visit.strips(strip)
    for i in range(tile // LANES):
        rows = pl.ds(i * LANES, LANES)
        number = visit.here + i * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        d_counted[i : i + 1] = jnp.where(visit.has(number), sums[rows].T[:1], d_counted[i : i + 1])
    for total, of_bias in zip(totals, of_biases, strict=True):

        @pl.when(visit.last)
        def _(total=total, of_bias=of_bias):
            of_bias[...] = total[...].sum(0, keepdims=True)


class _Visit:
    """One group's rows of one tile."""

    def __init__(self, group, place, begins, ends, tile: int):
        number, count = pl.program_id(1), pl.num_programs(1)
        mine, self._tile = group[number], tile
        self._begin, self._end, self.here = begins[mine], ends[mine], place[number] * tile
        self.first = (number == 0) | (group[jnp.maximum(number - 1, 0)] != mine)
        self.last = (number == count - 1) | (group[jnp.minimum(number + 1, group.shape[0] - 1)] != mine)

    def has(self, number: jax.Array) -> jax.Array:
        """Whether rows are the group's."""
        return (self._begin <= number) & (number < self._end)

    def strips(self, compute: Callable[[Any, jax.Array], None]) -> None:
        """Calls a function with each strip of the tile that has rows of the group, and with which of its rows are."""
        first = jnp.clip(self._begin - self.here, 0, self._tile) // STRIP
        last = pl.cdiv(jnp.clip(self._end - self.here, 0, self._tile), STRIP)

        def strip(i, _):
            at = pl.ds(pl.multiple_of(i * STRIP, STRIP), STRIP)
            number = self.here + i * STRIP + lax.broadcasted_iota(jnp.int32, (STRIP, 1), 0)
            compute(at, self.has(number))

        lax.fori_loop(first, last, strip, None)


def _to_column(counted, column) -> None:
    """Turns numbers that lie side by side in lanes, so that each stands before its row."""
    for i in range(counted.shape[0]):
        column[pl.ds(i * LANES, LANES)] = jnp.broadcast_to(counted[i : i + 1], (LANES, LANES)).T


def _clear(total) -> None:
    total[...] = jnp.zeros_like(total)


def _with_biases(gated, upped, biases) -> tuple[jax.Array, ...]:
    wide = (x.astype(jnp.float32) for x in (gated, upped))
    if not biases:
        return tuple(wide)
    return tuple(x + bias[...].astype(jnp.float32) for x, bias in zip(wide, biases, strict=True))


def _combined(gate: ClampedSwiGLU | None, gated, upped):
    return jax.nn.silu(gated) * upped if gate is None else gate(gated, upped)


def _groups(sizes: jax.Array, biases: Sequence[jax.Array]) -> jax.Array:
    """The groups of rows that differ in what is done to them: all rows are one without biases."""
    return sizes if biases else sizes.sum(dtype=jnp.int32)[None]


def _rows(biases: Sequence[jax.Array]) -> list[jax.Array]:
    return [bias[:, None] for bias in biases]


def _in_lanes(counted: jax.Array, tile: int) -> jax.Array:
    """`tiles tile/lanes lanes` of one number for each row."""
    tiles = pl.cdiv(counted.shape[0], tile)
    padded = jnp.pad(counted.astype(jnp.float32), (0, tiles * tile - counted.shape[0]))
    return padded.reshape(tiles, tile // LANES, LANES)


def _of_rows(tile: int, across: int) -> pl.BlockSpec:
    return pl.BlockSpec((tile, across), lambda j, visit, group, place, *_: (place[visit], j))


def _of_groups(across: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, 1, across), lambda j, visit, group, *_: (group[visit], 0, j))


def _specs(tile: int, across: int, arrays: int, biases: Sequence[jax.Array]) -> list[pl.BlockSpec]:
    """Those of arrays of rows, of their counts, and of biases."""
    lanes = pl.BlockSpec((None, tile // LANES, LANES), lambda j, visit, group, place, *_: (place[visit], 0, 0))
    return [*[_of_rows(tile, across)] * arrays, lanes, *[_of_groups(across)] * len(biases)]


def _costs(rows: jax.Array, arrays: int, operations: int) -> dict[str, Any]:
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=2 * VECTOR_MEMORY
        ),
        "cost_estimate": pl.CostEstimate(
            flops=operations * rows.size, bytes_accessed=arrays * rows.nbytes, transcendentals=rows.size
        ),
    }


def _named(gate: ClampedSwiGLU | None) -> str:
    """The gate in a kernel's name: `_7_0_by_1_702`."""
    return "" if gate is None else f"_{float(gate.limit)!r}_by_{float(gate.slope)!r}".replace(".", "_")


def _tile(columns: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile. Each core of a chip of two gets half of the columns, if they are not few; and fewer
    if there is no room for so many."""
    half = -(-columns // (2 * LANES)) * LANES if columns > 2 * LANES else columns
    for tile in TILES:
        most = VECTOR_MEMORY // (2 * ARRAYS * tile * itemsize) // LANES * LANES
        if half <= most:
            return tile, half
    across = side_of(columns, most)
    return TILES[-1], across if columns % across == 0 else most
