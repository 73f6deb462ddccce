"""Attention by cuDNN's fused kernels, through JAX."""

import jax
import jax.numpy as jnp

from trellis.nn.attention.pattern import Pattern, same_document
from trellis.notation.state import state_of


def cudnn_refuses(q: jax.Array, *, pattern: Pattern, logit_softcap: float | None, upcast: bool) -> str | None:
    """Why cuDNN cannot compute this attention, or None if it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if logit_softcap is not None:
        return f"it has no cap on scores (logit_softcap={logit_softcap})"
    if pattern.window is not None and not pattern.causal:
        return f"its sliding window (window={pattern.window}) is for causal attention only"
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"it takes a head_dim that is a multiple of 8 and at most 128, not {q.shape[-1]}"
    if not upcast:
        return "it always computes scores in float32 (upcast=False)"
    if (pattern.causal or pattern.window is not None) and state_of(q).axes[1]:
        return f"it counts positions from 0, and `pos` is sharded over {' '.join(state_of(q).axes[1])}"
    return None


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None,
    *,
    pattern: Pattern,
    scale: float,
) -> jax.Array:
    """Softmax attention by cuDNN; arguments as in `trellis.nn.dot_product_attention`.

    Documents are a mask of `batch pos key_pos` booleans that cuDNN reads; blocks that it hides are not skipped.
    """
    mask = None if segment_ids is None else same_document(*segment_ids)[:, None]
    # A window of w keys, itself included, is w - 1 keys to the left.
    window = None if pattern.window is None else (pattern.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=pattern.causal, local_window_size=window, implementation="cudnn"
    )
