"""Batches by number: a pure function of the data, the seed and the step."""

import bisect
from collections.abc import Sequence

import numpy as np

from trellis.data.batch import Batch
from trellis.data.order.order import Order, Shuffle, windowed
from trellis.data.order.packing import open_rows, padding, pick
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError

BatchSize = int | Sequence[tuple[int, int]]


class BatchSizes:
    """Rows of each step's batch: a constant, or a list of (first step, rows).

    >>> sizes = BatchSizes([(0, 4), (10, 8)])
    >>> sizes.at(9), sizes.at(10), sizes.first_row(12)
    (4, 8, 56)
    """

    def __init__(self, batch_size: BatchSize):
        stages = [(0, batch_size)] if isinstance(batch_size, int) else [tuple(stage) for stage in batch_size]
        steps = [step for step, _ in stages]
        if not stages or steps[0] != 0 or steps != sorted(set(steps)) or any(size < 1 for _, size in stages):
            raise UserError(
                "Batch sizes are one number, or (first step, rows) from step 0 in rising order.",
                seen=batch_size,
                where="batch_size",
                fix="for example 512, or [(0, 256), (1000, 512)]",
            )
        self._steps, self._sizes = steps, [size for _, size in stages]
        self._rows = [0]
        for i in range(1, len(stages)):
            self._rows.append(self._rows[-1] + (steps[i] - steps[i - 1]) * self._sizes[i - 1])

    def at(self, step: int) -> int:
        """Rows of the batch of `step`."""
        return self._sizes[bisect.bisect_right(self._steps, step) - 1]

    def first_row(self, step: int) -> int:
        """Rows in all batches before `step`."""
        stage = bisect.bisect_right(self._steps, step) - 1
        return self._rows[stage] + (step - self._steps[stage]) * self._sizes[stage]

    def steps_for(self, rows: int) -> int:
        """How many whole batches `rows` rows fill."""
        stage = bisect.bisect_right(self._rows, rows) - 1
        return self._steps[stage] + (rows - self._rows[stage]) // self._sizes[stage]


class Rows:
    """The endless, shuffled sequence of rows of one store: epoch after epoch, each in another order."""

    def __init__(self, store: TokenStore, *, sequence_length: int, packing: str, seed: int, shuffle: Shuffle | None):
        self.store, self._seed, self._shuffle = store, seed, shuffle
        self._rows = open_rows(store, sequence_length, packing)
        if shuffle is not None and shuffle.needs_all_rows and not store.complete:
            raise UserError(
                "A shuffle of all rows needs a complete store.",
                seen=f"{store.num_tokens:,} tokens so far",
                where=store.url,
                fix="wait until it is complete, or shuffle in order: Shuffle(block=1024, in_order=True)",
            )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        if not self.store.complete:
            self._rows.wait_for(2**62)
        return self._rows.num_rows

    def read(self, positions: np.ndarray) -> Batch:
        """The rows at `positions` (`i64["batch"]`) of the sequence."""
        return self._rows.read(self._order(positions))

    def _order(self, positions):
        if not self.store.complete:
            window = 1 if self._shuffle is None else self._shuffle.block * self._shuffle.window
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
        sequence_length: tokens in a row.
        batch_size: rows of a batch, or a schedule of (first step, rows).
        seed: chooses the order.
        packing: "chunk" concatenates documents and cuts; "best_fit" packs whole documents; "pad" gives each its row.
        shuffle: True permutes all rows of an epoch; False keeps the order of the store; a `Shuffle` says more.
        max_epochs: the data ends after so many passes; None goes on for ever.
        pad_last: fill the last batch up with rows of padding, instead of leaving a last partial batch out.
        mask_documents: say where documents begin; without it each row is one text.

    Nothing but `step` is needed to resume, whatever the hosts and devices.
    """

    def __init__(
        self,
        data,
        *,
        sequence_length: int,
        batch_size: BatchSize,
        seed: int = 0,
        packing: str = "chunk",
        shuffle: bool | Shuffle = True,
        max_epochs: int | None = None,
        pad_last: bool = False,
        mask_documents: bool = True,
    ):
        shuffle = {True: Shuffle(), False: None}[shuffle] if isinstance(shuffle, bool) else shuffle
        self.sequence_length, self.seed, self.data = sequence_length, seed, data
        self.sizes, self._pad_last, self._mask_documents = BatchSizes(batch_size), pad_last, mask_documents
        if max_epochs is not None and max_epochs < 1:
            raise UserError("Data is read at least once.", seen=max_epochs, where="max_epochs", fix="use 1 or more")
        options = {"sequence_length": sequence_length, "packing": packing, "shuffle": shuffle}
        if isinstance(data, TokenStore):
            self._rows = Rows(data, seed=seed, **options)
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
        return whole + (self._pad_last and self.sizes.first_row(whole) < self._max_rows)

    @property
    def steps_per_epoch(self) -> float:
        """Steps of the first pass over the data, at the first batch size."""
        return self._rows.num_rows / self.sizes.at(0)

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of `step`, or some consecutive rows of it.

        Raises:
            UserError: the data ends before.
        """
        last = self.num_steps
        if step < 0 or (last is not None and step >= last):
            raise UserError(
                "The data lasts for all steps of a run.",
                seen=f"step {step}, data for {last}",
                where="batches",
                fix="train for fewer steps, or allow more epochs",
            )
        first = self.sizes.first_row(step)
        start, stop, _ = (rows or slice(None)).indices(self.sizes.at(step))
        positions = np.arange(first + start, first + max(start, stop), dtype=np.int64)
        real = positions if self._max_rows is None else positions[positions < self._max_rows]
        if len(real) == len(positions):
            batch = self._rows.read(positions)
        else:
            batch = padding(len(positions) - len(real), self.sequence_length)
            batch = pick([self._rows.read(real), batch], np.arange(len(positions))) if len(real) else batch
        return batch if self._mask_documents else batch.without_documents()
