"""Operations that run other computations, and those that start something and wait for it."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from trellis.inspect.hlo import Instruction, tuple_parts
from trellis.proof.interpreter.values import NotInterpreted, Team, Value, merged, part_of, spread


def _call(instruction: Instruction, machine) -> Callable:
    (name,) = instruction.called().get("calls") or instruction.called()["to_apply"]
    return lambda values, team: machine.run(name, values, team)


def _while(instruction: Instruction, machine) -> Callable:
    called = instruction.called()
    (condition,), (body,) = called["condition"], called["body"]

    def run(values: Sequence[Value], team: Team) -> Value:
        state = values[0]
        going = np.arange(len(team))  # places of the devices that make another turn
        while True:
            mine, part = team.part(going), part_of(state, going, team) if len(going) < len(team) else state
            again = machine.run(condition, [part], mine)
            if not again.any():
                return state
            if not again.all():
                going = going[spread(again, mine)]
                mine, part = team.part(going), part_of(state, going, team)
            new = machine.run(body, [part], mine)
            state = new if len(going) == len(team) else _replaced(state, new, going, team)

    return run


def _replaced(state: Value, new: Value, places: np.ndarray, team: Team) -> Value:
    """A value in which some devices hold something new."""
    if isinstance(state, tuple):
        return tuple(_replaced(old, part, places, team) for old, part in zip(state, new))
    if state is None or state is new:
        return state
    out = np.array(spread(state, team))
    out[places] = new
    return out


def _conditional(instruction: Instruction, machine) -> Callable:
    called = instruction.called()
    names = called.get("branch_computations")
    by_index = names is not None
    names = names or [called["true_computation"][0], called["false_computation"][0]]

    def run(values: Sequence[Value], team: Team) -> Value:
        which = values[0].astype(np.int64)
        if by_index:
            which = np.where((which < 0) | (which >= len(names)), len(names) - 1, which)
        else:
            which = np.where(which != 0, 0, 1)
        if len(which) == 1 or (which == which[0]).all():
            return machine.run(names[which[0]], [values[1 + which[0]]], team)
        parts = []
        for branch in np.unique(which):
            places = np.flatnonzero(which == branch)
            mine = team.part(places)
            parts.append((places, machine.run(names[branch], [part_of(values[1 + branch], places, team)], mine)))
        return merged(parts, team)

    return run


def _tuple(instruction: Instruction, machine) -> Callable:
    return lambda values, team: tuple(values)


def _get_tuple_element(instruction: Instruction, machine) -> Callable:
    index = int(instruction.attribute("index") or 0)
    return lambda values, team: values[0][index]


def _copy_start(instruction: Instruction, machine) -> Callable:
    """Its result is the copy, what is copied, and a context."""
    return lambda values, team: (values[0], values[0], None)


def _copy_done(instruction: Instruction, machine) -> Callable:
    return lambda values, team: values[0][0]


def _start(instruction: Instruction, machine) -> Callable:
    """The start of an operation, or of a computation, that its `-done` waits for: operands, result, and contexts.

    Nothing runs in the meantime here: the result is made at once.
    """
    if instruction.op == "copy-start":
        return _copy_start(instruction, machine)
    code = {"async-start": "call"}.get(instruction.op, instruction.op.removesuffix("-start"))
    kind, whole = machine.type(instruction), _is_its_result(instruction)
    parts = tuple_parts(instruction.type)
    if not whole and len(parts) < 2:
        raise NotInterpreted(f"{instruction.op} of the type {instruction.type}")
    function = machine.prepared(dataclasses.replace(instruction, op=code, type=instruction.type if whole else parts[1]))

    def run(values: Sequence[Value], team: Team) -> Value:
        result = function(values, team)
        if whole:
            return result
        given = tuple(values) if isinstance(kind[0], tuple) else values[0]
        return given, result, *[None] * (len(kind) - 2)

    return run


def _is_its_result(start: Instruction) -> bool:
    """Whether the start of an all-reduce has the type of its result alone, as it had until JAX 0.10."""
    parts = tuple_parts(start.type)
    return start.op == "all-reduce-start" and not (parts and parts[0].startswith("("))


def _done(instruction: Instruction, machine) -> Callable:
    if instruction.op == "copy-done":
        return _copy_done(instruction, machine)
    if _is_its_result(machine.program.by_name[instruction.operands[0]]):
        return lambda values, team: values[0]
    return lambda values, team: values[0][1]


def _update(instruction: Instruction, machine) -> Callable:
    return lambda values, team: values[0]


def _nothing(instruction: Instruction, machine) -> Callable:
    return lambda values, team: None


OPERATIONS: dict[str, Callable] = {
    **dict.fromkeys(("call", "fusion"), _call),
    "after-all": _nothing,
    "async-update": _update,
    "conditional": _conditional,
    "get-tuple-element": _get_tuple_element,
    "tuple": _tuple,
    "while": _while,
}
ENDINGS: dict[str, Callable] = {"-start": _start, "-done": _done}
