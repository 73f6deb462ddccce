"""Our own TPU kernels for the parts of an attention that follow each other: a ring's.

Each takes the result so far and returns it with one more tile, in place: the softmax over more keys begins where that
over the keys before ended, at its maximum `m`, its sum `l` and its result `o` (Milakov and Gimelshein, 2018,
arXiv:1805.02867; Dao, 2023, arXiv:2307.08691). With the log of the sum as `m`, the sum is 1 and `o` is the result
itself, so only these two are kept. The gradients so far are read and written in the same way. So nothing of a tile is
put together, added, cut out or copied outside of its kernel.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
# Scores are exponents of two, since the vector units raise two to a power: exp(x) is exp2(x / LN2), a product more.
LN2 = math.log(2.0)
# The score of a key that is not seen; less than the log of a sum over no keys (`sliced.tile.NOTHING`).
HIDDEN = -2.0e38
# How many of a step's blocks of scores are unrolled.
_WRITTEN_OUT = 4


def block_of(length: int, most: int) -> int:
    """The largest multiple of 128 that divides `length` and is at most `most`."""
    return max(block for block in range(LANES, most + 1, LANES) if length % block == 0)


@dataclass(frozen=True, slots=True)
class Units:
    """A chip's units.

    Attributes:
        memory: bytes of vector memory that a kernel may take.
        columns: columns of a product that its matrix units make at once.
    """

    memory: int
    columns: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a kernel's blocks.

    Attributes:
        queries, keys: positions that are in the vector memory together.
        scores: how many of the keys are multiplied at once.
    """

    queries: int
    keys: int
    scores: int


