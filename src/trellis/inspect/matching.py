"""Matches the rows of a ledger with the arrays that a compiled program moves."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

from trellis.inspect.collective import Collective
from trellis.inspect.hlo import item_bits
from trellis.inspect.rows import EACH_TURN, Row
from trellis.inspect.ways import WAYS, Key, Recipe

# Collectives that move copies: what an equal one has moved need not be moved again.
COPIES = ("all-gather", "all-to-all", "permute")
_BOTH = "one over the mesh axes of two"
_IN_STEPS = "one mesh axis after the other"  # one of `WAYS`


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """An array that a collective of a compiled program moves.

    Attributes:
        collective: the collective.
        axes: mesh axes whose devices its groups are, exactly; none if they are not those of any axes.
        elements: of the array, counted as a row's payload.
        dtype: of the array, as XLA writes it.
        source: `file.py:line (function)`.
        cut: into how many equal parts its groups cut the devices along these axes, usually one.
        partly: whether it is a permute of some of the devices along these axes.
        filled: how many of the elements are not padding, as far as the program shows.
    """

    collective: Collective
    axes: tuple[str, ...]
    elements: int
    dtype: str
    source: str
    cut: int = 1
    partly: bool = False
    filled: int = 0

    @property
    def key(self) -> Key:
        """What it is, for a row that asks for it."""
        kind = _kind(self.collective.kind, self.collective.reduction)
        return Key(kind, frozenset(self.axes), self.elements, _whole(self.dtype), self.cut)

    @property
    def what(self) -> str:
        """In words: `all-reduce over data of 64 elements, 2 times, at train.py:18 (loss)`."""
        kind, times = self.collective.kind, self.collective.times
        along = self.axes and self.cut == 1 and not self.partly
        over = f"over {', '.join(self.axes)}" if along else f"in groups {_listed(self.collective.groups)}"
        often = f", {times} times" if times > 1 else ""
        of = "" if self.collective.reduction == "sum" else f"the {self.collective.reduction} of "
        return f"{kind} {over} of {of}{self.elements} elements{often}, at {self.source or self.collective.name}"


@dataclasses.dataclass(slots=True)
class Match:
    """A row of the ledger, and what does it.

    Attributes:
        row: the row.
        key: what it asks for.
        ways: how many of its runs are done in which way: "" if as the type asks.
        missing: how many of its runs nothing was found for.
    """

    row: Row
    key: Key
    ways: Counter[str]
    missing: int

    def done(self, way: str, runs: int) -> None:
        """Counts so many runs as done in this way."""
        self.ways[way] += runs
        self.missing -= runs

    @property
    def certain(self) -> bool:
        """Whether the types alone decide what it is, though perhaps not how often it runs."""
        return set(self.row.note.split("; ")) <= {"", EACH_TURN}

    @property
    def what(self) -> str:
        """In words: `all-reduce over data of f32[embed +data -> embed], 2 of 3 times, at train.py:18 (loss)`."""
        row = self.row
        often = f", {self.missing} of {row.times} times" if row.times > 1 else ""
        of = f" for {row.parameter}" if row.parameter else ""
        return f"{row.kind} over {row.axis} of {row.dtype}[{row.what}]{of}{often}, at {row.source}"


def _key(row: Row, sizes: Mapping[str, int]) -> Key:
    dtype = {"bool_": "pred", "key": "u32"}.get(row.dtype, row.dtype)  # XLA sees a key's words
    cut = 1
    if row.kind == "all-gather":  # each device gets all but its own part
        cut = math.prod(sizes[axis] for axis in row.axes) * (row.payload - row.wire) // row.payload
    kind = _kind(row.kind, row.reduction)
    return Key(kind, frozenset(row.axes), row.payload * 8 // item_bits(dtype), _whole(dtype), max(cut, 1))


def _kind(kind: str, reduction: str) -> str:
    """What is looked for: a collective's kind; for a maximum or minimum over devices, the reduction."""
    return kind if reduction == "sum" else reduction


def _whole(dtype: str) -> bool:
    """Whether numbers of this type, as JAX or XLA write it, are integers: compilers change the width, but not this."""
    return dtype.startswith(("i", "s", "u", "pred"))


