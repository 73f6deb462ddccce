"""What compilers get wrong without a word, refused wherever a program is read, and where `named_jit` runs it."""

from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh

from trellis.program.reading import Program
from trellis.program.settled import refuse_resettled
from trellis.program.sizes import state_at
from trellis.program.trace import equations, live
from trellis.program.windows import is_grouped, is_of_largest, refuse_windows


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
    found = [*equations(jaxpr)]
    windows = any(is_grouped(e.primitive.name, e.params) or is_of_largest(e.primitive.name) for e, _ in found)
    settled = moves_sums and any(in_loop and _begins_pending(e) for e, in_loop in found)
    if not (windows or settled):
        return
    program = Program(live(jaxpr), mesh=mesh)
    if settled:
        refuse_resettled(program)
    if windows:
        refuse_windows(program)


def _begins_pending(equation: Any) -> bool:
    if equation.primitive.name != "reshard":
        return False
    before, after = (state_at(value.aval).pending for value in (equation.invars[0], equation.outvars[0]))
    return bool(after - before)
