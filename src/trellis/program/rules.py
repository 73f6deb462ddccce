"""Where an operation's result lies before anything moves: the rules of explicit mode.

Each rule (`natural.py`) gives the state of a result from the operands' states, if every device works on what it has. A
dimension that is summed over leaves a pending sum along its mesh axes. If the operation's own type says another state,
the difference is communication.

In auto mode types say nothing, and neither do they inside `auto_axes`, to which an operation is left that JAX's types
refuse. The same rules carry states through, from what is known: arguments, constraints, what other modes leave there
(`by_compiler.py`). The compiler may choose otherwise.
"""

import dataclasses
import functools
import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import jax

from trellis.notation.state import State
from trellis.program.moves import Move, transition, wire_bytes
from trellis.program.natural import RULES, dot_general, elementwise, placed, reshape
from trellis.program.reading import ENTER, LEAVE, Operation, Value
from trellis.program.reshaping import RESHAPING
from trellis.program.sizes import is_auto, num_bytes

GUESS = "the compiler chooses"
_LOOPS = {"igamma": 2, "igammac": 2, "igamma_grad_a": 2}  # elementwise, but written as this many loops
# Where no type says when sums are settled, compilers wait for these; and for a sum of two, if both are pending alike.
_KEEPS_PENDING, _ADDS = {"reshard", "transpose", "squeeze", "reshape", "reduce_sum"}, {"add", "add_any"}
CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}


@dataclasses.dataclass(frozen=True, slots=True)
class Implied:
    """A communication that an operation implies: of a value of this type, from and to these states. If that is one of
    its operands, `operand` is which."""

    move: Move
    aval: Any
    before: State
    after: State
    note: str = ""
    operand: Value | None = None