@dataclasses.dataclass(slots=True)
class _Item:
    """A part, and how many of the elements that it moves in all its runs no row has taken yet."""

    part: Part
    left: int

    @property
    def runs(self) -> int:
        """How often it runs for what is left."""
        return self.left // max(self.part.elements, 1)

    @property
    def unused(self) -> bool:
        """Whether no row has taken any of it."""
        return self.runs == self.part.collective.times


Choice = Callable[[Row, _Item], bool]
Stacked = Literal["third", "second", "first", "last"]


def _any(row: Row, item: _Item) -> bool:
    return True


def _same_line(row: Row, item: _Item) -> bool:
    return row.source == item.part.source


def _same_loop(row: Row, item: _Item) -> bool:
    return item.unused and item.runs == row.times


def _same_loop_and_line(row: Row, item: _Item) -> bool:
    return _same_loop(row, item) and _same_line(row, item)


def matched(
    rows: Iterable[Row], parts: Iterable[Part], sizes: Mapping[str, int]
) -> tuple[list[Match], list[tuple[Part, int]]]:
    """Rows with what does them, and what no row has taken.

    A program does not say which of two equal sums belongs to which row. If rows are left over, another order of the
    search is tried, and the one that leaves the fewest is taken. In the last orders, sums whose results are added count
    as one.
    """
    rows, parts = list(rows), list(parts)
    found = []
    for added, stacked in itertools.product((False, True), get_args(Stacked)):
        stock = Stock(parts)
        matches = stock.meet(rows, sizes, stacked, added=added)
        left = sum(match.missing > 0 and match.certain for match in matches)
        found.append((left, matches, list(stock.rest())))
        if not left:
            break
    return min(found, key=lambda one: one[0])[1:]


