"""What compilers get wrong without a word, refused wherever a program is read, and where `named_jit` runs it."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh

from trellis.program.reading import Program
from trellis.program.settled import refuse_resettled
from trellis.program.sizes import state_at
from trellis.program.trace import equations, live
from trellis.program.windows import SCATTERED, refuse_windows


def refuse_wrong(program: Program) -> None:
    """Refuses a program that compilers get wrong.

    Raises:
        PendingSumError: a sum that is settled in a loop is made pending again there.
        UserError: it has a gradient of windows over slices.
    """
    refuse_resettled(program)
    refuse_windows(program)


def refuse_traced(jaxpr: Jaxpr, mesh: Mesh | AbstractMesh | None, *, moves_sums: bool) -> None:
    """The same of a program as JAX traced it. It is read only if it has what such programs have.

    Args:
        jaxpr: the program.
        mesh: its mesh.
        moves_sums: whether the compiler moves sums out of loops; that of CPUs leaves them there.

    Raises:
        PendingSumError, UserError: as in `refuse_wrong`.
    """
    refusals = {refuse for equation, in_loop in equations(jaxpr) if (refuse := _wrong_by(equation, in_loop))}
    if not moves_sums:
        refusals -= {refuse_resettled}
    for refuse in refusals:
        refuse(Program(live(jaxpr), mesh=mesh))


def _wrong_by(equation: Any, in_loop: bool) -> Callable[[Program], None] | None:
    """What refuses a program that has this equation, if it is as it may be there."""
    name = equation.primitive.name
    if name == "reshard":
        before, after = (state_at(value.aval).pending for value in (equation.invars[0], equation.outvars[0]))
        return refuse_resettled if in_loop and after - before else None
    grouped = name == "conv_general_dilated" and equation.params["batch_group_count"] > 1
    return refuse_windows if grouped or name == SCATTERED else None
