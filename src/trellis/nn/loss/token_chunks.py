"""Cross entropy in chunks of tokens: the float32 logits of the whole batch never exist, forward or backward."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import Axes, vary, varying_axes
from trellis.named.backend import copied_turned, on_accelerator
from trellis.nn.loss.formulas import Settings, capped, changes, weighed

CHUNK = {"cpu": 512}
# On accelerators a chunk's float32 logits take at most this many bytes, but for no more chunks than the second number:
# each adds once to the gradient of `unembed`, which is kept in that parameter's own type there (a gigabyte less for a
# vocabulary of 128k and a width of 4096 in bfloat16). With few tokens nothing is added: see `_with_kept_gradients`.
LOGITS_BYTES, MOST_CHUNKS = 1 << 28, 8


def chunk_size(count: int, columns: int, settings: Settings) -> int:
    """Tokens a chunk, of `count` tokens and `columns` of the vocabulary on a device."""
    return min(settings.chunk or accelerator_chunk(count, columns, settings.chunk_bytes or LOGITS_BYTES), count)


def accelerator_chunk(count: int, columns: int, logits_bytes: int = LOGITS_BYTES) -> int:
    """Tokens a chunk on an accelerator, of `count` tokens and `columns` of the vocabulary on a device.

    >>> accelerator_chunk(4096, 128_256), accelerator_chunk(65536, 128_256), accelerator_chunk(4096, 1024)
    (512, 8192, 4096)
    """
    few = max(logits_bytes // (4 * columns), 1)
    return -(-count // min(max(-(-count // few), 1), MOST_CHUNKS))


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def summed_by_tokens(x, head, targets, weights, settings: Settings):
    """The total, and the parts of it, of this device's tokens over its part of the vocabulary.

    Args:
        x: `"chunk token embed"`.
        head: this device's part of the unembedding, and of its bias where there is one.
        targets: `i32["chunk token"]`, counted in the whole vocabulary.
        weights: `f32["chunk token"]`.
        settings: how.
    """

    def step(sums, part):
        mine, *_ = _chunk(*part, head, settings, gradient=False)
        return jax.tree.map(jnp.add, sums, mine), None

    sums, _ = lax.scan(step, _zero_sums(x, head, targets, weights, settings), (x, targets, weights))
    return sums


@summed_by_tokens.defjvp
def _derivative(settings: Settings, primals, tangents):
    sums, gradients = _with_gradients(*primals, settings)
    return sums, changes(sums, gradients, tangents[:2], settings.vocab_axes)


def _with_gradients(x, head, targets, weights, settings: Settings):
    """The sums, and the gradients of the total by `x` and by `head`."""
    if targets.size <= x.shape[-1]:
        return _with_kept_gradients(x, head, targets, weights, settings)

    def step(carry, part):
        sums, d_head = carry
        mine, d_x, d_logits, d_bias = _chunk(*part, head, settings, gradient=True)
        d_more = (_to_unembed(d_logits, part[0], settings), *d_bias)
        d_head = jax.tree.map(lambda total, more: (total.astype(more.dtype) + more).astype(total.dtype), d_head, d_more)
        return (jax.tree.map(jnp.add, sums, mine), d_head), d_x

    types = (settings.total_type, jnp.float32)
    zeros = [jnp.zeros(h.shape, t) for h, t in zip(head, types, strict=False)]
    start = tuple(vary(zero, varying_axes(x, *head)) for zero in zeros)
    (sums, d_head), d_x = lax.scan(
        step, (_zero_sums(x, head, targets, weights, settings), start), (x, targets, weights)
    )
    return sums, (d_x, jax.tree.map(lambda d, h: d.astype(h.dtype), d_head, head))


def _with_kept_gradients(x, head, targets, weights, settings: Settings):
    """For no more tokens than `embed`: the gradient of all logits, in the type of `x`, takes no more room than the
    gradient of `unembed`, which then is one product instead of a sum over chunks, made when `unembed` is gone."""

    def step(carry, part):
        sums, d_bias = carry
        mine, d_x, d_logits, more = _chunk(*part, head, settings, gradient=True)
        return (jax.tree.map(jnp.add, sums, mine), jax.tree.map(jnp.add, d_bias, more)), (d_x, d_logits)

    zeros = tuple(vary(jnp.zeros(b.shape, jnp.float32), varying_axes(x, *head)) for b in head[1:])
    (sums, d_bias), (d_x, d_logits) = lax.scan(
        step, (_zero_sums(x, head, targets, weights, settings), zeros), (x, targets, weights)
    )
    rows = lambda a: a.reshape(-1, a.shape[-1])
    d_head = (_to_unembed(rows(d_logits), rows(x), settings), *d_bias)
    return sums, (d_x, jax.tree.map(lambda d, h: d.astype(h.dtype), d_head, head))


def _to_unembed(d_logits, x, settings: Settings):
    """The gradient of `unembed`, a sum over tokens. On a CPU what has them first is turned before the product: within
    it that takes as long as the product itself."""
    left, right = (d_logits, x) if settings.vocab_first else (x, d_logits)
    if not on_accelerator(x):
        return lax.dot(copied_turned(left, (1, 0)), right, preferred_element_type=jnp.float32)
    form = "tv,te->ve" if settings.vocab_first else "tv,te->ev"
    return jnp.einsum(form, d_logits, x, preferred_element_type=jnp.float32)


def _zero_sums(x, head, targets, weights, settings: Settings):
    """Zeros that differ where the sums of a chunk do, which are settled over the mesh axes of the vocabulary."""
    axes = tuple(a for a in varying_axes(x, *head, targets, weights) if a not in settings.vocab_axes)
    zero = vary(jnp.zeros((), jnp.float32), axes)
    return zero, (zero, zero, zero, zero)


def _chunk(x, targets, weights, head, settings: Settings, *, gradient: bool):
    """Sums of one chunk, the gradients of its `total`: `(sums, d_x, d_logits, d_bias)`."""
    unembed, *bias = head
    vocab_axes = settings.vocab_axes
    columns = unembed.shape[0 if settings.vocab_first else 1]
    to_logits, to_x = ("te,ve->tv", "tv,ve->te") if settings.vocab_first else ("te,ev->tv", "tv,ev->te")
    first = lax.axis_index(vocab_axes) * columns if vocab_axes else 0
    logits = jnp.einsum(to_logits, x, unembed, preferred_element_type=jnp.float32)
    for b in bias:
        logits = logits + b.astype(jnp.float32)[None, :]
    logits, slope = capped(logits, settings.logit_softcap)
    if settings.vocab_size is not None:
        real = first + jnp.arange(columns) < settings.vocab_size
        logits = jnp.where(real[None, :], logits, -jnp.inf)

    largest = _over(lax.pmax, jnp.max(lax.stop_gradient(logits), axis=1), vocab_axes)  # any number gives the same loss
    powers = jnp.exp(logits - largest[:, None])
    total = _over(lax.psum, jnp.sum(powers, axis=1), vocab_axes)
    place = targets - first
    here = (place >= 0) & (place < columns)
    hit = jnp.take_along_axis(logits, jnp.clip(place, 0, columns - 1)[:, None], axis=1)[:, 0]
    if vocab_axes:
        hit = lax.psum(jnp.where(here, hit, 0.0), vocab_axes)

    sums, pull = weighed(largest, total, hit, weights, settings.z_loss)
    if not gradient:
        return sums, None, None, ()

    hot = jnp.arange(columns)[None, :] == place[:, None]
    d_logits = powers * pull[:, None] - jnp.where(hot, weights[:, None], 0.0)
    if slope is not None:
        d_logits = d_logits * slope
    d_bias = tuple(jnp.sum(d_logits, axis=0) for _ in bias)
    d_logits = d_logits.astype(x.dtype)
    wide = None if on_accelerator(x) else jnp.float32  # the faster product there: `trellis.named.backend.cpu_dot`
    d_x = jnp.einsum(to_x, d_logits, unembed, preferred_element_type=wide)
    return sums, d_x.astype(x.dtype), d_logits, d_bias


def _over(collective, x, axes: Axes):
    return collective(x, axes) if axes else x
