"""Mixtures: rows of several stores interleaved exactly by weights, again as a pure function of seed and position."""

import bisect
import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from trellis.data.arguments import whole
from trellis.data.batch import Batch
from trellis.data.batch_sequence import Batches, Rows
from trellis.data.order.order import Shuffle
from trellis.data.order.packing import pick
from trellis.data.order.permutation import Permutation, derive_key
from trellis.data.sizes import BatchSizes
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError, shortened

Weights = Mapping[str, float]
_MIX = 4  # what a key is for; 1 to 3 are in order.py
# The most rows of a block. The sources of sixteen blocks' rows are kept, at 16 bytes a row.
_MOST_ROWS = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Named stores with weights, which are the share of rows that comes from each.

    Attributes:
        stores: the sources.
        weights: one weight a source, or a list of (first step, weights) from step 0 on. Only ratios matter.
        max_epochs: for sources that may be read only so many times, 1.5 for one and a half; after that the others
            divide their share. It must be enough for a row.
        validation: held-out stores, under the same names or others ("web/c4": slashes make groups).
        block: rows over which the shares are kept: after any number of blocks each source has its share to within half
            a row, and the one with the largest share takes what the rounding leaves.
    """

    stores: Mapping[str, TokenStore]
    weights: Weights | Sequence[tuple[int, Weights]]
    max_epochs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    validation: Mapping[str, TokenStore] = dataclasses.field(default_factory=dict)
    block: int = 2048

    def __post_init__(self):
        self._check_types()
        for name, store in [*self.stores.items(), *self.validation.items()]:
            if not isinstance(store, TokenStore):
                raise UserError(
                    "The sources of a mixture must be open token stores.",
                    seen=f"{store!r} for `{name}`",
                    where="Mixture",
                    fix="write open_store(path)",
                )
        steps = [step for step, _ in self.schedule]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise UserError(
                "Weights must be listed in order of their steps, starting at step 0.",
                seen=f"steps {steps}",
                where="Mixture.weights",
                fix="begin with (0, weights)",
            )
        for step, weights in self.schedule:
            known = not set(weights) - set(self.stores)
            if not (known and all(map(_is_amount, weights.values())) and sum(weights.values())):
                raise UserError(
                    "Weights must be for known sources, with none negative and not all zero.",
                    seen=f"{dict(weights)} of {', '.join(self.stores)}",
                    where=f"Mixture.weights from step {step}",
                    fix="name each source of `stores` with a number as its weight, at least one of them above 0",
                )
        if unread := [name for name in self.stores if not any(name in weights for _, weights in self.schedule)]:
            raise UserError(
                "Every source of a mixture needs a weight at some step.",
                seen=f"none for {', '.join(unread)}",
                where="Mixture.weights",
                fix="give it one, or leave it out of `stores`; with a weight of 0, none of it is read",
            )
        if set(self.max_epochs) - set(self.stores):
            raise UserError(
                "`max_epochs` can only name sources of the mixture.",
                seen=", ".join(sorted(set(self.max_epochs) - set(self.stores))),
                where="Mixture.max_epochs",
                fix="use one of " + ", ".join(self.stores),
            )
        for name, epochs in self.max_epochs.items():
            if epochs is not None and not _is_amount(epochs):
                raise UserError(
                    "The epochs of a source must be a number above 0.",
                    seen=f"{epochs!r} of `{name}`",
                    where="Mixture.max_epochs",
                    fix="use 1 for one pass, 1.5 for one and a half, or leave the source out of `max_epochs`",
                )
        made_by = {
            name: store.tokenizer_sha256
            for name, store in [*self.stores.items(), *self.validation.items()]
            if store.tokenizer_sha256
        }
        if len(set(made_by.values())) > 1:
            raise UserError(
                "All stores of a mixture must have the same tokenizer.",
                seen=", ".join(f"{name}: sha256 {sha[:12]}" for name, sha in made_by.items()),
                where="Mixture.stores",
                fix="tokenize all of them with the tokenizer.json of one",
            )
        check_block(self.block, len(self.stores), "Mixture.block")

    def _check_types(self) -> None:
        """Refuses fields that are no maps from names, weights of no such form, and blocks of no number of rows."""
        for field in ("stores", "max_epochs", "validation"):
            value = getattr(self, field)
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise UserError(
                    f"The {field} of a mixture must be given by the names of its sources.",
                    seen=shortened(repr(value), 80),
                    where=f"Mixture.{field}",
                    fix=f"write {{'web': ...}}{'' if field == 'stores' else ', or leave it out'}",
                )
        pairs = [(0, self.weights)] if isinstance(self.weights, Mapping) else self.weights
        try:
            steps = [(operator.index(step), weights) for step, weights in pairs]
        except (TypeError, ValueError):
            steps = [(0, None)]
        if not all(isinstance(weights, Mapping) for _, weights in steps):
            raise UserError(
                "Weights must be given by the names of sources, or as pairs (first step, weights by names).",
                seen=shortened(repr(self.weights), 80),
                where="Mixture.weights",
                fix="write {'web': 0.9, 'code': 0.1}, or [(0, {'web': 0.9, 'code': 0.1}), (1000, ...)]",
            )
        object.__setattr__(self, "block", whole(self.block, "block", "Mixture"))

    @property
    def schedule(self) -> list[tuple[int, Weights]]:
        """(first step, weights) from step 0 on."""
        if isinstance(self.weights, Mapping):
            return [(0, self.weights)]
        return [(int(step), weights) for step, weights in self.weights]

    def rows(
        self,
        *,
        seed: int,
        sizes: BatchSizes,
        max_epochs: int | None,
        packing: str,
        shuffle: Shuffle | None,
    ) -> "MixtureRows":
        """The endless sequence of rows that `Batches` reads.

        Args:
            seed: of the order of rows; each source has one of its own, derived from it.
            sizes: the sequences in each step, and their lengths in tokens.
            max_epochs: for sources that `max_epochs` of the mixture does not name; None for no limit.
            packing, shuffle: as in `Batches`.

        Raises:
            UserError: a source may not be read for even one row.
        """
        sources = [
            Rows(
                store,
                lengths=sizes.lengths,
                packing=packing,
                seed=derive_key(seed, _MIX, i),
                shuffle=shuffle,
            )
            for i, store in enumerate(self.stores.values())
        ]
        names = list(self.stores)
        limits = []
        for name, rows in zip(names, sources, strict=True):
            epochs = self.max_epochs.get(name, max_epochs)
            limits.append(None if epochs is None else round(epochs * rows.num_rows))
            if limits[-1] == 0:
                raise UserError(
                    "A source of a mixture must be read for at least one row.",
                    seen=f"{epochs:g} epochs of `{name}`, which has {rows.num_rows:,} rows",
                    where=f"the epochs of `{name}`",
                    fix=f"use {1 / rows.num_rows:.2g} or more, or leave the source out",
                )
        starts = [(sizes.first_row(step), [Fraction(str(w.get(n, 0))) for n in names]) for step, w in self.schedule]
        return MixtureRows(sources, starts, limits, block=self.block, seed=seed)

    def validation_batches(
        self, *, sequence_length: int, batch_size: int, packing: str = "chunk"
    ) -> dict[str, Batches]:
        """One pass over each held-out store, by its name: every token once, in order.

        Args:
            sequence_length: tokens in a sequence.
            batch_size: sequences in a batch; the last batch is filled up with padding.
            packing: as in `Batches`.
        """
        return {
            name: Batches(
                store,
                sequence_length=sequence_length,
                batch_size=batch_size,
                packing=packing,
                shuffle=False,
                max_epochs=1,
                pad_last=True,
            )
            for name, store in self.validation.items()
        }


def check_block(rows: int, sources: int, where: str) -> None:
    """Refuses a block that is too short for its sources, or whose order takes too much memory.

    Raises:
        UserError: it has too few rows, or too many.
    """
    if rows < sources**2:
        raise UserError(
            "A block of a mixture needs at least as many rows as the square of its number of sources.",
            seen=f"{rows} rows for {sources} sources",
            where=where,
            fix=f"use {sources**2} or more",
        )
    if rows > _MOST_ROWS:
        raise UserError(
            "The order of a mixture's block must fit in memory.",
            seen=f"{rows:,} rows",
            where=where,
            fix=f"use {_MOST_ROWS:,} or fewer",
        )


def _is_amount(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


@dataclasses.dataclass(frozen=True)
class _Stage:
    """Rows from `first` on, with fixed shares, until the next stage; `before[s]` rows of source s are used up."""

    index: int
    first: int
    shares: tuple[Fraction, ...]
    before: tuple[int, ...]

    @property
    def main(self) -> int:
        """The source that takes what rounding leaves."""
        return max(range(len(self.shares)), key=lambda s: (self.shares[s], -s))

    def used(self, blocks: int, size: int) -> list[int]:
        """Rows of each source in the first `blocks` blocks of the stage."""
        counts = [int(share * size * blocks + Fraction(1, 2)) for share in self.shares]
        counts[self.main] += size * blocks - sum(counts)
        return counts


class MixtureRows:
    """Rows of a mixture by position.

    A stage is a range of positions with fixed shares: it ends where the weights change, or where a source with a limit
    has given its last row. It is divided into blocks. After j blocks source s has given
    `floor(share * block * j + 1/2)` rows, and the source with the largest share the rest. Inside a block the sources'
    rows are in a pseudorandom order.
    """

    def __init__(self, sources: list[Rows], starts, limits: list[int | None], *, block: int, seed: int):
        self._sources, self._block, self._seed, self._limits = sources, block, seed, limits
        self.max_rows: int | None = None
        self._stages: list[_Stage] = []
        self._plan(starts)
        self._firsts = [stage.first for stage in self._stages]
        self._arrangement = functools.lru_cache(maxsize=16)(self._arrange)

    @property
    def num_rows(self) -> int:
        """Rows of all sources, each once."""
        return sum(source.num_rows for source in self._sources)

    def filled(self, rows: int) -> float:
        """The share of the first `rows` rows that holds tokens, not padding: for each source, that of all its rows."""
        used = self._used_until(self._stages[bisect.bisect_right(self._firsts, rows) - 1], rows)
        return sum(n * source.filled(n) for n, source in zip(used, self._sources, strict=True)) / max(rows, 1)

    def read(self, positions: np.ndarray, pieces: np.ndarray, length: int) -> Batch:
        """The pieces of a length, by number, of the rows at `positions` (`i64["batch"]`)."""
        source, index = self.locate(positions)
        parts, places = [], []
        for s in np.unique(source):
            here = np.flatnonzero(source == s)
            parts.append(self._sources[s].read(index[here], pieces[here], length))
            places.append(here)
        return pick(parts, np.argsort(np.concatenate(places), kind="stable"))

    def num_tokens(self, positions: np.ndarray, pieces: np.ndarray, length: int) -> int:
        """Tokens in the same pieces, without padding."""
        source, index = self.locate(positions)
        of = lambda s: self._sources[s].num_tokens(index[source == s], pieces[source == s], length)
        return sum(of(s) for s in np.unique(source))

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each position, its source and its row in that source's own sequence: i64 each."""
        source, index = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for i, position in enumerate(map(int, positions)):
            stage = bisect.bisect_right(self._firsts, position) - 1
            block, slot = divmod(position - self._firsts[stage], self._block)
            sources, ranks, before = self._arrangement(stage, block)
            source[i] = s = sources[slot]
            index[i] = before[s] + ranks[slot]
        return source, index

    def _arrange(self, stage: int, block: int):
        """The source of each slot of a block, its rank among that source's slots, and rows used before the block."""
        described = self._stages[stage]
        start, stop = described.used(block, self._block), described.used(block + 1, self._block)
        counts = np.subtract(stop, start)
        order = Permutation(self._block, derive_key(self._seed, _MIX, described.index, block))
        sources = np.repeat(np.arange(len(counts)), counts)[order(np.arange(self._block))]
        ranks = np.empty(self._block, np.int64)
        for s, count in enumerate(counts):
            ranks[sources == s] = np.arange(count)
        return sources, ranks, np.add(described.before, start)

    def _plan(self, starts):
        """Lays out the stages: one for each entry of the weights, cut further where a source runs out."""
        used = [0] * len(self._sources)
        for i, (first, weights) in enumerate(starts):
            end = starts[i + 1][0] if i + 1 < len(starts) else None
            while end is None or first < end:
                left = [w if self._left(s, used) != 0 else Fraction(0) for s, w in enumerate(weights)]
                total = sum(left)
                if not total:
                    self.max_rows = first
                    return
                stage = _Stage(len(self._stages), first, tuple(w / total for w in left), tuple(used))
                self._stages.append(stage)
                stop = self._runs_out(stage, used)
                if end is not None and (stop is None or stop >= end):
                    stop = end
                if stop is None:
                    return
                used = self._used_until(stage, stop)
                first = stop

    def _left(self, s, used):
        limit = self._limits[s]
        return None if limit is None else limit - used[s]

    def _runs_out(self, stage, used):
        """The position after the first slot that takes a source's last row, or None."""
        found = None
        for s, share in enumerate(stage.shares):
            left = self._left(s, used)
            if left is None or not share:
                continue
            low, high = 0, 1
            while stage.used(high, self._block)[s] < left:
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if stage.used(middle, self._block)[s] < left else (low, middle)
            sources, _, _ = self._arrange(stage.index, low)
            slot = np.flatnonzero(sources == s)[left - stage.used(low, self._block)[s] - 1]
            position = stage.first + low * self._block + int(slot) + 1
            found = position if found is None else min(found, position)
        return found

    def _used_until(self, stage, stop):
        block, slots = divmod(stop - stage.first, self._block)
        sources, _, before = self._arrange(stage.index, block)
        return [int(b) + int(np.count_nonzero(sources[:slots] == s)) for s, b in enumerate(before)]
