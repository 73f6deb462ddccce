"""What it takes to bring an array from one placement on the mesh to another: the collectives and their bytes.

Bytes on the wire are what one device sends around a ring of the n devices that take part, the least that a ring
needs. A compiler that does better than a ring (switches that reduce, tori with several links) moves fewer over the
slowest link, but not fewer in all:

| collective     | payload on one device    | bytes sent             |
|----------------|--------------------------|------------------------|
| all-gather     | the gathered array, B    | (n - 1) / n * B        |
| reduce-scatter | the unscattered sum, B   | (n - 1) / n * B        |
| all-reduce     | the array, B             | 2 (n - 1) / n * B      |
| all-to-all     | the device's array, B    | (n - 1) / n * B        |
| permute        | the device's array, B    | B                      |
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from trellis.notation.state import State

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute")


def wire_bytes(kind: str, size: int, payload: int) -> int:
    """Bytes one device sends, by the table above.

    Args:
        kind: one of `KINDS`.
        size: devices that take part, n.
        payload: bytes B.

    >>> wire_bytes("all-reduce", 4, 1000)
    1500
    """
    if size <= 1:
        return 0
    if kind == "permute":
        return payload
    if kind not in KINDS:
        raise ValueError(f"a collective must be one of {', '.join(KINDS)}, got '{kind}'")
    return (2 if kind == "all-reduce" else 1) * (size - 1) * payload // size


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One collective of a transition: its kind, mesh axes, bytes on one device and bytes it sends."""

    kind: str
    axes: tuple[str, ...]
    payload: int
    wire: int


def transition(before: State, after: State, num_bytes: int, sizes: Mapping[str, int]) -> list[Move]:
    """The collectives from one placement to another, as XLA's partitioner makes them (compiled for TPU and GPU).

    - Pending sums settle first: a reduce-scatter if all of them scatter over one dimension that keeps its slices,
      otherwise one all-reduce over all of them together, whatever is sliced afterwards.
    - If each dimension then has as many slices as before, on other devices, one permute brings them there.
    - Otherwise slices follow, which move nothing, and all-to-alls.
    - All-gathers come last, the last dimension first. Gathering over a mesh axis that is major to one that stays takes
      a permute before it, and so does changing the mesh axis of a dimension.
    - Slices that become a pending sum over the same mesh axes are each device's part of it: nothing moves.

    Mesh axes of size 1 do not appear.

    Args:
        before: where the array lies.
        after: where it goes; the same rank.
        num_bytes: of the whole array.
        sizes: of the mesh axes.

    >>> sharded, whole = State("explicit", (("x",), ())), State("explicit", ((), ()))
    >>> transition(sharded, whole, 4096, {"x": 4})
    [Move(kind='all-gather', axes=('x',), payload=4096, wire=3072)]
    """
    if before.axes == after.axes and before.pending == after.pending:
        return []  # as most do
    route = _Route(before, after, num_bytes, sizes)
    route.settle()
    if not route.permuted():
        route.replace()
        route.swap()
        route.gather()
    return route.moves


