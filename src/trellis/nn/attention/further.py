"""Tiles of attention that follow each other, as those of a ring do, by our own kernels for TPUs."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trellis.nn.attention import mosaic
from trellis.nn.attention.mosaic import block_of
from trellis.nn.attention.sliced.tile import Ids, Part, Tile
from trellis.nn.attention.sliced.visits import Entry, Keys, Queries, said_mask, said_work

# Sides of the blocks of scores: of a block's products in tiles that are seen whole, and of those in causal tiles.
WHOLE, CAUSAL = 1024, 512
# Bytes of a head's row for which blocks have these sides; wider rows have smaller blocks.
ROW = 256
# The units of chips for which our own kernels were compiled. Part of the vector memory is left to the compiler.
UNITS = {
    "TPU v5 lite": mosaic.Units(100 * 2**20, 128),
    "TPU v5": mosaic.Units(52 * 2**20, 128),
    "TPU v6": mosaic.Units(100 * 2**20, 256),
}
# Bytes of the vector memory for a key in the backward pass, with its gradients before and after: the more keys are
# there, the fewer times the gradients of queries are read.
KEY_BYTES = 12 * 2**10


def units_of(device_kind: str) -> mosaic.Units | None:
    """The units of a chip for which we have our own kernels, by JAX's name for it; None for others.

    >>> units_of("TPU v4"), units_of("TPU v6 lite").columns
    (None, 256)
    """
    return next((units for kind, units in UNITS.items() if device_kind.startswith(kind)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherTiles:
    """Tiles that are whole, or causal from their first query and key on, each added to what was found before.

    Attributes:
        scale: multiplies the scores.
        logit_softcap: as in `trellis.nn.dot_product_attention`.
        widest: the most queries and keys of a block of a tile that is whole.
        units: of the chip.
        interpret: runs the kernels on any backend, slowly.
    """

    scale: float
    logit_softcap: float | None
    widest: tuple[int, int]
    units: mosaic.Units
    interpret: bool = False

    def forward(self, tile: Tile, entry: Entry, queries: Queries, keys: Keys, so_far: Part) -> Part:
        """The result over the keys so far and those of an entry; queries are scaled."""
        scores = self._scores(tile, queries.q, self.widest[1])
        log_sum, heads = so_far.log_sum[:, :, None], math.prod(queries.q.shape[:2])
        with said_work(tile, heads, queries.q, keys.v), said_mask(tile):
            given = _first_blocks(scores, entry), queries.q, keys.k, keys.v, _ids_in_rows(queries, keys)
            out, log_sum = mosaic.forward(scores, *given, so_far.out, log_sum)
        return Part(out, log_sum[:, :, 0])

    def backward(self, tile: Tile, entry: Entry, queries: Queries, keys: Keys, d_q, d_keys):
        """The gradients so far and those of an entry; queries are scaled, and `d_q` is of these."""
        assert queries.known is not None and queries.log_sum is not None
        known, log_sum = queries.known[:, :, None], queries.log_sum[:, :, None]
        heads, most = math.prod(queries.q.shape[:2]), self.units.memory // KEY_BYTES
        size = self._scores(tile, queries.q, most).blocks.keys
        for first in range(0, tile.keys, size):
            before = 0 if tile.full else first  # queries that see none of these keys
            piece = Tile(tile.queries - before, size, tile.pattern)
            scores = self._scores(piece, queries.q, most)
            start = _first_blocks(scores, Entry(entry.query + before, entry.key + first))
            with said_work(piece, heads, queries.q, keys.v), said_mask(piece):
                given = start, queries.q, keys.k, keys.v, _ids_in_rows(queries, keys), known, log_sum, queries.d_out
                d_q, *d_keys = mosaic.backward(scores, *given, d_q, *d_keys)
        return d_q, tuple(d_keys)

    def _scores(self, tile: Tile, q, most_keys: int) -> mosaic.Scores:
        """A tile that is whole, or causal from its first query and key on, in blocks of so many keys at most."""
        share = ROW / max(ROW, q.shape[3] * q.dtype.itemsize)
        most_queries = self.widest[0] if tile.full else WHOLE
        keys = block_of(tile.keys, int(share * most_keys))
        queries = block_of(math.gcd(tile.queries, 0 if tile.full else keys), int(share * most_queries))
        blocks = mosaic.Blocks(queries, keys, block_of(keys, WHOLE if tile.full else CAUSAL))
        given = self.logit_softcap, blocks, self.units, self.interpret
        return mosaic.Scores(tile.queries, tile.keys, not tile.full, *given)

    def scaled(self, q):
        """Queries as `forward` and `backward` take them."""
        return (q.astype(jnp.float32) * (self.scale / mosaic.LN2)).astype(q.dtype)


def _first_blocks(scores: mosaic.Scores, entry: Entry) -> jax.Array:
    """The first block of queries and of keys of an entry."""
    sizes = scores.blocks.queries, scores.blocks.keys
    first = [jnp.asarray(x, jnp.int32) // size for x, size in zip((entry.query, entry.key), sizes, strict=True)]
    return jnp.stack(first)


def _ids_in_rows(queries: Queries, keys: Keys) -> Ids:
    return None if keys.ids is None or queries.ids is None else (queries.ids[:, None], keys.ids[:, None])
