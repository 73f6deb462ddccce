"""What depends on what in a program: values made of parameters alone or of no argument at all, what its communication
moves, what loops repeat, what is zero, and what reads each value last."""

import bisect
import math
from collections.abc import Collection, Iterator

import jax.numpy as jnp

from trellis.program.reading import ENTER, LEAVE, Body, Frame, Operation, Program, Value

# The same numbers under another name, in another order, or a part of them.
VIEWS = frozenset(
    "name reshape squeeze expand_dims transpose slice copy pvary reduce_precision "
    "optimization_barrier layout_constraint".split()
) | {ENTER, LEAVE}
# The same numbers elsewhere, or rounded.
MOVES = frozenset("reshard convert_element_type all_gather all_gather_reduced all_gather_invariant".split())
# How the names begin of operations that make an element of a result from several of an operand.
_MIXING = ("dot_general", "ragged_dot", "conv_", "reduce_", "gather", "scatter", "cum", "sort", "arg", "top_k")
# A part of them.
PARTS = frozenset(("split", "dynamic_slice"))
# All after which a value is still a copy of the same; a cast of copies along mesh axes is named otherwise in JAX 0.12.
_OF_ONE = VIEWS | MOVES | PARTS | {"pad", "reduced_vary_cast", "reduced_vary_cast_p"}
_ADDS = frozenset(("add", "add_any"))
# Operations that make zeros of zeros.
_KEEPS_ZEROS = VIEWS | MOVES | PARTS | _ADDS | {"broadcast_in_dim", "sub", "neg"}
_SUMS = frozenset(("dot_general", "reduce_sum"))  # zero where nothing is summed


def of_parameters(program: Program) -> set[Value]:
    """The values made of parameters alone, and of constants: casts of weights, and weights that were gathered."""
    found, known = _parameters(program), constants(program)

    def read(body: Body) -> None:
        for operation in body.operations:
            if not operation.bodies:
                if _all_in(found, known, operation):
                    found.update(operation.results)
                continue
            for inner in operation.bodies:
                enter(operation, inner)
            made = operation.bodies[operation.name == "while" :]
            for each in zip(operation.results, *(inner.results for inner in made)):
                if found.issuperset(each[1:]):
                    found.add(each[0])

    def enter(operation: Operation, body: Body) -> None:
        """What a loop carries is made of parameters if it is at first, and still is after a turn."""
        first, count = operation.carries
        assumed = {inner for inner, outer in operation.entering(body) if outer in found}
        carried = [*zip(body.inputs[first : first + count], body.results)] if body is operation.bodies[-1] else []
        while True:
            found.update(assumed)
            read(body)
            if not (wrong := {inner for inner, after in carried if inner in assumed and after not in found}):
                return
            assumed -= wrong
            for inside in body.walk():
                found.difference_update(inside.results, *(inner.inputs for inner in inside.bodies))
            found.difference_update(wrong)

    read(program)
    return found


def weights_in_use(program: Program) -> set[Value]:
    """The values made of parameters alone of which each element is one of a parameter's, rounded or not: no products or
    sums of them."""
    alone, found = of_parameters(program), _parameters(program)

    def read(body: Body) -> None:
        for operation in body.operations:
            for inner in operation.bodies:
                found.update(value for value, outer in operation.entering(inner) if outer in found)
                read(inner)
                found.update(outer for outer, value in zip(operation.results, inner.results) if value in found)
            if not operation.bodies and not _mixes(operation) and not found.isdisjoint(operation.inputs):
                found.update(alone.intersection(operation.results))

    read(program)
    return found & alone


def _parameters(program: Program) -> set[Value]:
    return {value for value, given in zip(program.inputs, program.arguments) if given.kind == "parameters"}


def _mixes(operation: Operation) -> bool:
    """Whether an element of the results is made of several of an operand; a lookup takes it as it is."""
    name = operation.name
    return name not in VIEWS | MOVES and name != "gather" and name.startswith(_MIXING)


def differentiated(program: Program) -> set[Value]:
    """The values that what is differentiated, or a derivative, is made of; none in a program without either."""
    found: set[Value] = set()

    def read(body: Body) -> None:
        for operation in reversed(body.operations):
            for inner in operation.bodies:
                read(inner)
                found.update(outer for value, outer in operation.entering(inner) if value in found)
            if operation.direction != "update" or not found.isdisjoint(operation.results):
                found.update(operation.inputs)

    read(program)
    return found