class _Route:
    """A transition on its way: the moves so far, and where the array lies after them.

    Attributes:
        old, new: the mesh axes of each dimension, without those of size 1.
        from_dim: the dimension that each mesh axis slices by now; what is replaced is taken out.
        to_dim: the dimension that it slices in the end.
        pending: mesh axes over which a sum stays pending, or becomes one.
        settled: mesh axes over which a sum is settled.
        gone: the mesh axes that each dimension loses and that slice no other.
        local: bytes on a device.
    """

    def __init__(self, before: State, after: State, num_bytes: int, sizes: Mapping[str, int]):
        self.sizes, self.moves = sizes, []
        self.old, self.new = [self.real(axes) for axes in before.axes], [self.real(axes) for axes in after.axes]
        self.from_dim = {axis: index for index, axes in enumerate(self.old) for axis in axes}
        self.to_dim = {axis: index for index, axes in enumerate(self.new) for axis in axes}
        self.gone = {i: [axis for axis in axes if axis not in self.to_dim] for i, axes in enumerate(self.old)}
        self.pending = after.pending
        self.settled = self.real(sorted(before.pending - after.pending, key=list(sizes).index))
        self.local = num_bytes // self.count(self.from_dim)

    def real(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    def count(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def move(self, kind: str, axes: Iterable[str]) -> None:
        """Adds a collective over these mesh axes."""
        axes = tuple(axes)
        self.moves.append(Move(kind, axes, self.local, wire_bytes(kind, self.count(axes), self.local)))

    def settle(self) -> None:
        """Settles pending sums."""
        targets = {self.to_dim.get(axis) for axis in self.settled}
        if len(targets) == 1 and all(i is not None and {*self.old[i]} <= {*self.new[i]} for i in targets):
            self.move("reduce-scatter", self.settled)
            self.local //= self.count(self.settled)
            self.from_dim.update({axis: self.to_dim[axis] for axis in self.settled})
        elif self.settled:
            self.move("all-reduce", self.settled)

    def permuted(self) -> bool:
        """Whether each dimension has as many slices by now as it is to have: on other devices, they are permuted."""
        held = [[*axes, *(a for a in self.settled if self.from_dim.get(a) == i)] for i, axes in enumerate(self.old)]
        alike = [self.count(axes) for axes in held] == [self.count(axes) for axes in self.new]
        if alike and (changed := [a for was, now in zip(held, self.new) for a in _elsewhere(was, now, self.sizes)]):
            self.move("permute", dict.fromkeys(changed))
        return alike

    def replace(self) -> None:
        """Slices dimensions by mesh axes that slice none yet; `a/x -> a/y` brings other devices the same slices."""
        for index, axes in enumerate(self.new):
            gone, come = self.gone[index], [axis for axis in axes if axis not in self.from_dim]
            lost, gained = self.count(gone), self.count(come)
            if not (gone and come):
                self.local //= gained  # a slice
                continue
            if lost % gained and gained % lost:  # halves are not made of thirds: whole, and then a slice
                self.local *= lost
                self.move("all-gather", gone)
                self.local //= gained
            else:
                self.local //= max(gained // lost, 1)
                self.move("permute", (*gone, *come))
                ratio = max(lost // gained, 1)
                if ratio > 1:
                    self.local *= ratio
                    self.moves.append(Move("all-gather", tuple(gone), self.local, (ratio - 1) * self.local // ratio))
            for axis in gone:
                del self.from_dim[axis]
            self.gone[index] = []

    def swap(self) -> None:
        """Takes mesh axes from the dimensions that they slice to others, and puts those of each in order."""
        swaps: dict[tuple[int, int], list[str]] = {}
        for axis, source in self.from_dim.items():
            if axis in self.to_dim and self.to_dim[axis] != source:
                swaps.setdefault((source, self.to_dim[axis]), []).append(axis)
        for (_, target), axes in swaps.items():
            self.move("all-to-all", axes)
            if not _is_minor(axes, self.new[target]):
                self.move("permute", self.new[target])
        for was, now in zip(self.old, self.new):
            if was != now and sorted(was) == sorted(now):
                self.move("permute", was)

    def gather(self) -> None:
        """Gathers over the mesh axes that slice nothing in the end."""
        for index, axes in reversed(self.gone.items()):
            if not axes:
                continue
            if not _is_minor(axes, self.old[index]):
                self.move("permute", self.old[index])
            self.local *= self.count(axes)
            if not self.pending.issuperset(axes):
                self.move("all-gather", axes)


def _is_minor(axes: Sequence[str], of: Sequence[str]) -> bool:
    """Whether these are the last of the mesh axes that slice a dimension, in their order."""
    return tuple(of[len(of) - len(axes) :]) == tuple(axes)


def _elsewhere(was: Sequence[str], now: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes along which other devices get a slice, of a dimension with as many slices before as after.

    >>> _elsewhere(("x", "y"), ("x", "z"), {"x": 2, "y": 2, "z": 2})
    ['y', 'z']
    """
    places = [{axis: math.prod(sizes[a] for a in axes[i + 1 :]) for i, axis in enumerate(axes)} for axes in (was, now)]
    return [axis for axis in (*was, *now) if places[0].get(axis) != places[1].get(axis)]
