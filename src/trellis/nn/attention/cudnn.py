"""Attention by cuDNN's fused kernels, through JAX."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trellis._compat import cudnn_backward, cudnn_forward
from trellis.mesh.platform import cuda_capability_of
from trellis.nn.attention.pattern import Pattern, same_document
from trellis.nn.attention.sliced.tile import Ids, Tile

# The widths of queries and of values in multi-head latent attention, for which there are kernels from Hopper on.
MLA = {192, 128}
HOPPER = 9  # the major compute capability


def cudnn_refuses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    pattern: Pattern,
    logit_softcap: float | None,
    upcast: bool,
    pieces: int = 1,
) -> str | None:
    """Why cuDNN cannot compute this attention, with positions in so many pieces, or None if it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, not {q.dtype}"
    if logit_softcap is not None:
        return f"it has no cap on scores (logit_softcap={logit_softcap})"
    if pattern.window is not None and not pattern.causal:
        return f"its sliding window (window={pattern.window}) is for causal attention only"
    widths = {q.shape[-1], v.shape[-1]}
    if any(width % 8 or width > 128 for width in widths):
        capability, seen = cuda_capability_of(q), " and ".join(map(str, sorted(widths)))
        widest, latent = 256 if capability == HOPPER else 128, not 0 < capability < HOPPER
        if any(width % 8 or width > widest for width in widths) and not (latent and widths == MLA):
            others = ", or 192 with values of 128" if latent and widest < max(MLA) else ""
            return f"it takes a head_dim that is a multiple of 8 and at most {widest}{others}, not {seen}"
    if q.shape[1] % (2 * pieces) or k.shape[1] % (2 * pieces):
        of_each = f" in {pieces} pieces" if pieces > 1 else ""
        return f"it takes even numbers of positions, not {q.shape[1]} and {k.shape[1]}{of_each}"
    if not upcast:
        return "it always computes scores in float32 (upcast=False)"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudnnTiles:
    """Tiles by cuDNN. It has no offset between queries and keys: a tile that is neither whole nor begins at one place
    gets a mask of its size, and so do documents."""

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
