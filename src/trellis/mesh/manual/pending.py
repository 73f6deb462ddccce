"""`pending`: declares a local sum to be a partial one."""

import jax

from trellis.mesh.manual.ops import mark_pending, without_single_axes
from trellis.mesh.manual.reshard import TransitionError, known_axes
from trellis.notation import NotationError, Shape, parse, typeof
from trellis.notation.binding import bind_shape, live, real_axes
from trellis.notation.state import mode_of, state_of


def pending(text: str, x):
    """Declares that what each device holds is a partial sum: `pending("embed +d", x.sum(0))`.

    The sum of a device's own slice, by `jnp.sum` or in any other way, is one. Once it is declared, `reshard` can settle
    it, and everything else that would take it for the whole is refused. Nothing moves.

    Args:
        text: the type of the result, with a '+' for each mesh axis along which devices hold parts of the sum.
        x: a plain array in manual mode, whose values differ along these axes.

    Raises:
        NotationError: outside of manual mode, or a text without a pending sum.
        TransitionError: the value is the same on all devices along such an axis: summing it would multiply it.
    """
    where = f"pending('{text}')"
    shape = parse(text)
    mesh = jax.sharding.get_abstract_mesh()
    if mode_of(mesh) != "manual":
        raise NotationError(
            f"partial sums can only be declared in manual mode, got a call outside it, in {where}: call it inside "
            "shard_map"
        )
    if not shape.pending:
        raise NotationError(f"a partial sum must be written '+axis', got '{shape}', in {where}: write '{shape} +axis'")
    known_axes((shape,), mesh, where)
    bind_shape(shape, x, where, live())
    real: Shape = real_axes(shape, mesh)
    x = without_single_axes(x)
    state = state_of(x)
    if same := [a for a in real.pending if a not in state.varying]:
        raise TransitionError(
            f"partial sums must differ between devices, got {typeof(x)}, which is the same along {', '.join(same)}, "
            f"in {where}: remove '+{same[0]}', or slice the summed dimension"
        )
    return mark_pending(x, real.pending, real)
