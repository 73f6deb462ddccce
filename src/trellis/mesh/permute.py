"""Slices sent from device to device along several mesh axes."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax import lax

Axes = tuple[str, ...]


def permute(x: jax.Array, axes: Axes, routes: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends one device's slice from `source` to `target`, for each pair of devices in `routes`.

    Devices are counted along `axes` as `lax.axis_index(axes)` counts them, the first axis major. `lax.ppermute` counts
    them in the order of the mesh's own axes (JAX 0.10.2), whatever order it is given. Where every device keeps its
    slice, nothing is sent: compilers of CPUs send it all the same.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    if len(routes) == math.prod(sizes[axis] for axis in axes) and all(source == target for source, target in routes):
        return x
    ordered = tuple(axis for axis in sizes if axis in axes)

    in_mesh = lambda device: renumbered(device, axes, ordered, sizes)
    return lax.ppermute(x, ordered, [(in_mesh(source), in_mesh(target)) for source, target in routes])


def renumbered(number: int, axes: Axes, order: Axes, sizes: Mapping[str, int]) -> int:
    """A device's number along mesh axes, the first major, as its number along the same axes in another order.

    >>> [renumbered(n, ("x", "y"), ("y", "x"), {"x": 2, "y": 3}) for n in range(6)]
    [0, 2, 4, 1, 3, 5]
    """
    place = {}
    for axis in reversed(axes):
        number, place[axis] = divmod(number, sizes[axis])
    total = 0
    for axis in order:
        total = total * sizes[axis] + place[axis]
    return total
