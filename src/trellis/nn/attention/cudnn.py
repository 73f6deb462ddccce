"""Attention by cuDNN's fused kernels, through JAX."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trellis._compat import cudnn_backward, cudnn_forward
from trellis.nn.attention.pattern import Pattern, same_document
from trellis.nn.attention.sliced.tile import Ids, Tile

# The widths of queries and of values in multi-head latent attention, for which there are kernels from Hopper on.
MLA = {192, 128}


def cudnn_refuses(
    q: jax.Array, v: jax.Array, *, pattern: Pattern, logit_softcap: float | None, upcast: bool
) -> str | None:
    """Why cuDNN cannot compute this attention, or None if it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if logit_softcap is not None:
        return f"it has no cap on scores (logit_softcap={logit_softcap})"
    if pattern.window is not None and not pattern.causal:
        return f"its sliding window (window={pattern.window}) is for causal attention only"
    widths = {q.shape[-1], v.shape[-1]}
    if any(width % 8 or width > 128 for width in widths) and widths != MLA:
        seen = " and ".join(map(str, sorted(widths)))
        return f"it takes a head_dim that is a multiple of 8 and at most 128, or 192 with values of 128, not {seen}"
    if not upcast:
        return "it always computes scores in float32 (upcast=False)"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnTiles:
    """Tiles by cuDNN. It has no offset between queries and keys: what is neither whole nor begins at one place gets a
    mask of the tile's size, and so do documents."""

    scale: float
    logit_softcap = None
    axis = 1
    whole_lanes = False
    further = None
    opaque = True

    def forward(self, tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids):
        return cudnn_forward(q, k, v, **self._masks(tile, q, ids))

    def known(self, out, d_out):
        return out

    def backward(self, tile: Tile, q, k, v, ids: Ids, known, log_sum, d_out):
        return cudnn_backward(
            q, k, v, known.astype(q.dtype), log_sum, d_out.astype(q.dtype), **self._masks(tile, q, ids)
        )

    def _masks(self, tile: Tile, q, ids: Ids) -> dict:
        pattern, seen, causal, window = tile.pattern, None, False, None
        if not tile.full:
            if pattern.causal and tile.ahead == 0 and tile.queries == tile.keys:
                causal, window = True, pattern.window
            else:
                seen = pattern.visible(jnp.arange(tile.queries) + tile.ahead, jnp.arange(tile.keys))[None, None]
        if ids is not None:
            together = same_document(*ids)[:, None]
            seen = together if seen is None else together & seen
        return dict(mask=seen, causal=causal, window=window, scale=self.scale)
