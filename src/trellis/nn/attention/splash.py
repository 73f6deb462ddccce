"""Attention by the splash kernel of JAX, for TPUs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trellis._splash import SplashTable, splash_backward, splash_forward, splash_table
from trellis.named.saving import layer_written_out
from trellis.nn.attention.further import FurtherTiles
from trellis.nn.attention.mosaic import LANES, block_of
from trellis.nn.attention.sliced.tile import Ids, Tile
from trellis.nn.attention.sliced.visits import said, said_mask

# Sides of the blocks of scores. Larger ones fill the matrix units better, and the backward pass makes fewer parts for
# the queries (`benchmarks/splash_schedule.py`); but under a causal mask, the fewer blocks there are the more scores are
# computed for nothing. So blocks are large from SOME of them on, and the widest from MANY.
BLOCK, LARGE_BLOCK, SOME, MANY = 512, 1024, 4, 8
# Bytes of a head's row up to which large blocks fit the vector memory, and up to which twice as many keys do.
LARGE_ROW, WIDE_ROW = 512, 256


def widest_blocks(device_kind: str, *, capped: bool = False) -> tuple[int, int]:
    """The most queries and keys of a block that fit the vector memory of a chip, by JAX's name for it.

    Chips for which it was not compiled have the smallest, and so do scores with a soft cap, of which there are two
    copies.

    >>> widest_blocks("TPU v4"), widest_blocks("TPU v5"), widest_blocks("TPU v6 lite")
    ((1024, 1024), (1024, 2048), (2048, 4096))
    """
    if device_kind.startswith("TPU v6") and not capped:
        return 2 * LARGE_BLOCK, 4 * LARGE_BLOCK
    return LARGE_BLOCK, LARGE_BLOCK * (2 if device_kind.startswith("TPU v5") and not capped else 1)


def splash_refuses(q: jax.Array, k: jax.Array, *, pieces: int, upcast: bool) -> str | None:
    """Why the splash kernel cannot compute this attention, or None if it can."""
    pos, key_pos = q.shape[1], k.shape[1]
    if pos % (LANES * pieces) or key_pos % LANES:
        over = f" in {pieces} pieces" if pieces > 1 else ""
        return f"it takes lengths that are multiples of {LANES}, not pos={pos}{over} and key_pos={key_pos}"
    if not upcast:
        return "it always computes scores in float32 (upcast=False)"
    return None


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


def _blocks(tile: Tile, row_bytes: int, widest: tuple[int, int]):
    """Sizes of blocks, and whether the backward pass is one kernel, with five products instead of seven.

    That kernel writes the gradient of all queries for each block of keys, to be added up after it, and passes over
    blocks that are hidden: it is for few blocks of keys, most of them seen.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    most_q, most_kv = _most(tile, row_bytes, widest)
    block_q, block_kv = block_of(tile.queries, most_q), block_of(tile.keys, most_kv)
    compute = LARGE_BLOCK if tile.full and block_kv % LARGE_BLOCK == 0 else BLOCK if block_kv % BLOCK == 0 else block_kv
    fused = tile.pattern.window is None and tile.keys <= MANY * block_kv
    return splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_of(block_kv, LARGE_BLOCK) if fused else compute,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
    )


def _most(tile: Tile, row_bytes: int, widest: tuple[int, int]) -> tuple[int, int]:
    """The most queries and keys of a block. A mask takes room beside the scores."""
    least, masked = min(tile.queries, tile.keys), (min(LARGE_BLOCK, widest[0]), min(2 * LARGE_BLOCK, widest[1]))
    if row_bytes <= WIDE_ROW and (tile.full or least >= MANY * max(masked)):
        return widest if tile.full else masked
    most = LARGE_BLOCK if row_bytes <= LARGE_ROW and (tile.full or least >= SOME * LARGE_BLOCK) else BLOCK
    return most, most


def _pieces(tile: Tile, row_bytes: int, widest: tuple[int, int]) -> list[tuple[int, int, Tile]]:
    """A tile in pieces of its keys, few enough blocks each for a backward pass of one kernel.

    For each piece: the first query that sees one of its keys, its first key, and the tile of these.
    """
    size = MANY * _blocks(tile, row_bytes, widest).block_kv
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


