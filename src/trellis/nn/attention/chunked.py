"""Attention in unrolled chunks of queries that never touch the keys they cannot see.

Each chunk's scores live only while that chunk is computed, forward and backward: the backward pass computes them
again, as FlashAttention does (Dao et al., 2022, arXiv:2205.14135), but at the size of a whole chunk times all its keys,
because on a CPU a large product is worth more than a small working set. It computes them as the forward pass does, and
divides the narrow operand by their sums; so if there is memory, the compiler keeps the exponentials instead.
Under causality half of all blocks are skipped, which no mask over a whole score matrix achieves.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trellis.mesh.linear import linear
from trellis.named.backend import copied_turned
from trellis.named.tuned import tuned
from trellis.nn.attention.pattern import Pattern, hidden_score, same_document
from trellis.nn.attention.sliced.tile import Ids, Tile

CHUNK = 128
MAX_CHUNKS = 16


class _Settings(NamedTuple):
    pattern: Pattern
    scale: float
    logit_softcap: float | None
    upcast: bool
    ahead: int  # the position of the first query minus that of the first key
    chunk: int
    save_name: str | None


def chunk_size(pos: int) -> int:
    """Queries per chunk: 128 or what the program was tuned for, or more if that would unroll over 16 chunks.

    >>> chunk_size(512), chunk_size(8192)
    (128, 512)
    """
    chunk = tuned().attention_chunk or CHUNK
    return max(chunk, -(-pos // (MAX_CHUNKS * chunk)) * chunk)


def chunked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None,
    *,
    pattern: Pattern,
    scale: float,
    logit_softcap: float | None,
    upcast: bool,
    chunk: int | None = None,
    save_name: str | None = None,
) -> jax.Array:
    """Softmax attention in chunks of queries, each computed again in the backward pass.

    Arguments as in `trellis.nn.dot_product_attention`, and:

    Args:
        chunk: queries per chunk.
        save_name: the name under which the output and the log-sum-exp are known to `jax.checkpoint` policies.
    """
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:  # queries are fewer than scores, and lose no precision
        q, scale = q * jnp.asarray(scale, q.dtype), 1.0
    settings = _Settings(pattern, scale, logit_softcap, upcast, 0, chunk or chunk_size(q.shape[1]), save_name)
    batch, pos, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    # One product per kv head: heads that share a key lie next to each other as rows of one matrix.
    grouped = q.reshape(batch, pos, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    # Tied to the queries: masks that XLA takes out of a loop over microbatches would differ forward and backward, and
    # what is made with them would be made twice.
    positions, grouped = jax.lax.optimization_barrier((_positions(q, k, 1), grouped))
    out = _attend(grouped, keys, values, (positions, segment_ids), settings)
    return out.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], v.shape[-1])


def _positions(q, k, axis: int):
    return jnp.arange(max(q.shape[axis], k.shape[axis]), dtype=jnp.int32)


def _spans(pos: int, key_pos: int, settings: _Settings):
    """`(start, stop, first, last)` of each chunk: its queries, and the keys that it can see."""
    for start in range(0, pos, settings.chunk):
        stop = min(start + settings.chunk, pos)
        yield start, stop, *settings.pattern.key_range(start + settings.ahead, stop + settings.ahead, key_pos)


def _rows(x, span):
    """One chunk of `batch kv_heads groups pos ...` as the rows of one matrix a key head: `batch kv_heads rows ...`."""
    part = x[:, :, :, span[0] : span[1]]
    return part.reshape(*part.shape[:2], part.shape[2] * part.shape[3], *part.shape[4:])


def _turned(x):
    """`batch kv_heads rows head_dim` as `batch kv_heads head_dim rows`, copied, not transposed inside a product."""
    return copied_turned(x, (0, 1, 3, 2))


def _weights(q, k, tokens, span, settings: _Settings):
    """One chunk's exponentials of scores less the largest, these largest, and the derivative of the cap (or None).

    Args:
        tokens: positions from 0, and documents or None.
    """
    positions, segment_ids = tokens
    start, stop, first, last = span
    dtype = jnp.float32 if settings.upcast else q.dtype
    scores = jnp.einsum("bkth,bksh->bkts", _rows(q, span), k[:, :, first:last], preferred_element_type=dtype)
    scores = scores * jnp.asarray(settings.scale, dtype)
    slope = None
    if settings.logit_softcap is not None:
        cap = jnp.asarray(settings.logit_softcap, dtype)
        bent = jnp.tanh(scores / cap)
        scores, slope = bent * cap, 1 - bent * bent
    ahead, groups = settings.ahead, q.shape[2]
    if settings.pattern.hides(start + ahead, stop + ahead, first, last):
        queries = jnp.tile(positions[start:stop] + ahead, groups)
        seen = settings.pattern.visible(queries, positions[first:last])
        if seen is not None:
            scores = jnp.where(seen[None, None], scores, hidden_score(dtype))
    if segment_ids is not None:
        query_ids = jnp.tile(segment_ids[0][:, start:stop], (1, groups))
        together = same_document(query_ids, segment_ids[1][:, first:last])
        scores = jnp.where(together[:, None], scores, hidden_score(dtype))
    largest = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - largest), largest, slope


def _forward(q, k, v, tokens, settings: _Settings):
    outs, sums = [], []
    for span in _spans(q.shape[3], k.shape[2], settings):
        weights, largest, _ = _weights(q, k, tokens, span, settings)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        values = v[:, :, span[2] : span[3]]
        out = jnp.einsum("bkts,bksh->bkth", weights.astype(v.dtype), values, preferred_element_type=total.dtype)
        chunk = (*q.shape[:3], span[1] - span[0])
        outs.append((out / total).astype(q.dtype).reshape(*chunk, v.shape[-1]))
        sums.append((largest + jnp.log(total)).reshape(*chunk, 1))
    return jnp.concatenate(outs, axis=3), jnp.concatenate(sums, axis=3)


def _plus(whole, part, span):
    """Adds a chunk's share where its keys are; for all keys without a scatter, at which JAX 0.11.2 ends the process."""
    return whole + part if part.shape == whole.shape else whole.at[..., span[2] : span[3]].add(part)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _attend(q, k, v, tokens, settings: _Settings):
    return _forward(q, k, v, tokens, settings)[0]


