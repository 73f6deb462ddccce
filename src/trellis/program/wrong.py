"""What compilers get wrong without a word, refused wherever a program is read, and where `named_jit` runs it."""

from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh

from trellis.program.reading import Program
from trellis.program.settled import refuse_resettled
from trellis.program.sizes import state_at
from trellis.program.trace import equations, live, mesh_of
from trellis.program.windows import SCATTERED, refuse_windows


def refuse_wrong(program: Program) -> None:
    """Refuses a program that compilers get wrong.

    Raises:
        PendingSumError: a sum that is settled in a loop is made pending again there.
        UserError: it has a gradient of windows over slices.
    """
    refuse_resettled(program)
    refuse_windows(program)


def refuse_traced(jaxpr: Jaxpr, arguments: Any, mesh: Mesh | AbstractMesh | None) -> None:
    """The same of a program as JAX traced it. It is read only if it has what such programs have.

    Args:
        jaxpr: the program.
        arguments: what it was traced for, a tree.
        mesh: its mesh; None for that of the arguments.

    Raises:
        PendingSumError, UserError: as in `refuse_wrong`.
    """
    if any(_suspect(equation, in_loop) for equation, in_loop in equations(jaxpr)):
        refuse_wrong(Program(live(jaxpr), mesh=mesh or mesh_of(arguments)))


def _suspect(equation: Any, in_loop: bool) -> bool:
    name = equation.primitive.name
    if name == "reshard":
        before, after = (state_at(value.aval).pending for value in (equation.invars[0], equation.outvars[0]))
        return in_loop and bool(after - before)
    return name == SCATTERED or (name == "conv_general_dilated" and equation.params["batch_group_count"] > 1)