def constants(program: Program) -> set[Value]:
    """The values that are made of no argument and are the same in every turn: a compiler may know them in advance."""
    found: set[Value] = set()
    given = set(program.inputs)

    def constant(value: Value) -> bool:
        return value in found or (value.maker is None and value not in given)  # a literal, or what was closed over

    def read(body: Body) -> None:
        for operation in body.operations:
            for inner in operation.bodies:
                given.update(inner.inputs)
                found.update(v for v, outer in operation.entering(inner) if v.fixed and constant(outer))
                read(inner)
            own = operation.name == "axis_index" or "callback" in operation.name or operation.equation.effects
            found.update(filter(constant, operation.inputs))
            if not operation.bodies and not own and all(map(constant, operation.operands)):
                found.update(operation.results)

    read(program)
    return found


def roles(program: Program) -> dict[Operation, str]:
    """What each operation moves, if it moves something: "weights", "gradients" (of weights) or "activations".

    A gather of what is made of parameters alone moves weights; a reduction in the backward pass whose result no layer
    reads moves gradients.
    """
    weights, known, read = of_parameters(program), constants(program), _computed_with(program, together=False)

    def role(operation: Operation) -> str:
        if _all_in(weights, known, operation):
            return "weights"
        return "gradients" if operation.direction == "backward" and operation not in read else "activations"

    return {operation: role(operation) for operation in program.walk()}


def awaited(program: Program) -> set[Operation]:
    """The operations whose first result layers read, or wait for: a fence has it beside what they read."""
    return _computed_with(program, together=True)


def _computed_with(program: Program, together: bool) -> set[Operation]:
    """The operations whose first result a loop or a branch computes with, or its next turn.

    Args:
        program: any.
        together: whether a fence makes no result before it has all operands.
    """
    found: set[Operation] = set()

    def read(body: Body, wanted: set[Value]) -> None:
        """`wanted`: results that the next turn of a loop, or the program around, computes with."""
        needed = set(wanted)
        for operation in reversed(body.operations):
            if not together and operation.name == "optimization_barrier":
                needed.update(v for v, same in zip(operation.operands, operation.results) if same in needed)
            elif operation.bodies or not needed.isdisjoint(operation.results):
                needed.update(operation.inputs)
        for operation in body.operations:
            for inner in operation.bodies:
                marks = (
                    [result in needed for result in operation.results]
                    if not operation.is_loop
                    else _carried_whole(operation, inner)
                )
                read(inner, {value for value, mark in zip(inner.results, marks) if mark})
            if not needed.isdisjoint(operation.results[:1]):
                found.add(operation)

    read(program, set())
    return found


def is_empty(value: Value) -> bool:
    """Whether an array has no elements."""
    return 0 in value.shape


def zeros(program: Program) -> set[Value]:
    """The values that are zero by the program's text: gradients of what has none, and their sums over microbatches."""
    found: set[Value] = set()

    def zero(value: Value) -> bool:
        number = value.literal is not None and jnp.issubdtype(value.aval.dtype, jnp.number)
        return value in found or (number and not value.shape and value.literal.val == 0)

    def read_body(body: Body, given: set[Value]) -> None:
        found.update(given)
        for operation in body.operations:
            for inner in operation.bodies:
                enter(operation, inner)
            if operation.name == "while":
                continue  # it may have no turn
            if operation.bodies:
                ends = (inner.results for inner in operation.bodies)
                found.update(each[0] for each in zip(operation.results, *ends) if all(map(zero, each[1:])))
            elif operation.name in _KEEPS_ZEROS:
                read = operation.operands[:1] if operation.name in PARTS else operation.operands
                found.update(operation.results if all(map(zero, read)) else ())
            elif operation.name in _SUMS and all(map(is_empty, operation.operands)):
                found.update(operation.results)

    def enter(operation: Operation, body: Body) -> None:
        """What a loop carries is zero if it is at first, and still is after a turn for which that is assumed."""
        first, count = operation.carries
        assumed = {inner for inner, outer in operation.entering(body) if zero(outer)}
        while True:
            read_body(body, assumed)
            carried = zip(body.inputs[first : first + count], body.results)
            if not (wrong := {inner for inner, after in carried if inner in assumed and not zero(after)}):
                return
            assumed -= wrong
            inside = {v for operation in body.walk() for v in operation.results}
            found.difference_update(wrong, inside)

    read_body(program, set())
    return found


def uniform(program: Program) -> set[Value]:
    """The values that are one known number throughout, however they are cut or moved; not behind a barrier."""
    passes = (VIEWS | MOVES | PARTS) - {"optimization_barrier"}
    found: set[Value] = set()
    for operation in program.walk():
        first = operation.operands[0] if operation.operands else None
        spread = operation.name == "broadcast_in_dim" and first.literal is not None
        if spread or (operation.name in passes and first in found):
            found.update(operation.results)
    return found


