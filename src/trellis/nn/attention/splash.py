"""Attention by the splash kernel of JAX, for TPUs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trellis._compat import SplashTable, splash_backward, splash_forward, splash_table
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sliced.tile import Ids, Tile

LANES = 128
BLOCK = 512


def splash_refuses(q: jax.Array, k: jax.Array, *, pieces: int, upcast: bool) -> str | None:
    """Why the splash kernel cannot compute this attention, or None if it can."""
    pos, key_pos = q.shape[1], k.shape[1]
    if pos % (LANES * pieces) or key_pos % LANES:
        over = f" in {pieces} pieces" if pieces > 1 else ""
        return f"it takes lengths that are multiples of {LANES}, not pos={pos}{over} and key_pos={key_pos}"
    if not upcast:
        return "it always computes scores in float32 (upcast=False)"
    return None


def splash_kernel(
    heads: int,
    pos: int,
    key_pos: int,
    *,
    pattern: Pattern,
    logit_softcap: float | None,
    save_name: str | None,
    head_shards: int = 1,
    interpret: bool = False,
):
    """The kernel for a whole `heads pos key_pos` mask: a pytree, so that a mesh can shard its block tables.

    `head_shards` says over how many devices `heads` will be sharded. `interpret` runs it on any backend, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.make_splash_mha(
        splash.MultiHeadMask([_mask(Tile(pos, key_pos, pattern))] * heads),
        block_sizes=_blocks(pos, key_pos),
        attn_logits_soft_cap=logit_softcap,
        residual_checkpoint_name=save_name,
        head_shards=head_shards,
        q_seq_shards=1,
        interpret=interpret,
    )


def _mask(tile: Tile):
    """The tile's mask, as the kernel takes it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    pattern, shape = tile.pattern, (tile.queries, tile.keys)
    if tile.full:
        return splash.FullMask(shape)
    if pattern.window is None:
        return splash.CausalMask(shape, offset=tile.ahead)
    right = 0 if pattern.causal else pattern.window - 1
    return splash.LocalMask(shape, (pattern.window - 1, right), offset=tile.ahead)


def _blocks(pos: int, key_pos: int):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block_q, block_kv = _block(pos), _block(key_pos)
    return splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )


def _block(length: int) -> int:
    """The largest multiple of 128 that divides `length` and is at most 512."""
    return max(block for block in range(LANES, BLOCK + 1, LANES) if length % block == 0)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: tuple[jax.Array, jax.Array] | None, kernel, *, scale: float
) -> jax.Array:
    """Softmax attention by a kernel from `splash_kernel`; arguments as in `trellis.nn.dot_product_attention`."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    queries = (q * jnp.asarray(scale, q.dtype)).transpose(0, 2, 1, 3)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if segment_ids is None:
        out = jax.vmap(kernel)(queries, keys, values)
    else:
        out = jax.vmap(kernel)(queries, keys, values, splash.SegmentIds(*segment_ids))
    return out.transpose(0, 2, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplashTiles:
    """Tiles by the splash kernel; `interpret` runs it on any backend, slowly."""

    scale: float
    logit_softcap: float | None = None
    interpret: bool = False
    axis = 2
    whole_lanes = True
    opaque = True

    def forward(self, tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids):
        return splash_forward(self._table(tile, q), self._scaled(q), k, v, ids)

    def backward(self, tile: Tile, q, k, v, ids: Ids, out, log_sum, d_out):
        table = self._table(tile, q)
        d_q, d_k, d_v = splash_backward(table, self._scaled(q), k, v, ids, out.astype(q.dtype), log_sum, d_out)
        return self._scaled(d_q), d_k, d_v

    def _scaled(self, q):
        return q * jnp.asarray(self.scale, q.dtype)

    def _table(self, tile: Tile, q) -> SplashTable:
        return _table(tile, q.shape[1], self.logit_softcap, self.interpret)


@functools.lru_cache(maxsize=256)
def _table(tile: Tile, heads: int, logit_softcap: float | None, interpret: bool) -> SplashTable:
    return splash_table(_mask(tile), heads, _blocks(tile.queries, tile.keys), logit_softcap, interpret)