@dataclass(frozen=True, slots=True)
class Scores:
    """How a tile's scores are made; if it is causal, only in blocks that are seen.

    Attributes:
        queries, keys: positions of the tile.
        causal: whether a query sees only keys up to its own place in the tile.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        blocks: sizes, which divide the tile's.
        units: those of the chip.
        interpret: runs the kernel on any backend, slowly.
    """

    queries: int
    keys: int
    causal: bool
    softcap: float | None
    blocks: Blocks
    units: Units
    interpret: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """What a compiled program says of a kernel's call; with its operands, this describes all of it."""
        sizes = dict(queries=self.queries, keys=self.keys, softcap=self.softcap)
        blocks = dict(block_queries=self.blocks.queries, block_keys=self.blocks.keys)
        return {name: str(value) for name, value in (sizes | blocks).items()}

    def last(self, row):
        """The last block of keys that a block of queries sees."""
        blocks = self.blocks
        end = (row + 1) * blocks.queries - 1 if self.causal else self.keys - 1
        return lax.div(jnp.minimum(end, self.keys - 1), blocks.keys)

    def each_block(self, row, column, block) -> None:
        """Calls `block(first, masked)` for each block of scores that is seen, from key `first` in memory on."""
        queries, keys, size = self.blocks.queries, self.blocks.keys, self.blocks.scores
        written = next(n for n in range(_WRITTEN_OUT, 0, -1) if keys // size % n == 0)

        def some(turn, _):
            for index in range(written):
                first = pl.multiple_of((turn * written + index) * size, size)
                if not self.causal:
                    block(first, False)
                    continue
                key = column * keys + first
                whole = key + size - 1 <= row * queries
                pl.when(whole)(functools.partial(block, first, False))
                pl.when(~whole & (key < (row + 1) * queries))(functools.partial(block, first, True))

        turns = keys // (size * written)
        some(0, None) if turns == 1 else lax.fori_loop(0, turns, some, None)

    def of(self, left, right):
        """The scores, and under a soft cap the `tanh` that they are made from."""
        scores = lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if self.softcap is None:
            return scores, None
        bent = jnp.tanh(scores * (LN2 / self.softcap))
        return (self.softcap / LN2) * bent, bent

    def seen(self, scores, query, key, masked: bool, query_ids, key_ids, axis: int):
        """Scores of keys that are seen, queries along `axis` from `query` on and keys along the other from `key` on."""
        if query_ids is not None:
            scores = jnp.where(query_ids == key_ids, scores, HIDDEN)
        if masked:
            place = lambda first, dim: first + lax.broadcasted_iota(jnp.int32, scores.shape, dim)
            scores = jnp.where(place(key, 1 - axis) <= place(query, axis), scores, HIDDEN)
        return scores


def _column(row, count: int):
    """A row of numbers as a column, the same in `count` lanes."""
    return jnp.tile(jnp.broadcast_to(row, (LANES, row.shape[1])).T, (1, count // LANES))


def forward(scores: Scores, start, q, k, v, ids, out, log_sum):
    """The result over the keys so far and a tile's.

    Args:
        scores: how they are made.
        start: `i32[2]`, the tile's first block of queries and of keys.
        q: `batch heads pos head_dim`, times the scale of the scores over `LN2`.
        k, v: `batch kv_heads key_pos head_dim`.
        ids: the documents, `batch 1 pos` and `batch 1 key_pos`, or None.
        out: `f32["batch heads pos head_dim"]`.
        log_sum: `f32["batch heads 1 pos"]`.
    """
    (batch, heads, _, width), kv_heads, blocks = q.shape, k.shape[1], scores.blocks
    rows, columns = scores.queries // blocks.queries, scores.keys // blocks.keys
    row = lambda i, start: start[0] + i
    column = lambda i, j, start: start[1] + jnp.minimum(j, scores.last(i))
    queries = lambda size: pl.BlockSpec((None, None, blocks.queries, size), lambda b, h, i, j, s: (b, h, row(i, s), 0))
    keys = lambda size: pl.BlockSpec(
        (None, None, blocks.keys, size), lambda b, h, i, j, s: (b, lax.div(h, heads // kv_heads), column(i, j, s), 0)
    )
    logs = pl.BlockSpec((None, None, 1, blocks.queries), lambda b, h, i, j, s: (b, h, 0, row(i, s)))
    documents = [
        pl.BlockSpec((None, 1, blocks.queries), lambda b, h, i, j, s: (b, 0, row(i, s))),
        pl.BlockSpec((None, 1, blocks.keys), lambda b, h, i, j, s: (b, 0, column(i, j, s))),
    ]
    given = [] if ids is None else list(ids)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        in_specs=[queries(width), keys(width), keys(v.shape[3]), *documents[: len(given)], queries(v.shape[3]), logs],
        out_specs=[queries(v.shape[3]), logs],
        grid=(batch, heads, rows, columns),
        scratch_shapes=[pltpu.VMEM((blocks.queries, size), jnp.float32) for size in (LANES, LANES, v.shape[3])],
    )
    body = functools.partial(_forward, scores=scores, documents=ids is not None)
    return _in_place(body, "attention_further", scores, grid, [start, q, k, v, *given], [out, log_sum])


def _in_place(body, name: str, scores: Scores, grid, given: list, so_far: list):
    """Calls a kernel whose last operands are the results so far, and whose results take their place."""
    call = pl.pallas_call(
        body,
        name=name,
        grid_spec=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in so_far],
        input_output_aliases={len(given) + i: i for i in range(len(so_far))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=scores.units.memory
        ),
        metadata=scores.metadata,
        interpret=scores.interpret,
    )
    return call(*given, *so_far)


def _forward(start, q, k, v, *rest, scores: Scores, documents: bool):
    *ids, out_before, log_before, out, log_sum, top, total, sums = rest
    row, column, blocks = pl.program_id(2), pl.program_id(3), scores.blocks
    # If a product with the values leaves half of the matrix units' columns free, weights are summed in these.
    beside = v.shape[1] == LANES < scores.units.columns

    @pl.when(column == 0)
    def _():
        top[...] = _column(log_before[...] / LN2, LANES)
        total[...] = jnp.ones_like(total)
        sums[...] = out_before[...]

    def block(first, masked: bool):
        here = pl.ds(first, blocks.scores)
        made, _ = scores.of(q[...], k[here, :])
        pair = (_column(ids[0][...], blocks.scores), ids[1][:, here]) if documents else (None, None)
        made = scores.seen(made, row * blocks.queries, column * blocks.keys + first, masked, *pair, axis=0)
        highest = jnp.maximum(top[...], made.max(axis=1, keepdims=True))
        weights = jnp.exp2(made - jnp.tile(highest, (1, blocks.scores // LANES)))
        less = jnp.exp2(top[...] - highest)
        top[...] = highest
        values, width = v[here, :], v.shape[1]
        if beside:
            values = jnp.concatenate([values, jnp.ones((blocks.scores, LANES), v.dtype)], axis=1)
        found = jnp.dot(weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        sums[...] = _wide(less, width) * sums[...] + found[:, :width]
        total[...] = less * total[...] + (found[:, width:] if beside else weights.sum(axis=1, keepdims=True))

    pl.when(column <= scores.last(row))(lambda: scores.each_block(row, column, block))

    @pl.when(column == pl.num_programs(3) - 1)
    def _():
        out[...] = sums[...] * _wide(1.0 / total[...], sums.shape[1])
        log_sum[...] = (LN2 * top[...] + jnp.log(total[...])).T[:1]


def _wide(x, width: int):
    """The same number in each of `width` lanes."""
    return jnp.tile(x, (1, -(-width // LANES)))[:, :width]


def backward(scores: Scores, start, q, k, v, ids, known, log_sum, d_out, d_q, d_k, d_v):
    """The gradients so far with those of a tile, whose keys are one block.

    Args:
        scores, start, q, k, v, ids: as in `forward`.
        known, log_sum: `f32["batch heads 1 pos"]`, the result times its gradient, and the log of the sums, of all keys.
        d_out: like the result.
        d_q: `f32["batch heads pos head_dim"]`, of the queries times the scale alone.
        d_k, d_v: like `k` and `v`, in any type.
    """
    (batch, heads, _, width), kv_heads, blocks = q.shape, k.shape[1], scores.blocks
    rows, group = scores.queries // blocks.queries, heads // kv_heads
    at = lambda b, g, h, i, s: (b, g * group + h, s[0] + i, 0)
    queries = lambda size: pl.BlockSpec((None, None, blocks.queries, size), at)
    once = dict(pipeline_mode=pl.Buffered(1))  # for all queries of a group: nothing to fetch while these are computed
    place = lambda b, g, h, i, s: (b, g, s[1], 0)
    keys = [pl.BlockSpec((None, None, blocks.keys, size), place, **once) for size in (width, v.shape[3])]
    line = lambda b, g, h, i, s: (b, g * group + h, 0, s[0] + i)
    lines = [pl.BlockSpec((None, None, 1, blocks.queries), line)] * 2
    documents = [
        pl.BlockSpec((None, 1, blocks.queries), lambda b, g, h, i, s: (b, 0, s[0] + i)),
        pl.BlockSpec((None, 1, blocks.keys), lambda b, g, h, i, s: (b, 0, s[1])),
    ]
    given = [] if ids is None else list(ids)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        in_specs=[
            queries(width), *keys, *documents[: len(given)], *lines, queries(v.shape[3]), queries(width), *keys,
        ],
        out_specs=[queries(width), *keys],
        grid=(batch, kv_heads, group, rows),
        scratch_shapes=[pltpu.VMEM((blocks.keys, size), jnp.float32) for size in (width, v.shape[3])],
    )  # fmt: skip
    body = functools.partial(_backward, scores=scores, documents=ids is not None)
    operands = [start, q, k, v, *given, known, log_sum, d_out]
    return _in_place(body, "attention_gradient_further", scores, grid, operands, [d_q, d_k, d_v])


def _backward(start, q, k, v, *rest, scores: Scores, documents: bool):
    *ids, known, log_sum, d_out, d_q_before, d_k_before, d_v_before, d_q, d_k, d_v, sum_k, sum_v = rest
    member, row, blocks = pl.program_id(2), pl.program_id(3), scores.blocks

    @pl.when((member == 0) & (row == 0))
    def _():
        sum_k[...] = d_k_before[...].astype(jnp.float32) / LN2
        sum_v[...] = d_v_before[...].astype(jnp.float32)

    d_q[...] = d_q_before[...]

    def block(first, masked: bool):
        here = pl.ds(first, blocks.scores)
        made, bent = scores.of(k[here, :], q[...])
        pair = (ids[0][...], _column(ids[1][:, here], blocks.queries)) if documents else (None, None)
        made = scores.seen(made, row * blocks.queries, first, masked, *pair, axis=1)
        weights = jnp.exp2(made - log_sum[...] / LN2)
        sum_v[here, :] += jnp.dot(weights.astype(d_out.dtype), d_out[...], preferred_element_type=jnp.float32)
        pulled = lax.dot_general(v[here, :], d_out[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        change = (pulled - known[...]) * weights
        if bent is not None:
            change = change * (1 - bent * bent)
        sum_k[here, :] += jnp.dot(change.astype(q.dtype), q[...], preferred_element_type=jnp.float32)
        d_q[...] += jnp.dot(change.T.astype(k.dtype), k[here, :], preferred_element_type=jnp.float32)

    scores.each_block(row, 0, block)

    @pl.when((member == pl.num_programs(2) - 1) & (row == pl.num_programs(3) - 1))
    def _():
        d_k[...] = (LN2 * sum_k[...]).astype(d_k.dtype)
        d_v[...] = sum_v[...].astype(d_v.dtype)