def repeats(program: Program) -> dict[Operation, int]:
    """In how many of its runs each operation has the same operands: turns of loops that do not change them.

    A compiler may do it once for all of them.
    """
    none: frozenset[Frame] = frozenset()
    changing: dict[Value, frozenset[Frame]] = {}  # the loops that change a value from turn to turn
    found: dict[Operation, int] = {}

    def read(body: Body) -> None:
        for operation in body.operations:
            whole = operation.name in PARTS and operation.operands[0].shape == operation.results[0].shape
            read_from = operation.operands[:1] if whole else operation.inputs
            given = none.union(*(changing.get(v, none) for v in read_from))
            for inner in operation.bodies:
                constants, carried = operation.carries if operation.is_loop else (len(inner.inputs), 0)
                turning = frozenset({inner.frame})
                for index, value in enumerate(inner.inputs):
                    outer = given if value.outer is None else changing.get(value.outer, none)
                    again = operation.name == "scan" and constants <= index < constants + carried
                    if index >= constants and not (again and _stays(inner.results[index - constants], value)):
                        outer = turning | (given if index < constants + carried else outer)
                    changing[value] = outer
                read(inner)
                given = given.union(*(changing.get(v, none) for v in inner.results)) - turning
            changing.update((result, given) for result in operation.results)
            found[operation] = math.prod(turns for frame, turns in _scans_around(operation) if frame not in given)

    read(program)
    return found


def _stays(result: Value, carry: Value) -> bool:
    """Whether a loop's body gives what it was given, as of a sum of gradients that every turn reads."""
    while result is not carry and result.maker is not None:
        maker, position = result.maker, result.position
        if maker.name == "reshard" and maker.operands[0].aval == result.aval:
            result = maker.operands[0]
            continue
        first, count = maker.carries if maker.name == "scan" else (0, 0)
        if position >= count or not _stays(maker.bodies[0].results[position], maker.bodies[0].inputs[first + position]):
            return False
        result = maker.operands[first + position]
    return result is carry


def _scans_around(operation: Operation) -> Iterator[tuple[Frame, int]]:
    """The bodies of scans that an operation stands in, and how many turns each has."""
    frame = operation.frame
    while frame.outer is not None:
        if frame.is_body and frame.equation.primitive.name == "scan":
            yield frame, frame.equation.params["length"]
        frame = frame.outer


def _read(operation: Operation) -> list[Value]:
    """The values that results are made of; for a part that is picked, not its position."""
    return [v for v in operation.operands[:1] if v.literal is None] if operation.name in PARTS else operation.inputs


def _all_in(found: set[Value], known: set[Value], operation: Operation) -> bool:
    """Whether an operation reads nothing but these values, and constants beside them."""
    inputs = [value for value in _read(operation) if value not in known]
    return bool(inputs) and found.issuperset(inputs)


def _carried_whole(loop: Operation, body: Body) -> list[bool]:
    """For each result of a loop's body, whether the next turn reads it: it reads carries, except those that a turn
    writes a part of, as when results are stacked."""
    first, count = loop.carries
    carries = [inner for inner, _ in loop.entering(body)[first : first + count]]

    def written(result: Value, carry: Value) -> bool:
        maker = result.maker
        return maker is not None and maker.name == "dynamic_update_slice" and maker.operands[0] is carry

    carried = [not written(result, carry) for result, carry in zip(body.results, carries)]
    return carried + [False] * (len(body.results) - count)


