"""Attention by the splash kernel of JAX, for TPUs."""

import contextlib
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trellis._compat import SplashTable, splash_backward, splash_forward, splash_table
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sliced.tile import Ids, Tile
from trellis.nn.attention.sliced.visits import said
from trellis.program.said import kernel_mask

LANES = 128
# Sides of the blocks of scores. By libtpu's schedule a v5p fills its matrix units to 70 % in the forward pass over
# blocks of 512, to 85 % over blocks of 1,024; but of a causal mask's scores it computes the more for nothing the fewer
# blocks there are.
BLOCK, LARGE_BLOCK, MANY = 512, 1024, 8
# Bytes of a head's row up to which the large ones fit the vector memory.
LARGE_ROW = 512


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
    row_bytes: int = LARGE_ROW,
    head_shards: int = 1,
    interpret: bool = False,
):
    """The kernel for a whole `heads pos key_pos` mask: a pytree, so that a mesh can shard its block tables.

    `row_bytes` is what one head of a query takes. `head_shards` says over how many devices `heads` will be sharded.
    `interpret` runs it on any backend, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.make_splash_mha(
        splash.MultiHeadMask([_mask(tile := Tile(pos, key_pos, pattern))] * heads),
        block_sizes=_blocks(tile, row_bytes),
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


def _said(tile: Tile) -> contextlib.AbstractContextManager:
    """The scope in which a kernel says its mask."""
    if tile.full:
        return contextlib.nullcontext()
    near = tile.keys if tile.pattern.window is None else tile.pattern.window - 1
    return kernel_mask(near, 0 if tile.pattern.causal else near, tile.ahead)


def _blocks(tile: Tile, row_bytes: int):
    """Sizes of blocks, and whether the backward pass is one kernel, five products instead of seven.

    That kernel writes the gradient of all queries for each block of keys, to be added up after it, and passes over
    blocks that are hidden: it is for few blocks of keys, most of them seen.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    many = tile.full or min(tile.queries, tile.keys) >= MANY * LARGE_BLOCK
    most = LARGE_BLOCK if many and row_bytes <= LARGE_ROW else BLOCK
    block_q, block_kv = _block(tile.queries, most), _block(tile.keys, most)
    compute = BLOCK if block_kv % BLOCK == 0 else block_kv
    fused = tile.pattern.window is None and tile.keys <= MANY * block_kv
    return splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv if fused else compute,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
    )


def _pieces(tile: Tile, row_bytes: int) -> list[tuple[int, int, Tile]]:
    """A tile in pieces of its keys, few enough blocks each for a backward pass of one kernel.

    Of each: the first query that sees one of its keys, its first key, and the tile of these.
    """
    size = MANY * _blocks(tile, row_bytes).block_kv
    count = -(-tile.keys // size)
    causal = tile.pattern.causal and not tile.full
    reached = not causal or (tile.ahead % LANES == 0 and tile.keys <= tile.queries + tile.ahead)
    if tile.pattern.window is not None or tile.keys % (count * LANES) or not reached:
        return [(0, 0, tile)]
    pieces = []
    for key in range(0, tile.keys, tile.keys // count):
        query = max(0, key - tile.ahead) if causal else 0
        ahead = tile.ahead + query - key
        pieces.append((query, key, Tile(tile.queries - query, tile.keys // count, tile.pattern, ahead)))
    return pieces


def _block(length: int, most: int) -> int:
    """The largest multiple of 128 that divides `length` and is at most `most`."""
    return max(block for block in range(LANES, most + 1, LANES) if length % block == 0)


def _for_cores(heads: int, *arrays):
    """Arrays `batch heads ...`, of which a batch of an odd size has its heads in two halves: a chip of two cores gives
    each of them a part of the batch, and in the backward pass of nothing else."""
    if arrays[0].shape[0] % 2 == 0 or heads % 2:
        return arrays
    return [x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:]) for x in arrays]


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None,
    kernel,
    *,
    pattern: Pattern,
    scale: float,
) -> jax.Array:
    """Softmax attention by a kernel from `splash_kernel`; arguments as in `trellis.nn.dot_product_attention`."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    queries = _scaled(q, scale).transpose(0, 2, 1, 3)
    keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    whole, batch = queries.shape, queries.shape[0]
    queries, keys, values = _for_cores(keys.shape[1], queries, keys, values)
    ids = () if segment_ids is None else (_as_often(x, len(queries) // batch) for x in segment_ids)
    segments = () if segment_ids is None else (splash.SegmentIds(*ids),)
    with _said(Tile(q.shape[1], k.shape[1], pattern)):
        out = jax.vmap(kernel)(queries, keys, values, *segments)
    return out.reshape(*whole[:3], v.shape[3]).transpose(0, 2, 1, 3)


def _scaled(q: jax.Array, scale: float) -> jax.Array:
    """Queries times the scale of the scores. In bfloat16 that would be rounded: DeepSeek-V3's, 0.1352, by 0.3 %."""
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def _as_often(ids: jax.Array, times: int) -> jax.Array:
    return ids if times == 1 else jnp.repeat(ids, times, axis=0)


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
        with _said(tile):
            return splash_forward(self._table(tile, q), self._scaled(q), k, v, ids)

    def backward(self, tile: Tile, q, k, v, ids: Ids, out, log_sum, d_out):
        pieces = _pieces(tile, q.shape[3] * q.dtype.itemsize)
        if len(pieces) == 1:
            return self._backward(tile, q, k, v, ids, out, log_sum, d_out)
        d_q, d_keys = jnp.zeros(q.shape, jnp.float32), []
        for query, key, piece in pieces:
            rows = lambda x, axis=2, first=query: jax.lax.slice_in_dim(x, first, None, axis=axis)
            cols = lambda x, axis=2, first=key, size=piece.keys: jax.lax.slice_in_dim(x, first, first + size, axis=axis)
            some = None if ids is None else (rows(ids[0], 1), cols(ids[1], 1))
            with said(self, piece, q, v):
                mine = self._backward(piece, rows(q), cols(k), cols(v), some, rows(out), rows(log_sum), rows(d_out))
            d_q = d_q.at[:, :, query:].add(mine[0].astype(d_q.dtype))
            d_keys.append(mine[1:])
        return d_q, *(jnp.concatenate(parts, axis=2) for parts in zip(*d_keys, strict=True))

    def _backward(self, tile: Tile, q, k, v, ids: Ids, out, log_sum, d_out):
        given = q, k, v
        parts = _for_cores(k.shape[1], self._scaled(q), k, v, out.astype(q.dtype), log_sum, d_out)
        if ids is not None:
            query_ids, key_ids = (_as_often(x, len(parts[0]) // len(q)) for x in ids)
            ids = query_ids, key_ids
        q, k, v, *rest = parts
        with _said(tile):
            found = splash_backward(self._table(tile, q), q, k, v, ids, *rest)
        d_q, d_k, d_v = (d.reshape(x.shape) for d, x in zip(found, given, strict=True))
        return self._scaled(d_q), d_k, d_v

    def _scaled(self, q):
        return _scaled(q, self.scale)

    def _table(self, tile: Tile, q) -> SplashTable:
        return _table(tile, q.shape[1], q.shape[3] * q.dtype.itemsize, self.logit_softcap, self.interpret)


@functools.lru_cache(maxsize=256)
def _table(tile: Tile, heads: int, row_bytes: int, logit_softcap: float | None, interpret: bool) -> SplashTable:
    return splash_table(_mask(tile), heads, _blocks(tile, row_bytes), logit_softcap, interpret)
