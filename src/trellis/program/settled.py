"""A construct that compilers get wrong: a sum that is settled in a loop, made pending again, and settled after it.

    loop:  g = reshard("embed +data -> embed", ...)    one all-reduce a turn
           total = total + reshard("embed -> embed +data", g)
    reshard("embed +data -> embed", total)             and another one

The second line is what the gradient of `reshard("embed ~data -> embed", w)` does. XLA's
`while-loop-all-reduce-code-motion` moves the first sum out of the loop and past the cast, so that both sums follow each
other on the same values: on TPUs one device's part is counted twice and the others' not at all. Keeping the sum pending
until it is settled once is right whatever the compiler moves, and moves fewer bytes.
"""

from collections.abc import Iterator, Mapping

from trellis.notation import PendingSumError
from trellis.notation.typeof import short_dtype
from trellis.program.manual import COLLECTIVES, SUMS, axes_over
from trellis.program.reading import ENTER, LEAVE, Body, Operation, Program, Value
from trellis.program.rules import States
from trellis.program.scopes import names_of

Axes = frozenset[str]
_NONE: Axes = frozenset()

# Operations that a compiler moves a sum past: the sum of their results is their result for the sum.
_LINEAR = {ENTER, LEAVE}.union(
    "add add_any sub neg mul div select_n convert_element_type reduce_precision reshape transpose broadcast_in_dim "
    "squeeze expand_dims slice dynamic_slice dynamic_update_slice concatenate pad rev split copy name reduce_sum "
    "reshard pvary optimization_barrier layout_constraint".split()
)


def refuse_resettled(program: Program) -> None:
    """Refuses a program in which a sum is settled within a loop and made pending again.

    Raises:
        PendingSumError: with the lines of the sum and of the cast.
    """
    reader = _Reader(program.mesh)
    if reader.casts_in(program, in_loop=False):
        reader.read(program, [_NONE] * len(program.inputs), in_loop=False)


class _Reader:
    """Follows through a program along which mesh axes each value is a sum that was settled."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes, self.states = sizes, States(sizes)
        self.made: dict[str, str] = {}  # mesh axis -> the line that settled last along it

    def casts_in(self, body: Body, *, in_loop: bool) -> bool:
        """Whether anything is made pending in a loop, as in few programs."""
        return any(
            in_loop
            and any(True for _ in self.cast(operation))
            or any(self.casts_in(inner, in_loop=in_loop or operation.is_loop) for inner in operation.bodies)
            for operation in body.operations
        )

    def read(self, body: Body, inputs: list[Axes], *, in_loop: bool) -> list[Axes]:
        """The settled axes of the results, from those of the inputs."""
        known: dict[Value, Axes] = dict(zip(body.inputs, inputs, strict=True))
        for operation in body.operations:
            operands = {value: known.get(value, _NONE) for value in operation.operands}
            results = self.results(operation, operands, in_loop)
            known.update(zip(operation.results, results, strict=True))
        return [known.get(value, _NONE) for value in body.results]

    def results(self, operation: Operation, operands: dict[Value, Axes], in_loop: bool) -> list[Axes]:
        name, count = operation.name, len(operation.results)
        if operation.bodies:
            found = []
            for body in operation.bodies[name == "while" :]:  # a while loop's condition makes no values
                given = {inner: operands[outer] for inner, outer in operation.entering(body)}
                if operation.is_loop and not in_loop:
                    given = {}  # no loop has a sum from before it to move
                inputs = [given.get(value, _NONE) for value in body.inputs]
                found.append(self.read(body, inputs, in_loop=in_loop or operation.is_loop))
            return [_NONE.union(*each) for each in zip(*found)] if len(found[0]) == count else [_NONE] * count
        carried = _NONE.union(*operands.values()) if name in _LINEAR else _NONE
        if in_loop and (again := carried & frozenset(self.cast(operation))):
            self.refuse(operation, sorted(again))
        settled = frozenset(self.sums(operation))
        for axis in settled:
            self.made[axis] = operation.source
        return [carried | settled] * count

    def sums(self, operation: Operation) -> Iterator[str]:
        """The mesh axes along which this operation settles a sum."""
        if operation.name in SUMS:
            yield from axes_over(operation)
        elif operation.name not in COLLECTIVES:
            for implied in self.states.implied(operation):
                if implied.move.kind in ("all-reduce", "reduce-scatter"):
                    yield from implied.move.axes

    def cast(self, operation: Operation) -> Iterator[str]:
        """The mesh axes along which this operation makes a pending sum of a value that was none."""
        if operation.name == "reshard":
            before, after = operation.operands[0].state, operation.results[0].state
            yield from (a for a in after.pending - before.pending - set(before.sliced) if self.sizes.get(a, 1) > 1)

    def refuse(self, operation: Operation, axes: list[str]) -> None:
        aval, over = operation.operands[0].aval, " and ".join(f"'{a}'" for a in axes)
        names = names_of(operation.scope, len(aval.shape)) or aval.shape
        before, after = (v.state.words(names) for v in (operation.operands[0], operation.results[0]))
        made = ", ".join(filter(None, dict.fromkeys(self.made.get(a, "") for a in axes)))
        raise PendingSumError(
            f"a sum that is settled in a loop must stay settled, got one over {over}{f' from {made}' if made else ''} "
            f"that is made pending again as {short_dtype(aval.dtype)}[{before} -> {after}], in "
            f"{operation.source or operation.scope}: compilers would sum it twice; keep the copies "
            f"({' '.join('~' + a for a in axes)}) of the value it is the gradient of until the product that uses "
            "them, so that the sum stays pending and is settled once, after the loop"
        )