class Stock:
    """The arrays that a program moves along mesh axes, for rows to take."""

    def __init__(self, parts: Iterable[Part]):
        self.items: dict[Key, list[_Item]] = defaultdict(list)
        for part in parts:
            self.items[part.key].append(_Item(part, part.elements * part.collective.times))

    def meet(
        self, rows: Iterable[Row], sizes: Mapping[str, int], stacked: Stacked = "third", *, added: bool = False
    ) -> list[Match]:
        """Finds what does each row: as asked for at its own line, then as asked for anywhere, then in other ways.

        All rows are looked for in one way before any is in the next, which is less likely.

        Args:
            rows: of the ledger.
            sizes: of the mesh axes.
            stacked: whether sums that a loop stacks are looked for before others of the same loop, before those of the
                same line, after all that are done as asked, or after all that are done in other ways.
            added: whether one of several sums whose results are added is looked for, and not each.
        """
        every = [Match(row, self.asked(row, sizes), Counter(), row.times) for row in rows]
        sums = _added(every)
        also = {id(match) for group in sums for match in group[1:]} if added else set()
        matches = [match for match in every if id(match) not in also]
        self.take_as_asked(matches, _same_loop_and_line)
        if stacked == "first":
            self.take_stacked(matches, exactly=True)
        self.take_as_asked(matches, _same_loop)
        if stacked == "second":
            self.take_stacked(matches, exactly=True)
        self.take_turns(matches, _same_line)
        self.take_as_asked(matches, _same_line)
        self.take_turns(matches)
        self.take_as_asked(matches)
        self.take_equal(matches)
        self.take_added(matches, sizes)
        self.take_pairs(matches)
        if stacked != "last":
            self.take_stacked(matches, exactly=True)
        for way, recipes in WAYS.items():
            for match in matches:
                for recipe in recipes(match.key, sizes):
                    self.take(match, way, recipe)
        if stacked == "last":
            self.take_stacked(matches, exactly=True)
        self.take_together(sums)
        self.take_ordered(every)
        self.take_stacked(matches, exactly=False)
        self.take_joined(matches)
        self.take_padded(matches)
        for match in matches:  # copies, and sums of what no turn changes, in any of these ways
            done, once = match.row.times - match.missing, match.row.same == match.row.times
            if (match.row.kind in COPIES or once) and done and match.row.times % done == 0:
                match.done("one for all turns of a loop", match.missing)
            if match.row.gathered:
                match.done("a sum of what is gathered", match.missing)
        self.take_together(sums)
        return every

    def asked(self, row: Row, sizes: Mapping[str, int]) -> Key:
        """What a row asks for, in the form in which it is there: compilers for GPUs move two numbers of four bits as
        one of a byte, those for CPUs as a wider one each."""
        key = _key(row, sizes)
        packed = key._replace(elements=row.payload, whole=True)
        narrow = row.payload < key.elements
        return packed if narrow and key not in self.items and packed in self.items else key

    def take_as_asked(self, matches: list[Match], chosen: Choice = _any) -> None:
        """Takes what is asked for, from the items that are chosen."""
        for match in matches:
            self.take(match, "", ((match.key, 1),), chosen)

    def take(self, match: Match, way: str, recipe: Recipe, chosen: Choice = _any) -> None:
        """Takes collectives for as many runs of a row as there are, from those that are chosen."""
        items = [[item for item in self.items.get(key, ()) if chosen(match.row, item)] for key, _ in recipe]
        runs = min(sum(item.runs for item in of) // count for of, (_, count) in zip(items, recipe))
        runs = min(runs, match.missing)
        if runs <= 0:
            return
        for of, (key, count) in zip(items, recipe):
            wanted = runs * count
            for item in of:
                taken = min(item.runs, wanted)
                item.left -= taken * key.elements
                wanted -= taken
        match.done(way, runs)

    def take_equal(self, matches: list[Match]) -> None:
        """Takes copies that an equal one has moved: a weight gathered in another pass, positions that all layers read.

        In one pass, each weight is a different one and needs its own gather, in each turn of a loop that changes it.
        """
        needed: dict[tuple[Key, str], dict[str | int, int]] = defaultdict(dict)
        for number, match in enumerate(matches):
            row = match.row
            if row.role == "weights":
                arrays, of = needed[match.key, row.direction], row.parameter or number
                arrays[of] = max(arrays.get(of, 0), row.times // row.same)
        for match in matches:
            key = match.key
            if match.row.twin:
                match.done("an equal one", match.missing)
            runs = sum(item.part.collective.times for item in self.items.get(key, ()))
            if match.missing and match.row.kind in COPIES and runs:
                weights = needed[key, match.row.direction] if match.row.role == "weights" else {}
                short = max(sum(weights.values()) - runs, 0)
                match.done("an equal one", match.missing - min(short * match.row.same, match.missing))

    def take_pairs(self, matches: list[Match]) -> None:
        """Takes a gather or scatter over some mesh axes and the next row's over others, done as one over them all."""
        for first, second in itertools.pairwise(matches):
            (kind, axes, some, whole, _), (other, more, all_, *_) = first.key, second.key
            same = (kind, first.row.what, first.row.source) == (other, second.row.what, second.row.source)
            if not same or kind not in ("all-gather", "reduce-scatter") or axes & more:
                continue
            joint = Key(kind, axes | more, max(some, all_), whole, 1)
            before = second.missing
            if first.missing in (0, before) and not first.ways[_BOTH]:  # else it is the end of the pair before
                self.take(second, _BOTH, ((joint, 1),))
                first.done(_BOTH, min(before - second.missing, first.missing))

    def take_ordered(self, matches: list[Match]) -> None:
        """Takes permutes of what was scattered, if the scatter gave each device the slice that it is to have."""
        for before, match in itertools.pairwise(matches):
            same = before.row.what == match.row.what and before.row.source == match.row.source
            scattered = (before.key.kind, match.key.kind) == ("reduce-scatter", "permute")
            if same and scattered and before.key.axes >= match.key.axes:
                runs = min(before.row.times - before.missing, match.missing)
                match.done("a scatter in another order", runs)

    def take_stacked(self, matches: list[Match], *, exactly: bool) -> None:
        """Takes sums of a loop's turns that are stacked and done at once after it, even if each device keeps a slice.

        Args:
            matches: the rows.
            exactly: one sum for all turns; else a loop around it may be left too, and several turns may add to one
                place in the stack, as the ticks of a pipeline do that read the same microbatch.
        """
        kinds = ("all-reduce", "reduce-scatter") if exactly else ("all-reduce",)
        for match in matches:
            kind, axes, elements, whole, _ = match.key
            for key, items in self.items.items():
                if kind != "all-reduce" or key.kind not in kinds or (key.axes, key.whole) != (axes, whole):
                    continue
                if not key.elements > elements > 0 or key.elements % elements:
                    continue
                for item in items:
                    turns, times = item.left // elements, match.row.times
                    fits = turns == times if exactly else 0 < turns <= times and times % item.runs == 0
                    if item.unused and match.missing == times and fits:
                        item.left = 0
                        match.done("one for all turns of a loop", times)

    def take_joined(self, matches: list[Match]) -> None:
        """Takes arrays that are parts of a longer one, over the same devices.

        A sum may also be done after it is put in its place in a longer array, of which each device keeps a slice.
        """
        for match in matches:
            kind, axes, elements, whole, _ = match.key
            kinds = ("all-reduce", "reduce-scatter") if kind in ("all-reduce", "reduce-scatter") else (kind,)
            for key, items in self.items.items():
                if key.kind not in kinds or (key.axes, key.whole) != (axes, whole):
                    continue
                if key.elements > elements > 0 and key.elements % elements == 0:
                    for item in items:
                        if (kind, key.kind) == ("all-reduce", "reduce-scatter") and not _same_loop(match.row, item):
                            continue
                        taken = min(match.missing, item.left // elements)
                        item.left -= taken * elements
                        match.done("a part of a longer array", taken)

    def take_padded(self, matches: list[Match]) -> None:
        """Takes arrays that are padded, so that each device's part begins where its tiles do: by as much as the program
        shows, or by up to a quarter."""
        for match in matches:
            wanted = match.key
            filled = lambda row, item, elements=wanted.elements: item.part.filled == elements
            for key in list(self.items):
                one_kind = key.kind == wanted.kind
                alike = one_kind or {key.kind, wanted.kind} == {"all-reduce", "reduce-scatter"}
                same = key._replace(kind=wanted.kind, elements=wanted.elements) == wanted
                if same and alike and key.elements > wanted.elements:
                    little = one_kind and key.elements <= wanted.elements * 5 / 4
                    self.take(match, "a padded array", ((key, 1),), _any if little else filled)

    def take_turns(self, matches: list[Match], chosen: Choice = _any) -> None:
        """Takes sums that a loop does not do in each turn, but that are done once after its last one."""
        for match in matches:
            times = match.row.times
            if match.row.kind != "all-reduce" or match.missing < times:
                continue
            items = [item for item in self.items.get(match.key, ()) if item.unused and chosen(match.row, item)]
            if chosen is not _any and sum(item.runs for item in items) >= times:
                continue  # all turns are there, written out
            for item in items:
                if match.missing and times % item.runs == 0 and item.runs < times:
                    item.left = 0
                    match.done("one for all turns of a loop", times)

    def take_added(self, matches: list[Match], sizes: Mapping[str, int]) -> None:
        """Takes numbers that are reduced with others before they are reduced over devices, one reduction for several.

        `trellis.inspect.copies` says whether each is reduced over all devices on which it differs.
        """
        for match in matches:
            kind, axes, elements, _, _ = match.key
            if match.missing and elements == 1 and kind in ("all-reduce", "maximum", "minimum"):
                for recipe in WAYS[_IN_STEPS](match.key, sizes):
                    self.take(match, _IN_STEPS, recipe)
                there = (key.axes for key in self.items if (key.kind, key.elements) == (kind, 1) and key.axes <= axes)
                if frozenset().union(*there) == axes:
                    match.done("a sum with others", match.missing)

    @staticmethod
    def take_together(sums: list[list[Match]]) -> None:
        """Takes sums whose results are added, if one of them is done."""
        for group in sums:
            if any(not match.missing for match in group):
                for match in group:
                    match.done("a sum with others", match.missing)

    def rest(self) -> Iterator[tuple[Part, int]]:
        """What no row has taken, and how often it runs."""
        for items in self.items.values():
            for item in items:
                if item.left:
                    yield item.part, max(item.runs, 1)


def _added(matches: Iterable[Match]) -> list[list[Match]]:
    """Sums over the same devices, of as many numbers each, whose results are added: devices may add first."""
    groups: dict[tuple, list[Match]] = defaultdict(list)
    for match in matches:
        row = match.row
        if row.added >= 0 and row.reduction == "sum" and match.key.kind in ("all-reduce", "reduce-scatter"):
            groups[row.added, match.key, row.times].append(match)
    return [group for group in groups.values() if len(group) > 1]


def _listed(groups: Iterable[tuple[int, ...]], most: int = 4) -> str:
    """Groups of devices, the first few.

    >>> _listed([(0, 3), (1, 2)])
    '{0,3} {1,2}'
    """
    groups = list(groups)
    shown = " ".join("{" + ",".join(map(str, group[:16])) + "}" for group in groups[:most])
    return f"{shown} ..." if len(groups) > most else shown