class Parameters:
    """Finds which parameter a communication moves.

    A gathered value is a view of a parameter. A reduced gradient ends, by elementwise operations, in the result that
    takes the parameter's place.
    """

    def __init__(self, program: Program):
        self.names = {v: a.name for v, a in zip(program.inputs, program.arguments) if a.kind == "parameters"}
        self.tails: dict[str, list[str]] = {}
        for name in self.names.values():
            for tail in filter(None, {name, name.partition(".")[2]}):
                self.tails.setdefault(tail, []).append(name)
        self.ends: dict[Value, str] = {}
        for result, argument, old in zip(program.results, program.arguments, program.inputs):
            if argument.kind in ("parameters", "optimizer") and result.shape == old.shape:
                own = argument.name if argument.kind == "parameters" else self._beside(argument.name)
                if own:
                    self.ends.setdefault(result, own)
        self.leaving = {
            inner: outer
            for operation in program.walk()
            for body in operation.bodies[operation.name == "while" :]
            for inner, outer in zip(body.results, operation.results)
        }

    def _beside(self, name: str) -> str:
        """The parameter that an array of the optimizer is kept for: `optimizer.0.mu.mlp.gate` for `model.mlp.gate`. The
        path ends as the parameter's, the first step of which may differ; nothing if several are as likely."""
        while name and name not in self.tails:
            name = name.partition(".")[2]
        own = self.tails.get(name, ())
        return own[0] if len(own) == 1 else ""

    def moved_by(self, operation: Operation, role: str) -> str:
        """The path of the parameter that an operation of this role moves, or nothing."""
        if role == "weights":
            return next((self.names[o] for o in map(origin, operation.inputs) if o in self.names), "")
        return self._end(operation.results[0]) if operation.results else ""

    def _end(self, value: Value) -> str:
        """The parameter whose change a value becomes a part of."""
        queue, seen = [value], {value}
        while queue:
            value = queue.pop(0)
            if value in self.ends:
                return self.ends[value]
            after = [self.leaving[value]] if value in self.leaving else []
            for reader in value.readers:
                for body in reader.bodies:
                    after += [inner for inner, outer in reader.entering(body) if outer is value]
                if reader.name == "optimization_barrier":
                    after += [r for operand, r in zip(reader.operands, reader.results) if operand is value]
                elif reader.name in VIEWS | MOVES:
                    after += reader.results
                elif not reader.bodies and not reader.name.startswith(_MIXING):
                    after += [r for r in reader.results if r.shape == value.shape]
            queue += [v for v in after if v not in seen]
            seen.update(after)
        return ""


def added_at(operation: Operation) -> int:
    """The number of the last addition of a chain that an operation's result goes into and nothing else reads; -1 if
    there is none. On the way it may be seen in other ways, moved or rounded: sums over devices of the numbers that are
    added there may be taken as one, of their sum."""
    found, readers = -1, operation.results[0].readers if operation.results else []
    while len(readers) == 1 and _adds_or_passes(readers[0]):
        (reader,) = readers
        found = reader.number if reader.name in _ADDS else found
        readers = reader.results[0].readers
    return found


def _adds_or_passes(operation: Operation) -> bool:
    if operation.name in ("broadcast_in_dim", "reduce_sum"):  # with or without dimensions of size 1
        return operation.operands[0].num_elements == operation.results[0].num_elements
    return bool(operation.results) and operation.name in _ADDS | VIEWS | MOVES


def is_gathered(operation: Operation, axes: Collection[str]) -> bool:
    """Whether a sum over slices along these mesh axes has an operand that another operation gathers along them."""
    if operation.name != "reduce_sum":
        return False
    value, found = operation.operands[0], False
    while value is not None and not found:
        found = any(reader.name == "reshard" and _gathers(reader, axes) for reader in value.readers)
        rounded = value.maker is not None and value.maker.name in ("name", "convert_element_type")
        value = value.maker.operands[0] if rounded else value.outer if value.fixed else None
    return found


def _gathers(operation: Operation, axes: Collection[str]) -> bool:
    """Whether a reshard, or one of its result, since JAX 0.12 has some that move nothing, gathers along mesh axes."""
    before, made = operation.operands[0].state, operation.results[0]
    gathers = {*axes} <= {*before.sliced} and not {*axes} & {*made.state.sliced}
    return gathers or any(reader.name == "reshard" and _gathers(reader, axes) for reader in made.readers)


def origin(value: Value) -> Value:
    """What a value is a view, a slice, a cast, a padded or a gathered copy of, outside the loops that it is in."""
    while True:
        maker = value.maker
        if maker is not None and maker.name in _OF_ONE and maker.operands[0].literal is None:
            value = maker.operands[maker.name == "optimization_barrier" and value.position]
        elif maker is None and value.outer is not None:
            value = value.outer
        else:
            return value


def last_forward(body: Body) -> dict[Value, int]:
    """The number of the last operation of a body's forward pass that makes or reads each value. What only the backward
    pass reads from there on is written then, if it is smaller than what it is made of."""
    forward = [operation for operation in body.operations if operation.direction == "forward"]
    return {value: operation.number for operation in forward for value in (*operation.results, *operation.inputs)}


def last_uses(body: Body) -> dict[Value, int]:
    """The number of the operation of a body after which each of its values ends. A call's arguments stay until it ends;
    if a loop or a branch ends the call, until that does."""
    last: dict[Value, int] = {}
    for operation in body.operations:
        for value in operation.inputs:
            number, frame = operation.number, operation.frame
            while frame is not value.frame and frame not in value.frame.around:
                number, frame = frame.last, frame.outer
            last[value] = max(last.get(value, -1), number)
    own = [operation.number for operation in body.operations]
    last = {value: own[bisect.bisect(own, number) - 1] for value, number in last.items()}
    for value in body.results:
        if value.literal is None:
            last[value] = own[-1] + 1 if own else 0
    return last
