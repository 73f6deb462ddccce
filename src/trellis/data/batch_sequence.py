"""Batches by number: a pure function of the data, the seed and the step."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trellis.choices import is_count
from trellis.data.arguments import flag, whole
from trellis.data.batch import Batch
from trellis.data.order.order import Order, Shuffle, windowed
from trellis.data.order.packing import open_rows, padding, pick
from trellis.data.sizes import BatchSizes, Schedule
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError

# For up to this many rows, tokens are counted row by row if a share of them is asked for.
_COUNTED = 1 << 11


class Rows:
    """The endless, shuffled sequence of rows of one store: epoch after epoch, each in a different order.

    Rows have the last and longest of `lengths`; sequences of other lengths are pieces of them.
    """

    def __init__(self, store: TokenStore, *, lengths: Sequence[int], packing: str, seed: int, shuffle: Shuffle | None):
        self.store, self._seed, self._shuffle = store, seed, shuffle
        if len(lengths) > 1 and packing != "chunk":
            raise UserError(
                "Several sequence lengths need concatenated documents: all lengths are cut from the same rows.",
                seen=f"packing {packing}, lengths {', '.join(map(str, lengths))}",
                where="packing",
                fix="concatenate documents, or use one sequence length",
            )
        self._cut = {length: open_rows(store, length, packing) for length in lengths}
        self._longest = lengths[-1]
        self._rows = self._cut[self._longest]
        if shuffle is not None and shuffle.needs_all_rows and not store.complete:
            raise UserError(
                "A shuffle of all rows needs a complete store.",
                seen=f"{store.num_tokens:,} tokens so far",
                where=store.url,
                fix="wait until it is complete, or shuffle in order: Shuffle(block=1024, in_order=True)",
            )

    @property
    def num_rows(self) -> int:
        """The number of rows of an epoch."""
        if not self.store.complete:
            self._rows.wait_for(2**62)
        return self._rows.num_rows

    def filled(self, rows: int) -> float:
        """The share of the first `rows` rows that holds tokens, not padding, taken to be that of all rows. In a store
        that is still being written it is 1: nothing waits for its end here."""
        if not self.store.complete:
            return 1.0
        return self.store.num_tokens / (self.num_rows * self._longest)

    def read(self, positions: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        """The pieces of a length, by number, of the rows at `positions` (`i64["batch"]`) of the sequence."""
        return self._cut[length].read(self._places(positions, pieces, length))

    def num_tokens(self, positions: np.ndarray, pieces: np.ndarray, length: int) -> int:
        """Tokens in the same pieces, without padding."""
        return self._cut[length].num_tokens(self._places(positions, pieces, length))

    def _places(self, positions, pieces, length):
        return self._order(positions) * (self._longest // length) + pieces

    def _order(self, positions):
        if not self.store.complete:
            window = 1 if self._shuffle is None else self._shuffle.rows
            last = int(positions.max())
            self._rows.wait_for((last // window + 1) * window)
            if not self.store.complete:
                if self._shuffle is None:
                    return positions
                return windowed(positions, None, self._seed, 0, self._shuffle)
        return Order(self._rows.num_rows, seed=self._seed, shuffle=self._shuffle).rows(positions)


class Batches:
    """The batches of a run.

    Args:
        data: a token store, or a `Mixture` of several.
        sequence_length: tokens in a row, or a schedule of (first step, tokens), each a divisor of the longest.
        batch_size: rows of a batch, or a schedule of (first step, rows).
        seed: chooses the order.
        packing: "chunk" concatenates documents and cuts; "best_fit" packs whole documents; "pad" gives each its row.
        shuffle: True permutes all rows of an epoch; False keeps the order of the store; a `Shuffle` says more.
        max_epochs: the data ends after this many passes; None never ends it.
        pad_last: fill the last batch up with rows of padding, instead of leaving out a last partial batch.
        mask_documents: whether batches say where documents begin; without it each row is one text.

    Nothing but `step` is needed to resume, whatever the hosts and devices.
    """

    def __init__(
        self,
        data,
        *,
        sequence_length: Schedule,
        batch_size: Schedule,
        seed: int = 0,
        packing: str = "chunk",
        shuffle: bool | Shuffle = True,
        max_epochs: int | None = None,
        pad_last: bool = False,
        mask_documents: bool = True,
    ):
        _check(data, seed, shuffle)
        pad_last, mask_documents = (
            flag(pad_last, "pad_last", "Batches"),
            flag(mask_documents, "mask_documents", "Batches"),
        )
        seed = int(seed)  # keys of an order are Python's numbers, which have no size
        self.seed, self.data = seed, data
        self.sizes, self._pad_last = BatchSizes(batch_size, sequence_length), pad_last
        self._mask_documents = mask_documents
        if max_epochs is not None and not is_count(max_epochs):
            raise UserError(
                "`max_epochs` must be a whole number of passes, 1 or more.",
                seen=max_epochs,
                where="max_epochs",
                fix="use 1 or more; a source of a `Mixture` may also have 1.5",
            )
        options: dict[str, Any] = {"packing": packing, "shuffle": shuffle}
        if isinstance(shuffle, bool):
            options["shuffle"] = Shuffle() if shuffle else None
        if isinstance(data, TokenStore):
            self._rows = Rows(data, seed=seed, lengths=self.sizes.lengths, **options)
            self._max_rows = None if max_epochs is None else max_epochs * self._rows.num_rows
        else:
            self._rows = data.rows(seed=seed, sizes=self.sizes, max_epochs=max_epochs, **options)
            self._max_rows = self._rows.max_rows

    @property
    def num_steps(self) -> int | None:
        """Steps until the data ends (a last partial batch counts if it is padded), or None if it never does."""
        if self._max_rows is None:
            return None
        whole = self.sizes.steps_for(self._max_rows)
        (row,), _ = self.sizes.places(whole, slice(1))  # of the first sequence that is left
        return whole + (self._pad_last and int(row) < self._max_rows)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of `step`, or some consecutive rows of it.

        Raises:
            UserError: the data ends before that step.
        """
        length, real, at, pieces = self._places(step, rows)
        read = lambda: self._rows.read(at[real], pieces[real], length)
        if real.all():
            batch = read()
        else:
            batch = padding(len(at) - int(real.sum()), length)
            batch = pick([read(), batch], np.arange(len(at))) if real.any() else batch
        return batch if self._mask_documents else batch.without_documents()

    def num_tokens(self, step: int) -> int:
        """The number of tokens in the batch of `step`, including those that do not count in the loss, but not padding.

        Raises:
            UserError: the data ends before that step.
        """
        length, real, at, pieces = self._places(step, None)
        return self._rows.num_tokens(at[real], pieces[real], length)

    def filled(self, steps: int) -> float:
        """The share of the positions in the batches before step `steps` that holds tokens, not padding.

        For many rows it is approximated by the average over the rows of their sources.
        """
        steps = whole(steps, "steps", "filled")
        rows = self.sizes.first_row(steps)
        if rows > _COUNTED or not steps:
            return self._rows.filled(rows)
        tokens = sum(self.num_tokens(step) for step in range(steps))
        return tokens / sum(math.prod(self.sizes.shape(step)) for step in range(steps))

    def _places(self, step: int, rows: slice | None) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """For a batch: the length of its rows, which of them exist, their positions, and which pieces of these."""
        if not isinstance(step, (int, np.integer)) or step < 0:
            raise UserError(
                "A step must be a whole number, 0 or more.", seen=repr(step), where="batch", fix="use int(step)"
            )
        last = self.num_steps
        if last is not None and step >= last:
            raise UserError(
                "The data must last for all steps of the run.",
                seen=f"step {step}, data for {last}",
                where="batches",
                fix="train for fewer steps, or allow more epochs",
            )
        if rows is not None and (not isinstance(rows, slice) or rows.step not in (None, 1)):
            raise UserError(
                "Rows of a batch must be a slice of consecutive ones.",
                seen=rows,
                where="batch",
                fix="use slice(first, last + 1)",
            )
        at, pieces = self.sizes.places(step, rows)
        _, length = self.sizes.shape(step)
        real = np.ones(len(at), bool) if self._max_rows is None else at < self._max_rows
        return length, real, at, pieces


def _check(data, seed, shuffle) -> None:
    """Refuses what `Batches` cannot be made of."""
    if not isinstance(data, TokenStore) and not hasattr(data, "rows"):
        raise UserError(
            "Batches are read from an open token store, or from a `Mixture` of several.",
            seen=repr(data)[:80],
            where="Batches",
            fix="write open_store(path), or Mixture(stores={'web': open_store(path), ...}, weights={'web': 1.0, ...})",
        )
    whole_seed = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not whole_seed or not isinstance(shuffle, bool | Shuffle | None):
        raise UserError(
            "A seed must be a whole number; a shuffle must be True, False or a `Shuffle`.",
            seen=f"seed={seed!r}, shuffle={shuffle!r}",
            where="Batches",
            fix="use seed=0 and shuffle=True, for example",
        )
