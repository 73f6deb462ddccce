"""Cross entropy in chunks of tokens: the float32 logits of the whole batch never exist, forward or backward."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.named.backend import copied_turned, on_accelerator
from trellis.nn.loss.formulas import (
    Settings,
    capped,
    changes,
    changes_of_weights,
    exponentials,
    instantiated,
    kept_as,
    weighed,
)
from trellis.nn.loss.products import (
    Factor,
    NarrowFactors,
    gradient_factor,
    joined,
    to_logits,
    to_unembed,
    to_x,
    turns_sum,
)

# Tokens of a chunk on a CPU, unless the program was tuned for another number.
CPU_CHUNK = 512
# On accelerators a chunk's float32 logits take at most this many bytes, in at most as many chunks as the second number:
# each adds once to the gradient of `unembed`, which is kept in that parameter's own type there (a gigabyte less for a
# vocabulary of 128k and a width of 4096 in bfloat16). With few tokens nothing is added: see `_with_kept_gradients`.
LOGITS_BYTES, MOST_CHUNKS = 1 << 28, 8


def chunk_size(count: int, columns: int, settings: Settings) -> int:
    """Tokens of a chunk, with `count` tokens and `columns` of the vocabulary on a device."""
    wanted = min(settings.chunk or accelerator_chunk(count, columns, settings.chunk_bytes or LOGITS_BYTES), count)
    return -(-max(wanted, 1) // settings.tile) * settings.tile  # also of no tokens


def accelerator_chunk(count: int, columns: int, logits_bytes: int = LOGITS_BYTES) -> int:
    """Tokens of a chunk on an accelerator, with `count` tokens and `columns` of the vocabulary on a device.

    >>> accelerator_chunk(4096, 128_256), accelerator_chunk(65536, 128_256), accelerator_chunk(4096, 1024)
    (512, 8192, 4096)
    """
    few = max(logits_bytes // (4 * columns), 1)
    return -(-count // min(max(-(-count // few), 1), MOST_CHUNKS))


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def summed_by_tokens(x, head, targets, weights, narrow: NarrowFactors | None, settings: Settings):
    """The total, and the parts of it, of this device's tokens over its part of the vocabulary.

    Args:
        x: `"chunk token embed"`.
        head: this device's part of the unembedding, and of its bias, if there is one.
        targets: `i32["chunk token"]`, counted in the whole vocabulary.
        weights: `f32["chunk token"]`.
        narrow: what is multiplied instead of `x` and the unembedding, whose types alone are used then; its `x` is in
            chunks too. Or None.
        settings: how.
    """
    factor, head = _factors(x, head, narrow)

    def step(sums, part):
        mine, *_ = _chunk(*part, head, settings, gradient=False)
        return jax.tree.map(jnp.add, sums, mine), None

    sums, _ = lax.scan(step, _zero_sums(factor, head, targets, weights, settings), (factor, targets, weights))
    return sums


def _derivative(settings: Settings, primals, tangents):
    weighted = not isinstance(tangents[3], SymbolicZero)  # a mask has no gradient, and nothing is kept for it
    sums, gradients, of_weights = _with_gradients(*primals, settings, weighted)
    change, rest = changes(sums, gradients, instantiated(tangents[:2]), settings.vocab_axes)
    if not weighted:
        return sums, (change, (*rest[:3], SymbolicZero(jax.typeof(rest[3]))))
    more, of_tokens = changes_of_weights(of_weights, tangents[3])
    return sums, (change + more, (*rest[:3], of_tokens))


summed_by_tokens.defjvp(_derivative, symbolic_zeros=True)


def _factors(x, head, narrow: NarrowFactors | None):
    """What is multiplied: hidden states in chunks, and the unembedding with its bias, if it has one."""
    return (x, head) if narrow is None else (narrow.x, (narrow.unembed, *head[1:]))


def _with_gradients(x, head, targets, weights, narrow: NarrowFactors | None, settings: Settings, weighted: bool):
    """The sums, and the gradients of the total by `x` and by `head`, and by `weights` if `weighted`."""
    if targets.size <= x.shape[-1]:
        return _with_kept_gradients(x, head, targets, weights, narrow, settings, weighted)
    factor, used = _factors(x, head, narrow)
    about = dict(gradient=True, dtype=x.dtype, limit=None if narrow is None else narrow.limit, weighted=weighted)
    turned = turns_sum(factor, targets.size, head[0], settings)
    summed = settings._replace(vocab_first=settings.vocab_first and not turned)

    def step(carry, part):
        sums, d_head = carry
        mine, d_x, d_logits, d_bias, of_weights = _chunk(*part, used, settings, **about)
        d_more = (to_unembed(d_logits, part[0], summed), *d_bias)
        d_head = jax.tree.map(lambda total, more: (total.astype(more.dtype) + more).astype(total.dtype), d_head, d_more)
        return (jax.tree.map(jnp.add, sums, mine), d_head), (d_x, of_weights)

    types = (settings.total_type, jnp.float32)
    zeros = [jnp.zeros(h.shape[::-1] if turned else h.shape, t) for h, t in zip(head, types, strict=False)]
    start = tuple(vary(zero, varying_axes(x, *head)) for zero in zeros)
    (sums, d_head), (d_x, of_weights) = lax.scan(
        step, (_zero_sums(factor, used, targets, weights, settings), start), (factor, targets, weights)
    )
    if turned:
        d_head = (copied_turned(d_head[0], (1, 0)), *d_head[1:])
    return sums, (d_x, jax.tree.map(lambda d, h: d.astype(kept_as(h.dtype)), d_head, head)), of_weights


def _with_kept_gradients(x, head, targets, weights, narrow: NarrowFactors | None, settings: Settings, weighted: bool):
    """The same for no more tokens than `embed`: the gradient of all logits, in the type of `x`, then takes no more room
    than that of `unembed`, which is one product instead of a sum over chunks, made when `unembed` is gone."""
    factor, used = _factors(x, head, narrow)
    about = dict(gradient=True, dtype=x.dtype, limit=None if narrow is None else narrow.limit, weighted=weighted)

    def step(carry, part):
        sums, d_bias = carry
        mine, d_x, d_logits, more, of_weights = _chunk(*part, used, settings, **about)
        return (jax.tree.map(jnp.add, sums, mine), jax.tree.map(jnp.add, d_bias, more)), (d_x, d_logits, of_weights)

    zeros = tuple(vary(jnp.zeros(b.shape, jnp.float32), varying_axes(x, *head)) for b in head[1:])
    (sums, d_bias), (d_x, d_logits, of_weights) = lax.scan(
        step, (_zero_sums(factor, used, targets, weights, settings), zeros), (factor, targets, weights)
    )
    d_head = (to_unembed(joined(d_logits), joined(factor), settings), *d_bias)
    return sums, (d_x, jax.tree.map(lambda d, h: d.astype(kept_as(h.dtype)), d_head, head)), of_weights


def _zero_sums(factor, head, targets, weights, settings: Settings):
    """Zeros that vary over mesh axes as a chunk's sums do, which are settled over those of the vocabulary."""
    operands = jax.tree.leaves((factor, head, targets, weights))
    axes = tuple(a for a in varying_axes(*operands) if a not in settings.vocab_axes)
    zero = vary(jnp.zeros((), jnp.float32), axes)
    return zero, (zero, zero, zero, zero)


