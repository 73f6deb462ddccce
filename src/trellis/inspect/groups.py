"""Groups of devices, as a compiled collective lists them, held against the axes of a mesh."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np


def axes_met(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ.

    Args:
        groups: positions in the mesh's devices.
        mesh: sizes of the mesh axes.
    """
    differs = [False] * len(mesh)
    for group in groups:
        for index, row in enumerate(_places(group, mesh)):
            differs[index] |= bool((row != row[0]).any())
    return tuple(axis for axis, differ in zip(mesh, differs) if differ)


def axes_of(groups: Sequence[Sequence[int]], mesh: Mapping[str, int], *, ordered: bool = False) -> tuple[str, ...]:
    """The mesh axes whose devices the groups are, exactly: each group all devices along them, each device in one group.

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
    """
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or sorted(d for group in groups for d in group) != list(range(math.prod(mesh.values()))):
        return ()
    axes = axes_met(groups, mesh)
    if math.prod(mesh[axis] for axis in axes) != sizes.pop():
        return ()
    if not ordered:
        return axes
    places = dict(zip(mesh, _places(groups, mesh)))
    if any((places[axis] != places[axis][:1]).any() for axis in axes):
        return ()
    for order in itertools.permutations(axes):
        counted = np.ravel_multi_index([places[axis][0] for axis in order], [mesh[axis] for axis in order])
        if (np.diff(counted) == 1).all():
            return axes
    return ()


def axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which a permute moves: everywhere in the same way, to no device from two.

    Args:
        pairs: who sends to whom, as positions in the mesh's devices.
        mesh: sizes of the mesh axes.

    Returns:
        The axes; none where it does not move along any axes alike.

    >>> axes_of_pairs([(0, 2), (2, 0), (1, 3), (3, 1)], {"data": 2, "model": 2})
    ('data',)
    >>> axes_of_pairs([(0, 2), (2, 0)], {"data": 2, "model": 2})
    ()
    """
    axes = axes_met(pairs, mesh)
    sources, targets = zip(*pairs)
    others = math.prod(mesh.values()) // math.prod(mesh[axis] for axis in axes)
    before, after = ([dict(zip(mesh, _places(side, mesh)))[axis] for axis in axes] for side in (sources, targets))
    moves = set(zip(zip(*before), zip(*after)))
    distinct = len(set(sources)) == len(pairs) == len(set(targets))
    return axes if distinct and len(moves) * others == len(pairs) else ()


def _places(devices, mesh: Mapping[str, int]) -> tuple[np.ndarray, ...]:
    return np.unravel_index(np.array(devices), tuple(mesh.values()))
