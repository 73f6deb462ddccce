"""The training order of rows: a pure function of a seed and a position, with nothing to store."""

import dataclasses

import numpy as np

from trellis.choices import is_count
from trellis.data.arguments import flag
from trellis.data.order.permutation import Permutation, derive_key
from trellis.errors import UserError

_ROWS, _BLOCKS, _WINDOW = 1, 2, 3  # what a key is for, so that no two permutations share one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """How the rows of an epoch are shuffled.

    With no `block` all rows are permuted together. With a `block`, blocks of that many consecutive rows are permuted;
    then the rows of `window` blocks at a time are permuted among each other. Reading touches `window` blocks at a time,
    so that object stores are read in whole chunks. Rows after the last whole block come last in every epoch.

    With `in_order` the blocks keep their order in the store and only the rows inside a window move. That order
    does not depend on the number of rows, so it can start on a store that is still being written.
    """

    block: int | None = None
    window: int = 16
    in_order: bool = False

    def __post_init__(self):
        if (self.block is not None and not is_count(self.block)) or not is_count(self.window):
            raise UserError(
                "A shuffle needs blocks of at least one row, and windows of at least one block, both whole numbers.",
                seen=f"block={self.block!r}, window={self.window!r}",
                where="Shuffle",
                fix="use 1 or more",
            )
        flag(self.in_order, "in_order", "Shuffle")
        if self.in_order and self.block is None:
            raise UserError(
                "A shuffle that keeps blocks in order needs their size.",
                seen="block=None, in_order=True",
                where="Shuffle",
                fix="set block to a number of rows",
            )

    @property
    def rows(self) -> int:
        """The number of rows of a window."""
        assert self.block is not None  # all rows are one window
        return self.block * self.window

    @property
    def needs_all_rows(self) -> bool:
        """Whether the order depends on how many rows there are."""
        return not self.in_order


class Order:
    """Rows of an endless sequence of epochs: position `epoch * num_rows + i` holds `row(epoch, i)`.

    Every epoch is a different permutation of the rows.

    >>> order = Order(5, seed=0, shuffle=None)
    >>> order.rows(np.arange(7)).tolist()
    [0, 1, 2, 3, 4, 0, 1]
    >>> sorted(Order(5, seed=0, shuffle=Shuffle()).rows(np.arange(5, 10)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: Shuffle | None):
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The rows at `positions` (i64, any shape): i64 of that shape."""
        positions = np.asarray(positions, np.int64)
        epochs, within = np.divmod(positions, self.num_rows)
        if self.shuffle is None:
            return within
        out = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._epoch(int(epoch), within[here])
        return out

    def _epoch(self, epoch, within):
        if self.shuffle.block is None:
            return Permutation(self.num_rows, derive_key(self.seed, epoch, _ROWS))(within)
        return windowed(within, self.num_rows, self.seed, epoch, self.shuffle)


def windowed(within: np.ndarray, num_rows: int | None, seed: int, epoch: int, shuffle: Shuffle) -> np.ndarray:
    """The rows at positions `within` an epoch under a blocked shuffle.

    `num_rows` may be None (not known yet) if the shuffle keeps blocks in order and the positions are in whole windows.
    """
    block, window = shuffle.rows // shuffle.window, shuffle.rows
    out = np.empty_like(within)
    whole = None if num_rows is None else num_rows // block * block
    blocks = None if shuffle.in_order or not whole else Permutation(whole // block, derive_key(seed, epoch, _BLOCKS))
    for w in np.unique(within // window):
        here = within // window == w
        start = int(w) * window
        size = window if whole is None else min(window, whole - start)
        offsets = within[here] - start
        inside = offsets < size  # the rest are rows after the last whole block
        moved = offsets.copy()
        if size > 0:
            moved[inside] = Permutation(size, derive_key(seed, epoch, _WINDOW, int(w)))(offsets[inside])
        rows = start + moved
        if blocks is not None:
            rows[inside] = blocks(rows[inside] // block) * block + rows[inside] % block
        out[here] = rows
    if num_rows is not None and whole is not None and whole < num_rows:
        tail = within >= whole
        out[tail] = whole + Permutation(num_rows - whole, derive_key(seed, epoch, _WINDOW, -1))(within[tail] - whole)
    return out