def _for_cores(heads: int, *arrays):
    """Arrays `batch heads ...`, where a batch of an odd size gets its heads in two halves: a chip of two cores gives
    each core a part of the batch, and in the backward pass of nothing else."""
    if arrays[0].shape[0] % 2 == 0 or heads % 2:
        return arrays
    return [x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:]) for x in arrays]


def _as_often(ids: jax.Array, times: int) -> jax.Array:
    return ids if times == 1 else jnp.repeat(ids, times, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplashTiles:
    """Tiles by the splash kernel.

    Attributes:
        widest: the most queries and keys of a block, by `widest_blocks`.
        further: computes tiles that follow each other, if a chip has kernels for it.
        interpret: runs it on any backend, slowly.
    """

    scale: float
    logit_softcap: float | None = None
    widest: tuple[int, int] = (LARGE_BLOCK, LARGE_BLOCK)
    further: FurtherTiles | None = None
    interpret: bool = False
    axis = 2
    whole_lanes = True
    opaque = True

    def forward(self, tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids):
        with said_mask(tile):
            found = splash_forward(self._table(tile, q), self._scaled(q), k, v, ids)
        # The kernel writes the log of a sum 128 times. Of layers that are written out, libtpu would take it out of them
        # where the backward pass reads it, and keep all 128 until then.
        return jax.lax.optimization_barrier(found) if layer_written_out.value else found

    def known(self, out, d_out):
        return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def backward(self, tile: Tile, q, k, v, ids: Ids, known, log_sum, d_out):
        pieces = _pieces(tile, q.shape[3] * q.dtype.itemsize, self.widest)
        if len(pieces) == 1:
            return self._backward(tile, q, k, v, ids, known, log_sum, d_out)
        d_q, d_keys = jnp.zeros(q.shape, jnp.float32), []
        for query, key, piece in pieces:
            rows = lambda x, axis=2, first=query: jax.lax.slice_in_dim(x, first, None, axis=axis)
            cols = lambda x, axis=2, first=key, size=piece.keys: jax.lax.slice_in_dim(x, first, first + size, axis=axis)
            some = None if ids is None else (rows(ids[0], 1), cols(ids[1], 1))
            with said(self, piece, q, v):
                mine = self._backward(piece, rows(q), cols(k), cols(v), some, rows(known), rows(log_sum), rows(d_out))
            d_q = d_q.at[:, :, query:].add(mine[0])
            d_keys.append(mine[1:])
        return d_q, *(jnp.concatenate(parts, axis=2) for parts in zip(*d_keys, strict=True))

    def _backward(self, tile: Tile, q, k, v, ids: Ids, known, log_sum, d_out):
        given = q, k, v
        parts = _for_cores(k.shape[1], self._scaled(q), k, v, known, log_sum, d_out)
        if ids is not None:
            query_ids, key_ids = (_as_often(x, len(parts[0]) // len(q)) for x in ids)
            ids = query_ids, key_ids
        q, k, v, *rest = parts
        with said_mask(tile):
            found = splash_backward(self._table(tile, q), q, k, v, ids, *rest)
        d_q, d_k, d_v = (d.reshape(x.shape) for d, x in zip(found, given, strict=True))
        return d_q * self.scale, d_k, d_v

    def _scaled(self, q):
        """Queries times the scale of the scores. In bfloat16 this would be rounded: DeepSeek-V3's, 0.1352, by 0.3 %."""
        return (q.astype(jnp.float32) * self.scale).astype(q.dtype)

    def _table(self, tile: Tile, q) -> SplashTable:
        blocks = _blocks(tile, q.shape[3] * q.dtype.itemsize, self.widest)
        return _table(tile, q.shape[1], blocks, self.logit_softcap, self.interpret)


@functools.lru_cache(maxsize=256)
def _table(tile: Tile, heads: int, blocks, logit_softcap: float | None, interpret: bool) -> SplashTable:
    return splash_table(_mask(tile), heads, blocks, logit_softcap, interpret)
