"""Slices sent from device to device along several mesh axes."""

from collections.abc import Sequence

import jax
from jax import lax

Axes = tuple[str, ...]


def permute(x: jax.Array, axes: Axes, routes: Sequence[tuple[int, int]]) -> jax.Array:
    """One device's slice, from `source` to `target` for each pair of devices in `routes`.

    Devices are counted along `axes` as `lax.axis_index(axes)` counts them, the first axis major. `lax.ppermute` counts
    them in the order of the mesh's own axes (JAX 0.10.2), whatever the order that it is given.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    ordered = tuple(axis for axis in sizes if axis in axes)

    def in_mesh(device: int) -> int:
        place = {}
        for axis in reversed(axes):
            device, place[axis] = divmod(device, sizes[axis])
        total = 0
        for axis in ordered:
            total = total * sizes[axis] + place[axis]
        return total

    return lax.ppermute(x, ordered, [(in_mesh(source), in_mesh(target)) for source, target in routes])
