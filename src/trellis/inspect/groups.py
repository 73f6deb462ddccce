"""Matches groups of devices, as a compiled collective lists them, with the axes of a mesh."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trellis.program.pairs import places_in


def axes_of(groups: Sequence[Sequence[int]], mesh: Mapping[str, int], *, ordered: bool = False) -> tuple[str, ...]:
    """The mesh axes whose devices the groups are, exactly: each group has all devices along them, each is in one group.

    An axis may be cut into parts of one size, as by a gather of halves of an array. Groups are then smaller than the
    axes.

    Args:
        groups: positions in the mesh's devices.
        mesh: sizes of the mesh axes.
        ordered: whether a group's order counts too, as it does where its members hold different slices: all count
            their devices along the same axes, one axis faster than the other.

    Returns:
        The axes; none where the groups are not those of any axes.

    >>> axes_of([(0, 2), (1, 3)], {"data": 2, "model": 2})
    ('data',)
    >>> axes_of([(0, 3), (1, 2)], {"data": 2, "model": 2})
    ()
    >>> axes_of([(2, 0), (3, 1)], {"data": 2, "model": 2}, ordered=True)
    ()
    >>> axes_of([(0, 1), (2, 3)], {"data": 4})
    ('data',)
    """
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or sorted(d for group in groups for d in group) != list(range(math.prod(mesh.values()))):
        return ()
    factors = [(axis, factor) for axis, size in mesh.items() for factor in _factors(size)]
    places = places_in(groups, [factor for _, factor in factors])  # each: group member
    met = [index for index, place in enumerate(places) if (place != place[:, :1]).any()]
    if math.prod(factors[index][1] for index in met) != sizes.pop():
        return ()
    if ordered:
        if any((places[index] != places[index][:1]).any() for index in met):
            return ()
        met.sort(key=lambda index: -np.argmax(places[index][0] != places[index][0][0]))  # the fastest changes first
        counted = np.ravel_multi_index([places[i][0] for i in met], [factors[i][1] for i in met])
        if (counted != np.arange(len(counted))).any():
            return ()
    axes = {factors[index][0] for index in met}
    return tuple(axis for axis in mesh if axis in axes)


def cut(mesh: Mapping[str, int]) -> dict[str, int]:
    """A mesh of the same devices whose axes are of prime sizes, for groups of a part of an axis.

    >>> cut({"data": 4, "stage": 1, "model": 3})
    {'data/0': 2, 'data/1': 2, 'model/0': 3}
    """
    return {f"{axis}/{i}": factor for axis, size in mesh.items() for i, factor in enumerate(_factors(size))}


def uncut(axes: Iterable[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh of which axes of a cut one are parts, in the mesh's order."""
    found = {axis.partition("/")[0] for axis in axes}
    return tuple(axis for axis in mesh if axis in found)


def _factors(size: int) -> list[int]:
    """The prime factors of a number.

    >>> _factors(12)
    [2, 2, 3]
    """
    found, factor = [], 2
    while size > 1:
        while size % factor == 0:
            found.append(factor)
            size //= factor
        factor += 1
    return found
