"""Mesh axes of one device: types do not have them, unless a program would be refused for that alone.

What JAX's own collectives over such an axis give differs along it in its type, and so does the index along it. On
several devices what they are given differs, too. On one a loop would begin with another type than it goes on with, and
a sum over two axes would be of what differs along one. Such a program is traced with these axes in types.
"""

from collections.abc import Callable, Sequence

import jax

from trellis.errors import TrellisError
from trellis.mesh.manual.ops import Axes, vary
from trellis.notation import Shape
from trellis.notation.binding import Bindings, live


def trace_body(program: Callable, slices: Sequence, shapes: Sequence[Shape], bindings: Bindings):
    """The jaxpr of a manual function's body.

    Args:
        program: the body.
        slices: its arguments.
        shapes: what is annotated of each.
        bindings: those of the call.
    """
    try:
        return jax.make_jaxpr(program)(*slices)
    except Exception as error:
        if isinstance(error, TrellisError) or not single_axes():
            raise
        first = error
    bindings.single = True
    try:
        return jax.make_jaxpr(lambda *slices: program(*map(vary, slices, map(single_in, shapes))))(*slices)
    except Exception:
        raise first from None


def single_in(shape: Shape) -> Axes:
    """The mesh axes of one device that slice an array, or along which its sum is pending."""
    single = single_axes()
    return tuple(axis for axis in (*shape.mesh_axes, *shape.pending) if axis in single)


def typed_as(x, before: Shape, after: Shape):
    """A value that a text moved, with the mesh axes of one device in its type that the text gives it."""
    bindings = live()
    if bindings is None or not bindings.single:
        return x
    wanted = single_in(after)
    gone = tuple(axis for axis in single_in(before) if axis not in wanted and axis in jax.typeof(x).mat.varying)
    return vary(jax.lax.psum(x, gone) if gone else x, wanted)


def single_axes() -> set[str]:
    """The manual mesh axes of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis in mesh.manual_axes if mesh.shape[axis] == 1}
