"""Attention of queries over keys that are all here, as one tile, with the log of its sums."""

import dataclasses

import jax

from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sliced.tile import Kernels, Tile, turned
from trellis.nn.attention.sliced.visits import said


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """How a device's queries meet keys if positions are whole; its methods are those of `Sliced`.

    Attributes:
        kernels: what computes the tile.
        pattern: which keys a query may see.
    """

    kernels: Kernels
    pattern: Pattern

    def forward(self, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
        """The result, `batch pos heads head_dim`, and the log of the sums, `f32["batch heads pos"]`."""
        tile, (q, k, v) = self._enter(q, k, v)
        with said(self.kernels, tile, q, v):
            out, log_sum = self.kernels.forward(tile, q, k, v, ids)
        return turned(out, self.kernels.axis), log_sum

    def backward(self, q, k, v, ids, out, log_sum, d_out):
        """The gradients of `q`, `k` and `v`."""
        like, (tile, arrays) = (q, k, v), self._enter(q, k, v)
        out, d_out = (turned(x, self.kernels.axis) for x in (out, d_out))
        with said(self.kernels, tile, arrays[0], arrays[2]):
            known = self.kernels.known(out, d_out)
            found = self.kernels.backward(tile, *arrays, ids, known, log_sum, d_out)
        return tuple(turned(d, self.kernels.axis).astype(x.dtype) for d, x in zip(found, like, strict=True))

    def _enter(self, q, k, v):
        tile = Tile(q.shape[1], k.shape[1], self.pattern)
        return tile, tuple(turned(x, self.kernels.axis) for x in (q, k, v))
