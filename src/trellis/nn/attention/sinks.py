"""Attention sinks: a score for each head that belongs to no key, so that its weights may add up to less than 1.

A head's sink stands in the denominator of its softmax beside the scores of all keys, and has no value (Xiao et al.,
2023, arXiv:2309.17453; OpenAI, 2025, arXiv:2508.10925, section 2.2). So it is one more part of all keys, put together
with the rest as parts are (`sliced/tile.py`): from a result `o` and the log of its sums `s`, a sink `c` makes the log
`m = log(exp(s) + exp(c))` and the result `o exp(s - m)`. Given these two, a kernel's gradient is right, whoever made
them; the sink's own is minus the sum, over its queries, of its weight times the result's product with its gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def weights_beside(scores: jax.Array, sinks: jax.Array | None, softmax: Callable = jax.nn.softmax) -> jax.Array:
    """The softmax over keys, beside a sink for each head if there are any.

    Args:
        scores: `batch kv_heads groups ... key_pos`.
        sinks: `heads`, which is `kv_heads groups`, or None.
        softmax: over the last dimension.

    >>> import jax.numpy as jnp
    >>> weights_beside(jnp.zeros((1, 1, 1, 3)), jnp.zeros(1)).ravel().tolist()
    [0.25, 0.25, 0.25]
    """
    if sinks is None:
        return softmax(scores)
    own = sinks.astype(scores.dtype).reshape(1, scores.shape[1], -1, *[1] * (scores.ndim - 3))
    every = jnp.concatenate([scores, jnp.broadcast_to(own, (*scores.shape[:-1], 1))], axis=-1)
    return softmax(every)[..., :-1]


def with_sinks(out: jax.Array, log_sum: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result and the log of the sums, sinks included.

    Args:
        out: `batch pos heads head_dim`, over the keys.
        log_sum: `f32["batch heads pos"]`.
        sinks: `heads`.

    >>> import jax.numpy as jnp
    >>> out, log_sum = with_sinks(jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1)), jnp.zeros(1))
    >>> out.ravel().tolist()
    [0.5, 0.5]
    """
    total = jnp.logaddexp(log_sum, _row(sinks))
    share = jnp.exp(log_sum - total).swapaxes(1, 2)[..., None]
    return (out.astype(jnp.float32) * share).astype(out.dtype), total


def sinks_gradient(out: jax.Array, d_out: jax.Array, log_sum: jax.Array, sinks: jax.Array) -> jax.Array:
    """The gradient of sinks, `heads`.

    Args:
        out, d_out: the result, sinks included, and its gradient, `batch pos heads head_dim`.
        log_sum: `f32["batch heads pos"]`, sinks included.
        sinks: `heads`.
    """
    pulled = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    weights = jnp.exp(_row(sinks) - log_sum)
    return -(weights * pulled).sum((0, 2)).astype(sinks.dtype)


def _row(sinks: jax.Array) -> jax.Array:
    """Sinks in float32, with heads where the log of sums has them."""
    return sinks.astype(jnp.float32)[None, :, None]