@_attend.defjvp
def _derivative(settings: _Settings, primals, tangents):
    q, k, v, tokens = primals
    out, log_sum = _forward(q, k, v, tokens, settings)
    if settings.save_name is not None:
        out, log_sum = (checkpoint_name(x, settings.save_name) for x in (out, log_sum))
    change = linear(partial(_attend_change, settings), partial(_attend_bwd, settings), like=out)
    return out, change((q, k, v, tokens, out, log_sum), tangents[:3])


def _attend_change(settings: _Settings, kept, changes):
    q, k, v, tokens, *_ = kept
    return jax.jvp(lambda q, k, v: _forward(q, k, v, tokens, settings)[0], (q, k, v), tuple(changes))[1]


def _attend_bwd(settings: _Settings, residuals, d_out):
    q, k, v, tokens, out, log_sum = residuals
    dtype = log_sum.dtype
    d_queries = []
    # Sums over queries: a CPU multiplies fast if they are last on the left, so the narrow operand is transposed, and
    # gradients of keys and values are made transposed as well, as batch kv_heads head_dim key_pos.
    d_keys, d_values = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), dtype) for x in (k, v))
    product = partial(jnp.einsum, preferred_element_type=dtype)
    for span in reversed([*_spans(q.shape[3], k.shape[2], settings)]):  # all keys first, where the sums are still zero
        seen = (slice(None),) * 2 + (slice(span[2], span[3]),)
        weights, largest, slope = _weights(q, k, tokens, span, settings)
        d_rows = (_rows(d_out, span).astype(dtype) * jnp.exp(largest - _rows(log_sum, span))).astype(q.dtype)
        d_values = _plus(d_values, product("bkht,bkts->bkhs", _turned(d_rows), weights.astype(v.dtype)), span)
        d_weights = product("bkth,bksh->bkts", d_rows, v[seen])
        mean = jnp.sum(_rows(out, span).astype(dtype) * d_rows.astype(dtype), axis=-1, keepdims=True)
        d_scores = weights * (d_weights - mean) * jnp.asarray(settings.scale, dtype)
        if slope is not None:
            d_scores = d_scores * slope
        d_scores = d_scores.astype(q.dtype)
        d_q = product("bkts,bksh->bkth", d_scores, k[seen]).astype(q.dtype)
        d_queries.append(d_q.reshape(*q.shape[:3], span[1] - span[0], q.shape[-1]))
        d_keys = _plus(d_keys, product("bkht,bkts->bkhs", _turned(_rows(q, span)), d_scores), span)
    d_k, d_v = (_turned(d).astype(x.dtype) for d, x in ((d_keys, k), (d_values, v)))
    return jnp.concatenate(d_queries[::-1], axis=3), d_k, d_v


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTiles:
    """Tiles in chunks of queries. Arguments as in `chunked_attention`."""

    scale: float
    logit_softcap: float | None = None
    upcast: bool = True
    chunk: int | None = None
    axis = 2
    whole_lanes = False
    further = None
    opaque = False

    def forward(self, tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids):
        out, log_sum = _forward(_grouped(q, k), k, v, (_positions(q, k, 2), ids), self._settings(tile))
        return out.reshape(*q.shape[:3], -1), log_sum[..., 0].reshape(q.shape[:3]).astype(jnp.float32)

    def known(self, out, d_out):
        return out

    def backward(self, tile: Tile, q, k, v, ids: Ids, known, log_sum, d_out):
        settings = self._settings(tile)
        q5, out, d_out = (_grouped(x, k) for x in (q, known, d_out))
        log_sum = log_sum.reshape(q5.shape[:4])[..., None].astype(jnp.float32 if self.upcast else q.dtype)
        d_q, d_k, d_v = _attend_bwd(settings, (q5, k, v, (_positions(q, k, 2), ids), out, log_sum), d_out)
        return d_q.reshape(q.shape), d_k, d_v

    def _settings(self, tile: Tile) -> _Settings:
        chunk = self.chunk or chunk_size(tile.queries)
        return _Settings(tile.pattern, self.scale, self.logit_softcap, self.upcast, tile.ahead, chunk, None)


def _grouped(x, k):
    """`batch heads pos head_dim` as `batch kv_heads groups pos head_dim`."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])
