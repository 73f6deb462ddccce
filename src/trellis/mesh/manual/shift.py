"""Rings by hand: slices passed to the neighbour."""

import jax

from trellis.mesh.manual.reshard import TransitionError, check_slice, known_axes
from trellis.notation import parse
from trellis.notation.binding import bind_shape, live, real_axes
from trellis.notation.state import mode_of


def shift(text: str, x, axis: str, *, by: int = 1):
    """Passes each device's slice to the device `by` places further along a mesh axis, around the ring (gradient: back).

    Device `i` ends up with the slice of device `i - by`. One collective permute.

    Args:
        text: the type of `x`, in which some dimension is sliced over `axis`.
        x: a plain array in manual mode.
        axis: the mesh axis of the ring.

    Raises:
        TransitionError: no dimension is sliced over `axis`, `x` is not of that type, or it is a whole array.
    """
    where = f"shift('{text}', axis='{axis}')"
    shape = parse(text)
    if axis not in shape.mesh_axes:
        raise TransitionError(
            f"a shift needs a dimension that its mesh axis slices, got '{shape}', which '{axis}' does not slice, in "
            f"{where}: write which dimension '{axis}' slices"
        )
    mesh = jax.sharding.get_abstract_mesh()
    known_axes((shape,), mesh, where)
    if mode_of(mesh) != "manual":
        raise TransitionError(
            f"a shift can only run in manual mode, got '{shape}' outside it, in {where}: call it in a function under "
            "@shard_map"
        )
    bind_shape(shape, x, where, live())
    size = mesh.shape[axis]
    x = check_slice(x, real_axes(shape, mesh), where, mentioned={*shape.mesh_axes, *shape.pending, *shape.copied})
    if size == 1:
        return x
    return jax.lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])
