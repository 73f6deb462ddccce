"""The size of the batch of each step, and the rows of the order that it takes."""

import bisect
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trellis.errors import UserError

# A number, or a schedule of (first step, number).
Schedule = int | Sequence[tuple[int, int]]


class _Stage(NamedTuple):
    """Steps of one size. `first` is the row of the order at which its sequence length began, `before` counts the
    sequences of that length before this stage."""

    step: int
    size: int
    length: int
    first: int
    before: int


class BatchSizes:
    """The number of sequences in each step's batch, and their length: constants, or lists of (first step, number).

    An order counts rows of the longest length. A shorter sequence is a piece of such a row, and all pieces of one row
    are taken before those of the next, so a step with the same number of tokens reads the same tokens at any length. If
    sequences become longer in the middle of a row, the rest of that row is left out.

    >>> sizes = BatchSizes([(0, 4), (10, 8)])
    >>> sizes.at(9), sizes.at(10), sizes.first_row(12)
    (4, 8, 56)
    >>> sizes = BatchSizes([(0, 4), (10, 2)], [(0, 8), (10, 16)])
    >>> sizes.shape(9), sizes.shape(10), sizes.first_row(10)
    ((4, 8), (2, 16), 20)
    >>> rows, pieces = sizes.places(1, slice(1, 4))
    >>> rows.tolist(), pieces.tolist()
    ([2, 3, 3], [1, 0, 1])
    """

    def __init__(self, batch_size: Schedule, sequence_length: Schedule = 1):
        sizes = _schedule(
            batch_size, "batch_size", "Batch sizes must be a positive number, or pairs (first step, rows)"
        )
        rule = "Sequence lengths must be a positive number, or pairs (first step, tokens)"
        lengths = _schedule(sequence_length, "sequence_length", rule)
        self.longest = max(length for _, length in lengths)
        for _, length in lengths:
            if self.longest % length:
                raise UserError(
                    "Every sequence length must divide the longest.",
                    seen=f"{length} and {self.longest}",
                    where="sequence_length",
                    fix=f"use {_near(length, self.longest)}",
                )
        self._stages: list[_Stage] = []
        for step in sorted({step for step, _ in (*sizes, *lengths)}):
            size, length = _value(sizes, step), _value(lengths, step)
            first = before = 0
            if self._stages:
                last = self._stages[-1]
                first, before = last.first, last.before + (step - last.step) * last.size
                if length != last.length:
                    first, before = first + -(-before * last.length // self.longest), 0
            self._stages.append(_Stage(step, size, length, first, before))
        self._steps = [stage.step for stage in self._stages]

    def at(self, step: int) -> int:
        """The number of sequences in the batch of `step`."""
        return self._stage(step).size

    def shape(self, step: int) -> tuple[int, int]:
        """The number of sequences in the batch of `step`, and of tokens in each."""
        stage = self._stage(step)
        return stage.size, stage.length

    @property
    def lengths(self) -> list[int]:
        """All sequence lengths, in rising order."""
        return sorted({stage.length for stage in self._stages})

    def first_row(self, step: int) -> int:
        """The first row of the order from which no step before `step` has read a piece."""
        stage = self._stage(step)
        before = stage.before + (step - stage.step) * stage.size
        return stage.first + -(-before * stage.length // self.longest)

    def places(self, step: int, rows: slice | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The places of the sequences of a step's batch, or of some: rows of the order, and pieces of these rows."""
        stage = self._stage(step)
        start, stop, _ = (rows or slice(None)).indices(stage.size)
        before = stage.before + (step - stage.step) * stage.size
        found = np.arange(before + start, before + max(start, stop), dtype=np.int64)
        row, piece = np.divmod(found, self.longest // stage.length)
        return stage.first + row, piece

    def steps_for(self, rows: int) -> int:
        """The number of whole batches that `rows` rows of the order fill."""
        whole = lambda stage: (rows - stage.first) * self.longest // stage.length - stage.before
        steps = [stage.step + max(0, whole(stage)) // stage.size for stage in self._stages]
        return next(n for n, end in zip(steps, [*self._steps[1:], math.inf], strict=True) if n < end)

    def _stage(self, step: int) -> _Stage:
        return self._stages[bisect.bisect_right(self._steps, step) - 1]


def _value(schedule: list[tuple[int, int]], step: int) -> int:
    return [value for start, value in schedule if start <= step][-1]


def _near(length: int, longest: int) -> str:
    """The divisors of the longest length that are nearest to a length."""
    below = next(n for n in range(length, 0, -1) if longest % n == 0)
    above = next(n for n in range(length, longest + 1) if longest % n == 0)
    return f"{below} or {above}"


def _schedule(given: Schedule, where: str, rule: str) -> list[tuple[int, int]]:
    """A schedule as a list, from step 0 in rising order."""
    wrong = UserError(
        f"{rule} in order of steps, starting at step 0.",
        seen=repr(given),
        where=where,
        fix="write, for example, 512 or [(0, 256), (1000, 512)]",
    )
    try:
        pairs = given if isinstance(given, Sequence) else [(0, given)]
        if any(isinstance(value, bool) for _, value in pairs):
            raise wrong
        entries = [(operator.index(step), operator.index(value)) for step, value in pairs]
    except (TypeError, ValueError):
        raise wrong from None
    steps = [step for step, _ in entries]
    if not entries or steps[0] != 0 or steps != sorted(set(steps)) or any(value < 1 for _, value in entries):
        raise wrong
    return entries
