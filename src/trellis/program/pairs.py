"""Between which devices of a mesh something is exchanged or sent, as mesh axes."""

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
    >>> axes_of_pairs([(0, 0), (1, 1), (2, 3), (3, 2)], {"data": 2, "model": 2})
    ('data', 'model')
    """
    axes = axes_met(pairs, mesh)
    if found := _if_along(axes, pairs, mesh):
        return found
    # One that moves along an axis on some devices, and on others not at all, is along the axis that tells them apart.
    stays = any(source == target for source, target in pairs)
    more = [tuple(a for a in mesh if a in (*axes, other)) for other in mesh if other not in axes] if stays else []
    return next(filter(None, (_if_along(some, pairs, mesh) for some in more)), ())


def _if_along(axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, if a permute does the same along them wherever it stands along the others."""
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
    """Positions in a mesh of these sizes, as one along each axis."""
    return np.unravel_index(np.array(devices), tuple(sizes))
