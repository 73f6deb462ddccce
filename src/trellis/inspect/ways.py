"""How compilers communicate by collectives other than the one that a type asks for."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple


class Key(NamedTuple):
    """A collective: its kind (a maximum or a minimum over devices is one of its own), mesh axes, elements as a row's
    payload counts them, whether these are integers, and into how many parts the axes are cut, if not all devices along
    them take part together."""

    kind: str
    axes: frozenset[str]
    elements: int
    whole: bool = False
    cut: int = 1


Recipe = tuple[tuple[Key, int], ...]  # collectives that do a communication together, each with how many times
Way = Callable[[Key, Mapping[str, int]], Iterator[Recipe]]  # from a collective and the sizes of the mesh axes


def _as(kind: str, other: str) -> Way:
    """One kind as another, of arrays that count the same."""

    def way(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
        if key.kind == kind:
            yield ((key._replace(kind=other), 1),)

    return way


def _in_steps(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """Over some mesh axes, then over others: arrays shrink as they are scattered, and grow as they are gathered."""
    kind, axes, elements, whole, _ = key
    if kind not in ("all-to-all", "permute"):
        for blocks, parts in _blocks(axes, elements, sizes):
            lengths = parts if kind in ("all-gather", "reduce-scatter") else [elements] * len(blocks)
            yield tuple((Key(kind, *each, whole), 1) for each in zip(blocks, lengths))


def _summed_in_steps(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """A reduce-scatter over some mesh axes, then over others, in which some of the steps are all-reduces."""
    kind, axes, elements, whole, _ = key
    if kind == "reduce-scatter":
        for blocks, parts in _blocks(axes, elements, sizes):
            *first, last = zip(blocks, parts)
            yield (*((Key(kind, *each, whole), 1) for each in first), (Key("all-reduce", *last, whole), 1))
            yield tuple((Key("all-reduce", *each, whole), 1) for each in zip(blocks, parts))
            yield tuple((Key("all-reduce", block, elements, whole), 1) for block in blocks)


def _scattered_and_summed(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """A sum over all mesh axes of an array that is sliced along some of them next: of its slices over the others."""
    kind, axes, elements, whole, _ = key
    if kind == "all-reduce":
        for blocks, parts in _blocks(axes, elements, sizes):
            *first, last = zip(blocks, parts)
            yield (*((Key("reduce-scatter", *each, whole), 1) for each in first), (Key(kind, *last, whole), 1))


def _permutes(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """Each device's part to each of the others in turn."""
    kind, axes, elements, whole, _ = key
    size = math.prod(sizes[axis] for axis in axes)
    if kind in ("all-gather", "all-to-all"):
        yield ((Key("permute", axes, elements // size, whole), size - 1),)


def _exchanged(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """A gather whose result is sliced along another mesh axis: each device gets what it keeps."""
    kind, axes, elements, whole, _ = key
    if kind == "all-gather":
        for other in sizes.keys() - axes:
            yield ((key._replace(kind="all-to-all"), 1), (Key("permute", axes | {other}, elements, whole), 1))


def _of_other_copies(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """A permute that takes what a device is to have from any of those that hold the same along other mesh axes."""
    if key.kind == "permute":
        others = sorted(sizes.keys() - key.axes)
        for count in range(1, len(others) + 1):
            for more in itertools.combinations(others, count):
                yield ((key._replace(axes=key.axes.union(more)), 1),)


def _gathered(key: Key, sizes: Mapping[str, int]) -> Iterator[Recipe]:
    """Everything to every device, which takes what it needs."""
    kind, axes, elements, whole, _ = key
    if kind in ("all-to-all", "permute"):
        size = math.prod(sizes[axis] for axis in axes)
        yield ((Key("all-gather", axes, elements * size, whole), 1),)


# In words, the likeliest first.
WAYS: dict[str, Way] = {
    "all-reduce and slice": _as("reduce-scatter", "all-reduce"),
    "one mesh axis after the other": _in_steps,
    "one mesh axis after the other, all-reduce and slice": _summed_in_steps,
    "reduce-scatter, and all-reduce over other mesh axes": _scattered_and_summed,
    "permutes": _permutes,
    "permute of other copies": _of_other_copies,
    "all-to-all": _as("permute", "all-to-all"),
    "all-to-all and permute": _exchanged,
    "all-gather and slice": _gathered,
    "reduce-scatter": _as("all-reduce", "reduce-scatter"),
    "all-reduce of zeros elsewhere": _as("all-gather", "all-reduce"),
}


def _blocks(
    axes: frozenset[str], elements: int, sizes: Mapping[str, int]
) -> Iterator[tuple[list[frozenset[str]], list[int]]]:
    """Mesh axes in two or more steps, and the elements of a scatter's array before each of them."""
    for blocks in in_blocks(sorted(axes)):
        if len(blocks) > 1:
            counts = [math.prod(sizes[axis] for axis in block) for block in blocks]
            yield blocks, [elements // math.prod(counts[:index]) for index in range(len(blocks))]


def in_blocks(axes: list[str]) -> Iterator[list[frozenset[str]]]:
    """Every way to take some axes, then some others, until none is left."""
    if not axes:
        yield []
    for count in range(1, len(axes) + 1):
        for first in itertools.combinations(axes, count):
            for others in in_blocks([axis for axis in axes if axis not in first]):
                yield [frozenset(first), *others]
