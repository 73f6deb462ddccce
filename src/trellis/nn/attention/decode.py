"""Attention of one new position over a cache of keys and values."""

import jax
import jax.numpy as jnp

from trellis._compat import is_tracer
from trellis.named.arguments import cap_of
from trellis.named.operand import refuse_named
from trellis.nn.attention.dispatch import check, scale_of
from trellis.nn.attention.pattern import hidden_score
from trellis.nn.attention.sinks import weights_beside


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    scale: float | jax.Array | None = None,
    logit_softcap: float | None = None,
    upcast: bool = True,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of the newest position of each sequence over its cache.

    Args:
        q: `batch heads head_dim`, the queries of the newest positions.
        k: `batch key_pos kv_heads head_dim`, the cache, the newest position's key included.
        v: like `k`; its heads may have another width, which the result then has too.
        lengths: `i32["batch"]`, how many positions of each cache are filled, at least 1; the newest is `lengths - 1`.
        window: see only the last `window` filled positions.
        scale: multiplies the scores; `head_dim ** -0.5` if None.
        logit_softcap: scores become `cap * tanh(scores / cap)`.
        upcast: compute scores and weights in float32.
        sinks: `heads`, a score without a value beside those of the keys.

    Returns:
        `batch heads head_dim`.

    Raises:
        AttentionError: shapes do not agree, or the window has no key.
    """
    refuse_named((q, k, v, lengths, sinks), "decode_attention", "attend_cached")
    known = None if is_tracer(window) else window
    check(q, k, v, known, sinks, "in decode_attention", queries="batch heads head_dim")
    logit_softcap = cap_of(logit_softcap, "decode_attention", "pass a Python number")
    batch, heads, head_dim = q.shape
    key_pos, kv_heads = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale_of(scale, "decode_attention")
    dtype = jnp.float32 if upcast else q.dtype
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bkgh,bskh->bkgs", grouped, k, preferred_element_type=dtype) * jnp.asarray(scale, dtype)
    if logit_softcap is not None:
        cap = jnp.asarray(logit_softcap, dtype)
        scores = jnp.tanh(scores / cap) * cap
    places = jnp.arange(key_pos)[None, :]
    seen = places < lengths[:, None]
    if window is not None:
        seen = seen & (places >= lengths[:, None] - window)
    scores = jnp.where(seen[:, None, None], scores, hidden_score(dtype))
    weights = weights_beside(scores, sinks).astype(v.dtype)
    return jnp.einsum("bkgs,bskh->bkgh", weights, v).reshape(batch, heads, -1)
