"""Where a compiler that places communication by itself will put a program's values, as far as it is told.

Along mesh axes in auto mode types say nothing. But a program's arguments lie somewhere, sharding constraints say where
their results go, and what `shard_map` and explicit regions return lies where they leave it. From there the rules of
explicit mode carry placements through the program, forward. Sizes on a device are read with them, which are estimates
where a compiler decides otherwise.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from trellis.notation.state import State
from trellis.program.natural import placed
from trellis.program.reading import LEAVE, Body, Operation, Program, Value
from trellis.program.rules import States
from trellis.program.sizes import is_auto, shape_at, state_by


def place_values(program: Program, shardings: Sequence[Any]) -> None:
    """Notes where values lie that the compiler places (`Value.placed`), and what products take (`Operation.taken`).

    Args:
        program: the program.
        shardings: those of its arguments; None, or one without names of mesh axes, for what may lie anywhere.
    """
    places = _Places(program)
    for value, sharding in zip(program.inputs, shardings, strict=True):
        places.by_sharding(value, sharding)
    places.body(program)
    for value, state in places.states.known.items():
        if is_auto(value.aval):
            value.placed = placed(state.axes)
    for operation, taken in places.states.taken.items():
        operation.taken = tuple(shape_at(v.aval, state) for v, state in zip(operation.operands, taken, strict=True))


class _Places:
    """The states of a program's values, while its bodies are gone through in order."""

    def __init__(self, program: Program):
        self.states, self.left = States(program.mesh), Counter[int]()

    def body(self, body: Body) -> None:
        for operation in body.operations:
            if operation.bodies:
                self.within(operation)
            elif operation.name == "sharding_constraint":
                self.by_sharding(operation.results[0], operation.params["sharding"])
            elif operation.name == LEAVE:
                self.leave(operation)
            elif any(is_auto(value.aval) for value in operation.results):
                list(self.states.implied(operation))  # which notes where results lie

    def by_sharding(self, value: Value, sharding: Any) -> None:
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            self.states.known[value] = state_by(sharding, len(value.shape))

    def by_axes(self, value: Value, axes: tuple[tuple[str, ...], ...]) -> None:
        """Unless a call's program takes or gives it in another shape."""
        if len(axes) == len(value.shape):
            self.states.known[value] = placed(axes)

    def leave(self, operation: Operation) -> None:
        """A result of a `shard_map`, each of which is an operation of its own, in order."""
        specs, call = operation.params["out_specs"], id(operation.equation)
        value = operation.results[0]
        if is_auto(value.aval):
            spec = specs[self.left[call] % len(specs)]
            by_hand = state_by(NamedSharding(value.aval.sharding.mesh, spec), len(value.shape))
            inside = self.states[operation.operands[0]].axes  # along mesh axes that are left to the compiler
            self.by_axes(value, tuple(map(operator.add, by_hand.axes, inside)))
        self.left[call] += 1

    def within(self, operation: Operation) -> None:
        """A loop, branches or a call: what bodies are given lies as its operands do, what it gives as their results.

        A loop's body is gone through until no turn returns a carry in more slices than the turn was given it in.
        """
        scan = operation.name == "scan"
        first, carried = operation.carries
        for body in operation.bodies:
            for index, (value, operand) in enumerate(operation.entering(body)):
                state = self.states[operand]
                turns = scan and index >= first + carried  # a slice along the first dimension for each turn
                self.by_axes(value, state.axes[1:] if turns else state.axes)
            while True:
                self.body(body)
                again = [
                    (value, state)
                    for value, state in zip(body.inputs[first : first + carried], map(self.at, body.results))
                    if _slices(state) > _slices(self.states[value])
                ]
                if not again:
                    break
                self.states.known.update(again)
            if len(body.results) == len(operation.results):
                for index, (value, state) in enumerate(zip(operation.results, map(self.at, body.results))):
                    axes = ((), *state.axes) if scan and index >= carried else state.axes
                    if value not in self.states.known or _slices(state) > _slices(self.states[value]):
                        self.by_axes(value, axes)

    def at(self, value: Value) -> State:
        return placed(self.states[value].axes)


def _slices(state: State) -> int:
    return len(state.sliced)
