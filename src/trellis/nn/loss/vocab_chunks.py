"""Cross entropy with an unembedding that stays sliced over the tokens' own mesh axes and is gathered in chunks.

Chunks of the vocabulary follow each other as blocks of keys do in attention, with the largest logit, the sum of
exponentials and the pull on `x` so far (the online softmax of Milakov and Gimelshein, 2018, arXiv:1805.02867). The
exponentials are kept, in the type of `x`; when the sums are known they become the gradients of the logits, which give a
chunk of the unembedding's gradient, and that is scattered at once. The whole unembedding is never on one device, nor is
its gradient; each chunk is gathered once, and its logits are computed once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from trellis.mesh.manual.ops import Axes, vary, varying_axes
from trellis.mesh.parts import with_one
from trellis.named.narrow import Rounded
from trellis.nn.loss.formulas import Settings, capped, instantiated, kept_as, times, weighed
from trellis.nn.loss.products import Factor, NarrowFactors, gradient_factor, to_logits, to_unembed, to_x

# A chunk's float32 logits take about this many bytes.
CHUNK_BYTES = 1 << 27
# Rows of a chunk on each device are a multiple of this, a TPU's tile: what is gathered is then in order in memory.
TILE = 8


class VocabChunks(NamedTuple):
    """How an unembedding, `"vocab embed"`, is sliced over devices, and how each part is cut into chunks of rows.

    Attributes:
        dim: what is sliced, 0 for `vocab` or 1 for `embed`.
        axes: the mesh axes that slice it.
        devices: how many slices they make.
        local: rows of one device.
        rows: how many of them a chunk has; the last one may have fewer.
    """

    dim: int
    axes: Axes
    devices: int
    local: int
    rows: int

    @property
    def number(self) -> int:
        """How many chunks there are."""
        return -(-self.local // self.rows)


def cut(dim: int, axes: Axes, devices: int, local: int, tokens: int, chunk_bytes: int | None = None) -> VocabChunks:
    """Chunks whose float32 logits, for `tokens` tokens, take about `chunk_bytes`, or `CHUNK_BYTES` if None.

    >>> chunks = cut(0, ("data",), 256, local=504, tokens=4096)
    >>> chunks.number, chunks.rows
    (16, 32)
    """
    wide = local if dim else local * devices
    rows = -(-local // -(-4 * tokens * wide // (chunk_bytes or CHUNK_BYTES)))
    return VocabChunks(dim, axes, devices, local, min(-(-rows // TILE) * TILE, local))


class _Sums(NamedTuple):
    """What is known of each token after some chunks: `"token"`, the last two `"token embed"`."""

    largest: jax.Array  # logit
    total: jax.Array  # sum of exp(logit - largest)
    hit: jax.Array  # the target's logit
    pull: jax.Array  # sum of exp(logit - largest) times its row
    row: jax.Array  # the target's


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def summed_by_vocab(
    x, unembed, targets, weights, narrow: NarrowFactors | None, settings: Settings, chunks: VocabChunks
):
    """The total, and the parts of it, of this device's tokens against the whole vocabulary.

    Args:
        x: `"token embed"`.
        unembed: this device's part of `"vocab embed"`.
        targets: `i32["token"]`, counted in the whole vocabulary.
        weights: `f32["token"]`.
        narrow: what is multiplied instead of `x` and `unembed`, with one scale each, or None.
        settings: how.
        chunks: how the part is cut.
    """
    sums, _ = _all_chunks(x, unembed, targets, narrow, settings, chunks, keep=False)
    return weighed(sums.largest, sums.total, sums.hit, targets, weights, settings.z_loss)[0]


def _fwd(*given):
    *primals, settings, chunks = given
    weighted = primals[3].perturbed  # a mask has no gradient, and nothing is kept for it
    result, gradients, of_weights = _with_gradients(*custom_vjp_primal_tree_values(tuple(primals)), settings, chunks)
    return result, (gradients, jnp.zeros((), primals[1].value.dtype), of_weights if weighted else None)


def _with_gradients(x, unembed, targets, weights, narrow: NarrowFactors | None, settings, chunks: VocabChunks):
    sums, kept = _all_chunks(x, unembed, targets, narrow, settings, chunks, keep=True)
    factor, limit = (x, None) if narrow is None else (narrow.x, narrow.limit)
    result, pull, of_weights = weighed(sums.largest, sums.total, sums.hit, targets, weights, settings.z_loss)
    push = weights if (cap := settings.logit_softcap) is None else weights * (1 - (sums.hit / cap) ** 2)
    d_x = pull[:, None] * sums.pull - push[:, None] * sums.row.astype(jnp.float32)

    def step(_, part):
        index, powers, largest = part
        scale = pull * jnp.exp(largest - sums.largest)
        hot = jnp.arange(powers.shape[1])[None, :] == _column(targets, index, chunks)[:, None]
        d_logits = powers.astype(jnp.float32) * scale[:, None]
        d_logits = lax.select(hot, d_logits - push[:, None], d_logits)  # no zeros, see `token_chunks`
        d_logits = gradient_factor(d_logits, x.dtype, settings, limit)
        d_chunk = to_unembed(d_logits, factor, settings).astype(kept_as(unembed.dtype))
        for axis in chunks.axes:  # over several at once libtpu sums everything, then slices it
            d_chunk = lax.psum_scatter(d_chunk, axis, scatter_dimension=chunks.dim, tiled=True)
        return None, d_chunk

    parts = jnp.concatenate([lax.scan(step, None, some)[1] for some in kept])
    return result, (d_x.astype(x.dtype), parts.reshape(-1, unembed.shape[1])[: chunks.local]), of_weights


def _bwd(settings, chunks: VocabChunks, kept, cotangents):
    (d_x, d_unembed), of_type, of_weights = kept
    d_total, (*_, d_tokens) = instantiated(cotangents)
    d_weights = None if of_weights is None else of_weights * d_total + d_tokens
    d_x, d_unembed = times((d_x, d_unembed), d_total)
    return d_x, d_unembed.astype(of_type.dtype), None, d_weights, None


summed_by_vocab.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _all_chunks(
    x, unembed, targets, narrow: NarrowFactors | None, settings: Settings, chunks: VocabChunks, *, keep: bool
):
    """Sums over all chunks; if `keep`, also `(index, exponentials, the largest logits they were taken with)` of each.

    Two loops, each over half of them: libtpu finds room for two buffers of half a gigabyte, not for one of both.
    """
    tokens, embed = x.shape
    full = lambda value, *shape: vary(jnp.full((tokens, *shape), value, jnp.float32), varying_axes(x, unembed))
    row = full(0.0, embed).astype(unembed.dtype)
    sums = _Sums(full(-jnp.inf), full(0.0), full(0.0), full(0.0, embed), row)
    padding = chunks.number * chunks.rows - chunks.local
    table = unembed if narrow is None else narrow.unembed.values
    parts = jnp.pad(table, ((0, padding), (0, 0))).reshape(chunks.number, chunks.rows, -1)
    factor = x if narrow is None else narrow.x
    opened = (lambda chunk: chunk) if narrow is None else lambda chunk: Rounded(chunk, narrow.unembed.scale)
    wide = chunks.rows * (1 if chunks.dim else chunks.devices)
    # The exponentials' buffer is made when `x` is there. Left alone, libtpu makes it, a gigabyte, before the layers.
    zero, _ = lax.optimization_barrier((jnp.zeros((), x.dtype), x))
    zero = vary(zero, varying_axes(sums.total))

    def step(carry, part):
        sums, kept = carry
        place, index, mine = part
        chunk = lax.all_gather(mine, chunks.axes, axis=chunks.dim, tiled=True)
        sums, powers = _one_chunk(sums, factor, opened(chunk), index, targets, settings, chunks, x.dtype)
        return (sums, with_one(kept, powers, (place,)) if keep else None), sums.largest

    found, half = [], -(-chunks.number // 2)
    for first, last in ((0, half), (half, chunks.number)):
        if (count := last - first) > 0:
            places, index = jnp.arange(count), jnp.arange(first, last)
            room = jnp.broadcast_to(zero, (count, tokens, wide)) if keep else None
            (sums, kept), largest = lax.scan(step, (sums, room), (places, index, parts[first:last]))
            found.append((index, kept, largest))
    return sums, found


def _one_chunk(sums: _Sums, x: Factor, chunk: Factor, index, targets, settings: Settings, chunks: VocabChunks, dtype):
    logits = to_logits(x, chunk, settings)
    logits, slope = capped(logits, settings.logit_softcap)
    logits = jnp.where(_real(index, settings.vocab_size, chunks), logits, -jnp.inf)
    largest = jnp.maximum(sums.largest, jnp.max(logits, axis=1))
    shrink = jnp.exp(sums.largest - largest)
    powers = jnp.exp(logits - largest[:, None])
    total = shrink * sums.total + jnp.sum(powers, axis=1)
    powers = powers if slope is None else powers * slope
    pulls = to_x(gradient_factor(powers, dtype, settings, jnp.float32(1)), chunk, settings, jnp.float32)
    pull = shrink[:, None] * sums.pull + pulls
    column = _column(targets, index, chunks)
    here, column = column >= 0, jnp.maximum(column, 0)
    hit = jnp.where(here, jnp.take_along_axis(logits, column[:, None], axis=1)[:, 0], sums.hit)
    rows = chunk[column] if not isinstance(chunk, Rounded) else chunk.values[column].astype(jnp.float32) * chunk.scale
    row = jnp.where(here[:, None], rows.astype(dtype), sums.row)
    return _Sums(largest, total, hit, pull, row), powers.astype(dtype)


def _real(index, vocab_size: int | None, chunks: VocabChunks):
    """Which columns of a chunk are words, not the padding of the last chunk or of the vocabulary."""
    own = index * chunks.rows + jnp.arange(chunks.rows)[None, :]
    first = jnp.arange(1 if chunks.dim else chunks.devices)[:, None] * chunks.local
    words = vocab_size or chunks.local * first.size
    return ((own < chunks.local) & (first + own < words)).reshape(1, -1)


def _column(targets, index, chunks: VocabChunks):
    """The column of a chunk that is each token's target, or -1 if it is in another chunk."""
    device, own = (0, targets) if chunks.dim else (targets // chunks.local, targets % chunks.local)
    own = own - index * chunks.rows
    return jnp.where((own >= 0) & (own < chunks.rows), device * chunks.rows + own, -1)
