"""Which keys a query may see: causality, a sliding window, documents."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The part of a mask that is known before the data is.

    Query `i` (counted from the first query of the whole sequence) sees key `j` if

    - `causal`: `j <= i`;
    - `window`: `i - j < window`, so a window of 1 sees only itself, and, if the mask is not causal,
      `j - i < window` too.
    """

    causal: bool = True
    window: int | None = None

    def key_range(self, start: int, stop: int, keys: int) -> tuple[int, int]:
        """The slice of keys that queries `start` to `stop` (exclusive) can see at all.

        >>> Pattern(causal=True, window=4).key_range(8, 12, 16)
        (5, 12)
        """
        first, last = 0, keys
        if self.causal:
            last = min(keys, stop)
        if self.window is not None:
            first = max(0, start - self.window + 1)
            if not self.causal:
                last = min(keys, stop - 1 + self.window)
        return first, max(last, first + 1)

    def pairs(self, queries: int, keys: int) -> float:
        """How many pairs of a query and a key see each other, of queries that lie anywhere in a sequence of `keys`.

        >>> Pattern(causal=True).pairs(8, 16), Pattern(causal=True, window=4).pairs(16, 16)
        (64.0, 56.0)
        """
        if self.window is None:
            return queries * keys / (2 if self.causal else 1)
        window = min(self.window, keys)
        behind = window - window * window / (2 * keys)  # the first queries have fewer keys behind them
        return queries * (behind if self.causal else min(2 * behind - 1, keys))

    def hides(self, start: int, stop: int, first: int, last: int) -> bool:
        """Whether any of the keys `first` to `last` is hidden from any of the queries `start` to `stop`."""
        hidden = self.causal and last - 1 > start
        if self.window is not None:
            hidden = hidden or stop - 1 - first >= self.window
            hidden = hidden or (not self.causal and last - 1 - start >= self.window)
        return hidden

    def visible(self, queries: jax.Array | np.ndarray, keys: jax.Array | np.ndarray):
        """`bool["queries keys"]`, True where a query sees a key; None if every query sees every key.

        Args:
            queries: `i32["queries"]`, positions in the whole sequence.
            keys: `i32["keys"]`, likewise.
        """
        distance = queries[:, None] - keys[None, :]
        seen = None
        if self.causal:
            seen = distance >= 0
        if self.window is not None:
            near = distance < self.window
            if not self.causal:
                near = near & (distance > -self.window)
            seen = near if seen is None else seen & near
        return seen


def same_document(query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    """`bool["batch queries keys"]`, True where the two positions belong to one document.

    >>> import jax.numpy as jnp
    >>> same_document(jnp.array([[0, 1]]), jnp.array([[0, 1]])).tolist()
    [[[True, False], [False, True]]]
    """
    return query_ids[:, :, None] == key_ids[:, None, :]


def hidden_score(dtype) -> float:
    """The score given to a hidden key: its weight is zero, and no arithmetic on it overflows."""
    return float(-0.5 * jnp.finfo(dtype).max)
