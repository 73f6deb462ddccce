"""Attention by the splash kernel of JAX, for TPUs."""

import jax
import jax.numpy as jnp

from trellis.nn.attention.pattern import Pattern

LANES = 128
BLOCK = 512


def splash_refuses(q: jax.Array, k: jax.Array, *, pos_shards: int, upcast: bool) -> str | None:
    """Why the splash kernel cannot compute this attention, or None if it can."""
    pos, key_pos = q.shape[1], k.shape[1]
    if pos % (LANES * pos_shards) or key_pos % LANES:
        over = f" over {pos_shards} devices" if pos_shards > 1 else ""
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
    pos_shards: int = 1,
    head_shards: int = 1,
    interpret: bool = False,
):
    """The kernel for a whole `heads pos key_pos` mask: a pytree, so that a mesh can shard its block tables.

    `pos_shards` and `head_shards` say over how many devices `pos` and `heads` will be sharded. `interpret` runs
    it on any backend, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (pos, key_pos)
    if pattern.window is not None:
        right = 0 if pattern.causal else pattern.window - 1
        mask = splash.LocalMask(shape, (pattern.window - 1, right), offset=0)
    elif pattern.causal:
        mask = splash.CausalMask(shape)
    else:
        mask = splash.FullMask(shape)
    block_q, block_kv = _block(pos // pos_shards), _block(key_pos)
    blocks = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        attn_logits_soft_cap=logit_softcap,
        residual_checkpoint_name=save_name,
        head_shards=head_shards,
        q_seq_shards=pos_shards,
        interpret=interpret,
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