def _chunk(
    x: Factor, targets, weights, head, settings: Settings, *, gradient: bool, dtype=None, limit=None, weighted=False
):
    """Sums of one chunk, and the gradients of its `total`: `(sums, d_x, d_logits, d_bias, of_weights)`, where `d_x` is
    in `dtype`."""
    unembed, *bias = head
    vocab_axes = settings.vocab_axes
    logits = to_logits(x, unembed, settings)
    columns = logits.shape[1]
    first = lax.axis_index(vocab_axes) * columns if vocab_axes else 0
    for b in bias:
        logits = logits + b.astype(jnp.float32)[None, :]
    logits, slope = capped(logits, settings.logit_softcap)
    if settings.vocab_size is not None:
        real = first + jnp.arange(columns) < settings.vocab_size
        logits = jnp.where(real[None, :], logits, -jnp.inf)

    largest, powers, total = exponentials(logits, vocab_axes)
    place = targets - first
    here = (place >= 0) & (place < columns)
    hit = jnp.take_along_axis(logits, jnp.clip(place, 0, columns - 1)[:, None], axis=1)[:, 0]
    hit = jnp.where(here, hit, 0.0)
    if vocab_axes:
        hit = lax.psum(hit, vocab_axes)

    sums, pull, of_weights = weighed(largest, total, hit, targets, weights, settings.z_loss)
    if not gradient:
        return sums, None, None, (), None

    hot = jnp.arange(columns)[None, :] == place[:, None]
    d_logits = powers * pull[:, None]
    # No zeros are subtracted elsewhere: JAX would make them before the loop, and XLA for GPUs keeps them in memory.
    d_logits = lax.select(hot, d_logits - weights[:, None], d_logits)
    if slope is not None:
        d_logits = d_logits * slope
    d_bias = tuple(jnp.sum(d_logits, axis=0) for _ in bias)
    wide = None if on_accelerator(d_logits) else jnp.float32  # the faster product: `trellis.named.backend.cpu_dot`
    d_logits = gradient_factor(d_logits, dtype, settings, limit)
    d_x = to_x(d_logits, unembed, settings, wide).astype(dtype)
    return sums, d_x, d_logits, d_bias, of_weights if weighted else None
