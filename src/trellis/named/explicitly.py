"""Parts of a program whose communication the types place, also on a mesh in auto mode."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from trellis.mesh.layout import Layout, current_layout
from trellis.named.array import NamedArray
from trellis.notation.state import mode_of


def explicitly(f: Callable, *args) -> Any:
    """`f(*args)`; on a mesh in auto mode, what `f` does is placed as in explicit mode.

    A compiler that places communication by itself can slice neither kernels nor what devices exchange by hand. The
    layout in force says how they are sliced, so `f` runs under its types: what comes in is sliced as `compute` says,
    but whole along names that their mesh axes do not divide, and what goes out is the compiler's again. In other modes,
    and without a layout, this is a call of `f`.

    Args:
        f: takes `args`, and returns a tree of arrays.
        args: trees. Named arrays in them come in slices, other arrays whole, and everything else as it is.
    """
    layout = current_layout()
    if layout is None or mode_of(jax.sharding.get_abstract_mesh()) != "auto":
        return f(*args)
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, NamedArray))
    named = [x for x in leaves if isinstance(x, NamedArray)]
    inside = dataclasses.replace(layout, mesh=_explicit(layout.mesh))
    while uneven := {name: None for x in named for name in _uneven(inside, x)}:
        inside = inside.with_compute(uneven)  # which may give their mesh axes to names that these do not divide, either
    places = {i: _place(inside, x) for i, x in enumerate(leaves) if isinstance(x, NamedArray | jax.Array)}

    def body(*arrays):
        mine = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            mine[i] = leaves[i].with_array(array) if isinstance(leaves[i], NamedArray) else array
        with inside:
            return f(*jax.tree.unflatten(tree, mine))

    given = [leaves[i].array if isinstance(leaves[i], NamedArray) else leaves[i] for i in places]
    return jax.sharding.explicit_axes(body, in_sharding=tuple(places.values()))(*given)


def _explicit(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same devices, whose slices are in the types."""
    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True)))


def _uneven(layout: Layout, x: NamedArray) -> list[str]:
    """The names of an array that their mesh axes do not divide."""
    count = lambda axes: math.prod(layout.mesh.shape[axis] for axis in axes)
    return [n for (n, size), axes in zip(x.shape.items(), layout.assign(x.names), strict=True) if size % count(axes)]


def _place(layout: Layout, x: NamedArray | jax.Array) -> PartitionSpec:
    return layout.spec(x.names) if isinstance(x, NamedArray) else PartitionSpec()