class States:
    """Where the values of a program lie: what their types say, and what the rules say if the types do not.

    Attributes:
        sizes: of the mesh axes.
        merges: whether the compiler moves equal values once, and not only one value.
    """

    def __init__(self, sizes: Mapping[str, int], *, merges: bool = True):
        self.sizes, self.merges = sizes, merges
        self.known: dict[Value, State] = {}
        self.scattered: set[Value] = set()  # results of scatters, which need no slice after a sum
        self.twins: dict[Value, Value] = {}  # each value's first twin: equal operations on equal values
        self.first: dict[tuple, list[Operation]] = {}  # the first twin each, of those that differ in parameters alone
        self.said: set[tuple] = set()  # moves of a value, where no others are merged
        self.written: dict[int, str] = {}  # the parameters of these, by their equations: a `shard_map` has one for all
        self.gathered: set[Value] = set()  # for callbacks
        self.brought: set[tuple] = set()  # for products, where no type says so: what, and its slices then
        self.taken: dict[Operation, list[State]] = {}  # operands as products take them, where no type says so
        self.unclear: set[Value] = set()  # results of lookups where one mesh axis slices both the table and the indices

    def __getitem__(self, value: Value) -> State:
        for same in (value, self.twins.get(value)):
            if same in self.known:
                return self.known[same]
        return value.state if value.placed is None else value.placed

    def implied(self, operation: Operation) -> Iterator[Implied]:
        """The communication of one operation; notes where its results lie."""
        if operation.name in CALLBACKS:
            yield from self._called(operation)
            return
        if not operation.results or not hasattr(operation.results[0].aval, "shape"):
            return
        name, out = operation.name, operation.results[0]
        states = [self[value] for value in operation.operands if hasattr(value.aval, "shape")]
        if name in (ENTER, LEAVE) or name == "reshard" and is_auto(out.aval):
            if is_auto(out.aval) and out.placed is None:
                manual = out.aval.sharding.mesh.manual_axes  # a device's slices are whole inside
                self.known[out] = placed(tuple(tuple(a for a in axes if a not in manual) for axes in states[0].axes))
            return
        if name == "sharding_constraint" and out.placed is not None:
            after = out.placed
            if states[0].pending and len(out.readers) == 1 and (axes := _wanted(out)) is not None:
                after = placed(axes)  # one constraint after another: a sum that is sliced at once is scattered
            for move in transition(states[0], after, num_bytes(out.aval), self.sizes):
                yield Implied(move, out.aval, states[0], after, GUESS)
            self.known[out] = after
            return
        rule = RULES.get(name)
        if rule is None and not any(state.pending or any(state.axes) for state in states):
            return
        together = name in _ADDS and len({state.pending for state in states}) == 1  # summed first, then over devices
        if is_auto(out.aval) and name not in _KEEPS_PENDING and not together:
            states = yield from self._summed(operation, states)
        for _ in range(_LOOPS.get(name, 0)):  # which end once no element on any device changes
            yield from self._told(dict.fromkeys(axis for state in states for axis in state.sliced))
        if name in RESHAPING:
            yield from self._reshaping(operation, states)
            return
        if name == "dot_general" and is_auto(out.aval):
            states = yield from self._apart(operation, states)
        yield from self._at_the_edges(operation, states)
        natural = rule(operation, states) if rule else elementwise(operation, states)
        if name.startswith("scatter"):
            self.scattered.add(out)
        if name in ("gather", "scatter-add") and _conflict(states):
            self.unclear.add(out)
        if is_auto(out.aval):
            self.known[out] = natural
            self.known |= {v: elementwise(operation, states, n) for n, v in enumerate(operation.results) if n}
            return
        after = out.state
        if name == "dot_general":
            natural = yield from self._operands(operation, states, after)
        elif rule is None:
            return
        elif name.startswith("scatter") or name == "reshard" and operation.operands[0] in self.scattered:
            natural = _sliced(natural, after)
        elif name in ("argmax", "argmin"):
            yield from self._argmax(operation, natural, after)
            return
        unclear = not self.unclear.isdisjoint((*operation.results, *operation.operands))
        moves = transition(natural, after, num_bytes(out.aval), self.sizes)
        unclear |= len(moves) > 1 and any(move.kind == "all-to-all" for move in moves)  # a route is the compiler's own
        for move in moves:
            yield Implied(move, out.aval, natural, after, GUESS if unclear else "")

    def _summed(self, operation: Operation, states: list[State]) -> Generator[Implied, None, list[State]]:
        """Sums what is pending of the operands where no type says when: compilers wait for no later operation."""
        values = [value for value in operation.operands if hasattr(value.aval, "shape")]
        after = [dataclasses.replace(state, pending=frozenset()) for state in states]
        for value, before, state in zip(values, states, after):
            if before.pending and self[value].pending:  # else it is an operand twice
                for move in transition(before, state, num_bytes(value.aval), self.sizes):
                    yield Implied(move, value.aval, before, state)
                self.known[value] = state
        return after

    def settled(self, value: Value) -> Iterator[Implied]:
        """The sum of what is pending at the end of a program, or of a turn of a loop, where no type says when."""
        before = self[value]
        if is_auto(value.aval) and before.pending:
            self.known[value] = after = dataclasses.replace(before, pending=frozenset())
            for move in transition(before, after, num_bytes(value.aval), self.sizes):
                yield Implied(move, value.aval, before, after, GUESS)

    def ends(self, loop: Operation) -> Iterator[Implied]:
        """What devices tell each other in each turn of a `while` loop whose condition a map made one for each example:
        the loop goes on as long as one of them does."""
        yield from self._told(self[loop.bodies[0].results[0]].sliced)

    def _told(self, axes) -> Iterator[Implied]:
        """Whether any device has something left to do, which all have to know before a loop ends."""
        if axes := self._real(axes):
            flag, pending = jax.ShapeDtypeStruct((), bool), placed((), frozenset(axes))
            move = Move("all-reduce", axes, 1, wire_bytes("all-reduce", self._count(axes), 1))
            yield Implied(move, flag, pending, placed(()), "once a turn of a while loop")

    def again(self, operation: Operation) -> bool:
        """Whether an earlier operation, written in the same frame, had the same operands and parameters."""
        operands = tuple(
            ("literal", str(value.literal.val)) if value.literal is not None else self.twins.setdefault(value, value)
            for value in operation.operands
        )
        types = _types(operation)
        alike = self.first.setdefault((operation.frame.written_in, operation.name, operands, types), [])
        # A loop's parameters are its body, which takes long to write out: only if everything else is the same.
        first = next((one for one in alike if self._written(one) == self._written(operation)), operation)
        if first is operation:
            alike.append(operation)
        for value, same in zip(operation.results, first.results):
            self.twins[value] = self.twins.get(same, same)
        return first is not operation

    def merged(self, operation: Operation) -> bool:
        """Whether the compiler moves what the operation moves along with an earlier one that does the same.

        XLA's partitioner moves a value once, however often a program says it, but takes equal values for others. The
        TPU's compiler merges what it moves of equal values afterwards.
        """
        again = self.again(operation)
        if self.merges or operation.name not in ("reshard", "sharding_constraint"):
            return again and self.merges
        said = (operation.frame.written_in, operation.operands[0], _types(operation), self._written(operation))
        known = said in self.said
        self.said.add(said)
        return known

    def _first(self, value: Value) -> Value:
        """What the compiler takes the value for: its first twin, or itself."""
        return self.twins.get(value, value) if self.merges else value

    def _written(self, operation: Operation) -> str:
        if _says_where(operation):
            return ""  # as its result's type
        key = id(operation.equation)
        if key not in self.written:
            self.written[key] = str(sorted(operation.params.items()))
        return self.written[key]

    def _operands(self, operation: Operation, states: list[State], after: State) -> Generator[Implied, None, State]:
        """A product gathers an operand whose contracted dimension is sharded alone, or whose free dimension is not
        sharded in the result. Gives the state of the result before its pending sums are settled."""
        contracted, batch = operation.params["dimension_numbers"]
        free = len(batch[0])
        wanted = []
        for side in (0, 1):
            dims = []
            for index, axes in enumerate(states[side].axes):
                if index in contracted[side]:
                    other = states[1 - side].axes[contracted[1 - side][list(contracted[side]).index(index)]]
                    dims.append(axes if axes == other else ())
                elif index in batch[side]:
                    dims.append(axes)
                else:
                    dims.append(tuple(axis for axis in axes if axis in after.axes[free]))
                    free += 1
            wanted.append(dataclasses.replace(states[side], axes=tuple(dims)))
        for value, before, state in zip(operation.operands, states, wanted):
            for move in transition(before, state, num_bytes(value.aval), self.sizes):
                yield Implied(move, value.aval, before, state, "an operand of a product", value)
        return dot_general(operation, wanted)

    def _apart(self, operation: Operation, states: list[State]) -> Generator[Implied, None, list[State]]:
        """A product where no type says what is gathered: no mesh axis can slice two dimensions of the result, or one
        and the sum. An operand is gathered over such an axis: the one whose dimension of the result is not to be sliced
        by it, as far as a constraint says, else the smaller one."""
        contracted, batch = operation.params["dimension_numbers"]
        free: list[set[str]] = [
            {a for i, axes in enumerate(state.axes) if i not in contracted[n] and i not in batch[n] for a in axes}
            for n, state in enumerate(states)
        ]
        of_batch = {a for n, state in enumerate(states) for i in batch[n] for a in state.axes[i]}
        summed = [set(state.sliced) - free[n] - of_batch for n, state in enumerate(states)]
        first = len(states[0].axes) - len(contracted[0])  # of the other's dimensions
        wanted = _wanted(operation.results[0])
        kept = [set(), set()] if wanted is None else [{*sum(w, ())} for w in (wanted[:first], wanted[first:])]
        size = [num_bytes(v.aval) // self._count(state.sliced) for v, state in zip(operation.operands, states)]
        smaller = size.index(min(size))
        both = free[0] & free[1]
        twice = [both & (kept[1 - n] | (both - kept[n] if n == smaller else set())) for n in (0, 1)]
        gone = [summed[n] & free[1 - n] | twice[n] for n in (0, 1)]
        after = []
        for value, before, axes in zip(operation.operands, states, gone):
            dims = (tuple(a for a in mine if a not in axes) for mine in before.axes)
            after.append(dataclasses.replace(before, axes=tuple(dims)))
            if (key := (self._first(value), after[-1].axes)) in self.brought:
                continue
            self.brought.add(key)
            for move in transition(before, after[-1], num_bytes(value.aval), self.sizes):
                yield Implied(move, value.aval, before, after[-1], GUESS, value)
        self.taken[operation] = after
        return after

    def _at_the_edges(self, operation: Operation, states: list[State]) -> Iterator[Implied]:
        """What XLA moves by itself if an operation reads the neighbours of slices: for a convolution or a reduction of
        windows along sliced places, the rows that a window reaches past its slice's ends; for a reshape, slices whose
        elements lie elsewhere afterwards; for a Fourier transform (`trellis.named.fourier`), whole rows, and the whole
        array where the compiler slices it. All are estimates."""
        source, state = operation.operands[0], states[0]
        moved: list[tuple[str, tuple[str, ...], int]] = []
        if operation.name == "fft" and (axes := self._real(_transformed(operation, state))):
            moved.append(("all-gather", axes, num_bytes(source.aval)))
        elif operation.name == "reshape" and is_auto(operation.results[0].aval):
            kept = reshape(operation, states).sliced
            if axes := tuple(axis for axis in self._real(state.sliced) if axis not in kept):
                moved.append(("all-gather", axes, num_bytes(source.aval)))
        elif operation.name == "reshape" and (axes := self._regrouped(operation, state)):
            moved.append(("all-to-all", axes, num_bytes(source.aval) // self._count(axes)))
        elif operation.name.startswith("reduce_window"):
            each = ("window_dimensions", "window_strides", "window_dilation")
            for at, (size, stride, apart) in enumerate(zip(*(operation.params[name] for name in each))):
                reach = (size - 1) * apart + 1 - stride
                if reach > 0 and (axes := self._real(state.axes[at])):
                    moved.append(("permute", axes, num_bytes(source.aval) * reach // source.shape[at]))
        elif operation.name == "conv_general_dilated":
            numbers, made = operation.params["dimension_numbers"], operation.results[0].shape
            strides, dilation = operation.params["window_strides"], operation.params["rhs_dilation"]
            specs = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strides, dilation)
            for at, window, out, stride, apart in specs:
                size = operation.operands[1].shape[window]
                # If both arrays have sliced places, the result is a window.
                reach = (made[out] - 1) * stride if states[1].axes[window] else (size - 1) * apart
                if reach and (axes := self._real(state.axes[at])):
                    moved.append(("permute", axes, num_bytes(source.aval) * reach // source.shape[at]))
        for kind, axes, payload in moved:
            payload //= self._count(a for a in self._real(state.sliced) if a not in axes)
            move = Move(kind, axes, payload, wire_bytes(kind, self._count(axes), payload))
            yield Implied(move, source.aval, state, state, GUESS, source)

    def _regrouped(self, operation: Operation, state: State) -> tuple[str, ...]:
        """The mesh axes whose slices hold other elements of an array in its new shape, though they slice both."""
        out = operation.results[0]
        before, after = (self._blocks(*of) for of in ((operation.operands[0].shape, state), (out.shape, out.state)))
        return tuple(axis for axis in before if before[axis] != after.get(axis, before[axis]))

    def _blocks(self, shape: tuple[int, ...], state: State) -> dict[str, tuple[int, int]]:
        """For each mesh axis how many elements in a row a device holds, and after how many it holds some again."""
        blocks = {}
        for index, axes in enumerate(state.axes):
            top = math.prod(shape[index:])
            for axis in self._real(axes):
                blocks[axis] = top // self.sizes[axis], top
                top = blocks[axis][0]
        return blocks

    def _called(self, operation: Operation) -> Iterator[Implied]:
        """The first device alone calls a callback. It gathers what that takes, and all others get what it gives."""
        states = {value: self[value] for value in operation.operands if hasattr(value.aval, "shape")}
        if operation.params.get("partitioned") or any(state.mode == "manual" for state in states.values()):
            return
        for value, state in states.items():
            if (same := self._first(value)) in self.gathered:
                continue
            self.gathered.add(same)
            whole = placed([()] * len(state.axes))
            yield from self._moved("all-gather", state.sliced, value, state, whole, "for a callback")
        for value in operation.results:
            yield from self._moved("all-reduce", self.sizes, value, value.state, value.state, "of a callback")

    def _moved(self, kind: str, axes, value: Value, before: State, after: State, note: str) -> Iterator[Implied]:
        """A whole array's move over mesh axes, if any of them has devices."""
        if axes := self._real(axes):
            move = Move(kind, axes, num_bytes(value.aval), wire_bytes(kind, self._count(axes), num_bytes(value.aval)))
            yield Implied(move, value.aval, before, after, note, value)

    def _argmax(self, operation: Operation, natural: State, after: State) -> Iterator[Implied]:
        """Each device's best value and its index are gathered."""
        axes = self._real(natural.pending)
        count = self._count(axes)
        if count == 1:
            return
        source, out = operation.operands[0], operation.results[0]
        for value in (source, out):
            item = num_bytes(value.aval) // max(math.prod(value.shape), 1)
            payload = math.prod(out.shape) * item * count // self._count(natural.sliced)
            move = Move("all-gather", axes, payload, wire_bytes("all-gather", count, payload))
            yield Implied(move, out.aval.update(dtype=value.aval.dtype), natural, after, "each device's best")

    def _reshaping(self, operation: Operation, states: list[State]) -> Iterator[Implied]:
        """Operations that cut, join or reverse a dimension: free along whole dimensions, left to the compiler along
        sharded ones, for which the row is an estimate."""
        kind, touched = RESHAPING[operation.name]
        arrays = 2 if operation.name == "dynamic_update_slice" else 1  # what is written is gathered, too
        for value, state in zip(operation.operands[:arrays], states):
            payload = num_bytes(value.aval) // self._count(state.sliced)
            for index in sorted(touched(operation), reverse=True):  # the last is gathered first
                if not (axes := self._real(state.axes[index])):
                    continue
                count = self._count(axes)
                payload *= count if kind == "all-gather" else 1
                move = Move(kind, axes, payload, wire_bytes(kind, count, payload))
                yield Implied(move, value.aval, state, operation.results[0].state, GUESS, value)
        for out in operation.results:
            if is_auto(out.aval):
                alike = any(value.shape == out.shape for value in operation.operands)
                self.known[out] = elementwise(operation, states) if alike else _cut(out, touched(operation), states)

    def _real(self, axes) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    def _count(self, axes) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)


def _says_where(operation: Operation) -> bool:
    """Whether the type of its result says all about where the operation puts it."""
    return operation.name == "reshard" and not is_auto(operation.results[0].aval)


def _types(operation: Operation) -> tuple:
    """Of its results. A compiler moves a value once, whether it is then held as copies or not: `w -> embed ~data` for a
    product with the batch, and `w -> embed` for a norm of the weight."""
    if _says_where(operation):
        return tuple(dataclasses.replace(value.state, copied=frozenset()) for value in operation.results)
    return tuple(_said(value.aval) for value in operation.results)


@functools.lru_cache(4096)
def _said(aval: Any) -> str:
    return str(aval)


def _transformed(operation: Operation, state: State) -> Iterator[str]:
    """The mesh axes over which a Fourier transform gathers."""
    rows = len(operation.params["fft_lengths"])
    return (a for axes in (state.axes if is_auto(operation.results[0].aval) else state.axes[-rows:]) for a in axes)


def _conflict(states: list[State]) -> bool:
    """Whether one mesh axis slices both a table and its indices (or updates)."""
    return any(set(states[0].sliced) & set(state.sliced) for state in states[1:])


def _sliced(state: State, after: State) -> State:
    """A scatter's result: each device adds only to the rows it will hold."""
    taken = set(state.sliced) | state.pending
    dims = (mine or tuple(a for a in axes if a not in taken) for mine, axes in zip(state.axes, after.axes))
    return placed(dims, state.pending, state.copied)


def _cut(out: Value, touched: list[int], states: list[State]) -> State:
    """A result of another shape: whole along the dimensions that were cut, and otherwise sliced as what was cut is."""
    source = max((s for s in states if len(s.axes) == len(out.shape)), key=lambda state: len(state.sliced))
    return placed(() if i in touched else axes for i, axes in enumerate(source.axes))


def _wanted(value: Value) -> tuple[tuple[str, ...], ...] | None:
    """Mesh axes of a value's dimensions by the first constraint on it, or on its conversion; None without one."""
    for reader in value.readers:
        if reader.name == "convert_element_type":
            return _wanted(reader.results[0])
        if reader.name == "sharding_constraint" and (placed := reader.results[0].placed) is not None:
            return placed.axes
    return None
