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
from collections.abc import Mapping, Sequence

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

    def real(axes) -> tuple[str, ...]:
        return tuple(axis for axis in axes if sizes.get(axis, 1) > 1)

    def count(axes) -> int:
        return math.prod(sizes[axis] for axis in axes)

    moves: list[Move] = []

    def move(kind: str, axes, payload: int) -> None:
        moves.append(Move(kind, tuple(axes), payload, wire_bytes(kind, count(axes), payload)))

    old, new = [real(axes) for axes in before.axes], [real(axes) for axes in after.axes]
    from_dim = {axis: index for index, axes in enumerate(old) for axis in axes}
    to_dim = {axis: index for index, axes in enumerate(new) for axis in axes}
    local = num_bytes // count(from_dim)

    settled = [axis for axis in sorted(before.pending, key=list(sizes).index) if axis not in after.pending]
    settled = list(real(settled))
    targets = {to_dim.get(axis) for axis in settled}
    scatters = len(targets) == 1 and all(i is not None and {*old[i]} <= {*new[i]} for i in targets)
    if scatters:
        move("reduce-scatter", settled, local)
        local //= count(settled)
        from_dim.update({axis: to_dim[axis] for axis in settled})
    elif settled:
        move("all-reduce", settled, local)

    held = [[*axes, *(a for a in settled if from_dim.get(a) == i)] for i, axes in enumerate(old)]
    if [count(axes) for axes in held] == [count(axes) for axes in new]:
        changed = [axis for was, now in zip(held, new) for axis in _elsewhere(was, now, sizes)]
        if changed:  # as many slices of each dimension, on other devices
            move("permute", dict.fromkeys(changed), local)
        return moves

    gone = {i: [a for a in axes if a not in to_dim] for i, axes in enumerate(old)}
    come = {i: [a for a in axes if a not in from_dim] for i, axes in enumerate(new)}
    for index in range(len(old)):
        if not (gone[index] and come[index]):
            local //= count(come[index])  # a slice
            continue
        lost, gained = count(gone[index]), count(come[index])  # `a/x -> a/y`: other devices hold the same slices
        if lost % gained and gained % lost:  # halves are not made of thirds: whole, and then a slice
            local *= lost
            move("all-gather", gone[index], local)
            local //= gained
        else:
            local //= max(gained // lost, 1)
            move("permute", (*gone[index], *come[index]), local)
            ratio = max(lost // gained, 1)
            if ratio > 1:
                local *= ratio
                moves.append(Move("all-gather", tuple(gone[index]), local, (ratio - 1) * local // ratio))
        for axis in gone[index]:
            del from_dim[axis]
        gone[index] = []

    swaps: dict[tuple[int, int], list[str]] = {}
    for axis, source in from_dim.items():
        if axis in to_dim and to_dim[axis] != source:
            swaps.setdefault((source, to_dim[axis]), []).append(axis)
    for (_, target), axes in swaps.items():
        move("all-to-all", axes, local)
        if new[target][len(new[target]) - len(axes) :] != tuple(axes):
            move("permute", new[target], local)
    for was, now in zip(old, new):
        if was != now and sorted(was) == sorted(now):
            move("permute", was, local)
    for index, axes in reversed(gone.items()):
        if not axes:
            continue
        if old[index][len(old[index]) - len(axes) :] != tuple(axes):
            move("permute", old[index], local)
        local *= count(axes)
        if not after.pending.issuperset(axes):
            move("all-gather", axes, local)
    return moves


def _elsewhere(was: Sequence[str], now: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes along which other devices get a slice, of a dimension with as many slices before as after.

    >>> _elsewhere(("x", "y"), ("x", "z"), {"x": 2, "y": 2, "z": 2})
    ['y', 'z']
    """
    places = [{axis: math.prod(sizes[a] for a in axes[i + 1 :]) for i, axis in enumerate(axes)} for axes in (was, now)]
    return [axis for axis in (*was, *now) if places[0].get(axis) != places[1].get(axis)]
