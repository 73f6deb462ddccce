"""Tiles of attention: some queries against some keys, each with the log of its sum, so that parts can be put together.

The softmax over all keys follows from the softmaxes over parts of them: of two parts with results `o` and logs of
their sums `s`, the whole has the log `m = log(exp(s1) + exp(s2))` and the result `o1 exp(s1 - m) + o2 exp(s2 - m)`
(Milakov and Gimelshein, 2018, arXiv:1805.02867). The gradient needs no such step: with the log of the whole sum each
tile's weights are the final ones.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from trellis.nn.attention.pattern import Pattern

if TYPE_CHECKING:
    from trellis.nn.attention.further import FurtherTiles

Ids = tuple[jax.Array, jax.Array] | None
"""`i32["batch queries"]` and `i32["batch keys"]`, or None if all positions belong to one document."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one call of a kernel computes.

    Attributes:
        queries, keys: how many positions of each.
        pattern: which keys a query may see.
        ahead: the position of the first query minus that of the first key.
    """

    queries: int
    keys: int
    pattern: Pattern
    ahead: int = 0

    @property
    def full(self) -> bool:
        """Whether every query sees every key (of its document).

        >>> Tile(4, 4, Pattern(), ahead=4).full, Tile(4, 4, Pattern()).full
        (True, False)
        """
        return not self.pattern.hides(self.ahead, self.ahead + self.queries, 0, self.keys)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key see each other.

        >>> Tile(4, 4, Pattern()).pairs, Tile(4, 4, Pattern(window=3), ahead=4).pairs
        (10, 3)
        """
        rows = np.arange(self.queries) + self.ahead
        first, last = np.zeros_like(rows), np.full_like(rows, self.keys)
        if self.pattern.causal:
            last = np.minimum(last, rows + 1)
        if self.pattern.window is not None:
            first = np.maximum(first, rows - self.pattern.window + 1)
            last = np.minimum(last, rows + self.pattern.window)
        return int(np.maximum(last - first, 0).sum())


class Part(NamedTuple):
    """The result over some of the keys.

    Attributes:
        out: in the order of the kernels' dimensions, float32 unless it is a kernel's own.
        log_sum: `f32["batch heads pos"]`, the log of the sum of the exponentials of the scores.
    """

    out: jax.Array
    log_sum: jax.Array


class Kernels(Protocol):
    """One platform's kernels for tiles. Arrays have the dimensions that `turned` gives them."""

    @property
    def scale(self) -> float:
        """Multiplies the scores."""
        ...

    @property
    def logit_softcap(self) -> float | None:
        """Scores become `cap * tanh(scores / cap)`; None for no cap."""
        ...

    @property
    def axis(self) -> int:
        """The dimension of positions: 1, or 2 if heads come before them."""
        ...

    @property
    def whole_lanes(self) -> bool:
        """Whether numbers of positions must be multiples of 128."""
        ...

    @property
    def opaque(self) -> bool:
        """Whether a call is one operation to the planner, which does not see its products."""
        ...

    @property
    def further(self) -> "FurtherTiles | None":
        """Computes tiles without a window that follow each other, in place; None if there are no such kernels."""
        ...

    def forward(self, tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, ids: Ids) -> tuple[jax.Array, jax.Array]:
        """The result in the queries' type, and the log of the sums, `f32["batch heads pos"]`."""
        ...

    def known(self, out: jax.Array, d_out: jax.Array) -> jax.Array:
        """What the gradient needs of the result over all keys, positions along `axis`: itself, or what it is used for.

        That is its product with its own gradient, `f32["batch heads pos"]`, which tiles need not make again.
        """
        ...

    def backward(self, tile: Tile, q, k, v, ids: Ids, known, log_sum, d_out) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The tile's part of the gradients of `q`, `k` and `v`; `known` and `log_sum` are of all keys."""
        ...


def turned(x: jax.Array, axis: int) -> jax.Array:
    """`batch pos heads head_dim` with positions at `axis`, and the other way around."""
    return x if axis == 1 else x.transpose(0, 2, 1, 3)


NOTHING = -1e30
"""The log of a sum over no keys: small enough to weigh nothing beside any other, and finite, to be subtracted."""


def put_together(parts: Sequence[Part], axis: int) -> Part:
    """The result over the keys of all of them, `out` with positions at `axis`."""
    if len(parts) == 1:
        return parts[0]
    log_sum = functools.reduce(jnp.logaddexp, (part.log_sum for part in parts))

    def share(part: Part):
        weight = jnp.exp(part.log_sum - log_sum)
        return (weight if axis == 2 else weight.swapaxes(1, 2))[..., None] * part.out.astype(jnp.float32)

    return Part(sum(map(share, parts)), log_sum)
