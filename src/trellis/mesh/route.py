"""The route of an array from one sharding to another, in steps of one collective each."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping

Axes = tuple[tuple[str, ...], ...]  # for each dimension the mesh axes that slice it


def route(before: Axes, after: Axes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[Axes]:
    """Where an array lies after each step, ending with `after`; empty if it is there already.

    It is the route on which a device sends the fewest bytes, and of several such the one with the fewest collectives.
    Each step is one collective, or slices that move nothing:

        a -> a/x               slices; every device has them
        a/x b -> a b/x         an all-to-all
        a/x b/y -> a/y b/x     a permute: as many slices of each dimension, on other devices
        a/x -> a               an all-gather, after which nothing but slices follows

    Several all-gathers in a row are one step, and so are several slices: compilers do these as written. A transition
    that mixes different steps they may do by gathering everything first.

    Args:
        before, after: without mesh axes of size 1.
        shape: of the whole array.
        sizes: of the mesh axes.

    >>> route((("x",), ()), ((), ("x", "y")), (8, 8), {"x": 2, "y": 2})
    [(('x', 'y'), ()), ((), ('x', 'y'))]
    """
    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    known = {axis: sizes[axis] for i in changed for axis in (*before[i], *after[i])}
    part = lambda axes: tuple(axes[i] for i in changed)
    steps = _shortest(part(before), part(after), tuple(shape[i] for i in changed), tuple(sorted(known.items())))
    places = []
    for step in steps:
        place = list(before)
        for i, axes in zip(changed, step, strict=True):
            place[i] = axes
        places.append(tuple(place))
    return places


@functools.lru_cache(maxsize=1024)
def _shortest(before: Axes, after: Axes, shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> list[Axes]:
    graph = _Graph(after, shape, dict(sizes))
    queue: list[tuple[int, int, int, Axes, str, tuple]] = [(0, 0, 0, before, "", ())]
    done, order = set(), itertools.count(1)
    while queue:
        sent, collectives, _, place, kind, way = heapq.heappop(queue)
        if place == after:
            return [place for _, place in way]
        if (place, kind == "gather") in done:
            continue
        done.add((place, kind == "gather"))
        for then, next_place, cost in graph.steps(place, kind):
            joined = then == kind and then in ("slice", "gather")
            longer = (*way[: len(way) - joined], (then, next_place))
            more = collectives + (cost > 0)
            heapq.heappush(queue, (sent + cost, more, next(order), next_place, then, longer))
    raise AssertionError("every placement is reached by gathers and slices")


class _Graph:
    """Where an array may lie, and what each step from there costs, in bytes that a device sends. The array has as many
    bytes as the square of the most slices that it can have."""

    def __init__(self, after: Axes, shape: tuple[int, ...], sizes: dict[str, int]):
        self.after, self.shape, self.sizes = after, shape, sizes
        self.whole = math.prod(sizes.values()) ** 2

    def count(self, axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def fits(self, place: Axes) -> bool:
        return all(size % self.count(axes) == 0 for size, axes in zip(self.shape, place, strict=True))

    def steps(self, place: Axes, kind: str) -> Iterator[tuple[str, Axes, int]]:
        held = [axis for axes in place for axis in axes]
        local = self.whole // self.count(held)
        for i, axes in enumerate(place):
            for axis in (a for goal in self.after for a in goal if a not in held):
                if self.fits(sliced := _with(place, i, (*axes, axis))):
                    yield "slice", sliced, 0
            for start in range(len(axes)):
                rest, run = axes[:start], axes[start:]
                yield "gather", _with(place, i, rest), (self.count(run) - 1) * local
                if kind == "gather":
                    continue
                for to in range(len(place)):
                    moved = _with(_with(place, i, rest), to, (*place[to], *run))
                    if to != i and self.fits(moved):
                        yield "all-to-all", moved, local - local // self.count(run)
        if kind != "gather":
            counts = tuple(map(self.count, place))
            for other in self.places.get(counts, ()):
                if other != place:
                    yield "permute", other, local

    @functools.cached_property
    def places(self) -> dict[tuple[int, ...], list[Axes]]:
        """All placements, by the number of slices of each dimension."""
        found: dict[tuple[int, ...], list[Axes]] = {}
        for homes in itertools.product(range(-1, len(self.shape)), repeat=len(self.sizes)):
            held = [
                [axis for axis, home in zip(self.sizes, homes, strict=True) if home == i]
                for i in range(len(self.shape))
            ]
            for place in itertools.product(*map(itertools.permutations, held)):
                if self.fits(place):
                    found.setdefault(tuple(map(self.count, place)), []).append(place)
        return found


def _with(place: Axes, i: int, axes: tuple[str, ...]) -> Axes:
    return (*place[:i], axes, *place[i + 1 :])
