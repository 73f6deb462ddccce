"""The mesh axes along which devices exchange or send something."""

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
        for index, row in enumerate(places_in(group, mesh.values())):
            differs[index] |= bool((row != row[0]).any())
    return tuple(axis for axis, differ in zip(mesh, differs) if differ)


def axes_of_pairs(pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int], *, some: bool = False) -> tuple[str, ...]:
    """The mesh axes along which a permute moves: in the same way everywhere, and to no device from two.

    Args:
        pairs: who sends to whom, as positions in the mesh's devices.
        mesh: sizes of the mesh axes.
        some: whether it may be of some devices only, which another axis tells from those that it leaves out.

    Returns:
        The axes; none where it does not move along any axes alike, or where all devices keep what they have.

    >>> axes_of_pairs([(0, 2), (2, 0), (1, 3), (3, 1)], {"data": 2, "model": 2})
    ('data',)
    >>> axes_of_pairs([(0, 2), (2, 0)], {"data": 2, "model": 2})
    ()
    >>> axes_of_pairs([(0, 0), (1, 1), (2, 3), (3, 2)], {"data": 2, "model": 2})
    ('data', 'model')
    >>> axes_of_pairs([(0, 2), (2, 0)], {"data": 2, "model": 2}, some=True)
    ('data', 'model')
    """
    axes = axes_met(pairs, mesh)
    if not axes:
        return ()
    if found := _if_along(axes, pairs, mesh):
        return found
    # If one moves along an axis on some devices and not on others, it is also along the axis that tells them apart.
    stays = any(source == target for source, target in pairs)
    rest = [axis for axis in mesh if axis not in axes]
    counts = range(1, len(rest) + 1) if some else (1,) if stays else ()
    more = (others for count in counts for others in itertools.combinations(rest, count))
    wider = (tuple(axis for axis in mesh if axis in (*axes, *others)) for others in more)
    return next(filter(None, (_if_along(each, pairs, mesh) for each in wider)), ())


def _if_along(axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, if a permute does the same along them at every place along the others."""
    sources, targets = zip(*pairs)
    others = math.prod(mesh.values()) // math.prod(mesh[axis] for axis in axes)
    before, after = (
        [place for axis, place in zip(mesh, places_in(side, mesh.values())) if axis in axes]
        for side in (sources, targets)
    )
    moves = set(zip(zip(*before), zip(*after)))
    distinct = len(set(sources)) == len(pairs) == len(set(targets))
    return axes if distinct and len(moves) * others == len(pairs) else ()


def places_in(devices, sizes) -> tuple[np.ndarray, ...]:
    """Positions in a mesh of these sizes, each as its position along every axis."""
    return np.unravel_index(np.array(devices), tuple(sizes))
