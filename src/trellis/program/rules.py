"""Where an operation's result lies before anything moves: the rules of explicit mode.

Each rule gives the state of a result from the operands' states, if every device works on what it has. A dimension that
is summed over leaves a pending sum along its mesh axes. If the operation's own type says another state, the difference
is communication.

JAX's types refuse some operations on sharded dimensions, and `auto_axes` leaves these to the compiler. Inside such a
region types say nothing, so the same rules carry states through it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax

from trellis.notation.state import State
from trellis.program.moves import Move, transition, wire_bytes
from trellis.program.reading import ENTER, LEAVE, REDUCTIONS, Operation, Value
from trellis.program.reshaping import RESHAPING
from trellis.program.sizes import is_auto, num_bytes

GUESS = "the compiler chooses"
CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}


@dataclasses.dataclass(frozen=True, slots=True)
class Implied:
    """A communication that an operation implies: of a value of this type, from and to these states."""

    move: Move
    aval: Any
    before: State
    after: State
    note: str = ""


class States:
    """Where the values of a program lie: what their types say, and what the rules say if the types do not."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.known: dict[Value, State] = {}
        self.scattered: set[Value] = set()  # results of scatters, which need no slice after a sum
        self.twins: dict[Value, Value] = {}  # each value's first twin: equal operations on equal values
        self.first: dict[tuple, list[Operation]] = {}  # the first twin each, of those that differ in parameters alone
        self.written: dict[int, str] = {}  # the parameters of these, by their equations: a `shard_map` has one for all
        self.gathered: set[Value] = set()  # for callbacks
        self.unclear: set[Value] = set()  # results of lookups where one mesh axis slices both the table and the indices

    def __getitem__(self, value: Value) -> State:
        for same in (value, self.twins.get(value)):
            if same in self.known:
                return self.known[same]
        return value.state

    def implied(self, operation: Operation) -> Iterator[Implied]:
        """The communication of one operation; notes where its results lie."""
        if operation.name in CALLBACKS:
            yield from self._called(operation)
            return
        if not operation.results or not hasattr(operation.results[0].aval, "shape"):
            return
        name, out = operation.name, operation.results[0]
        states = [self[value] for value in operation.operands if hasattr(value.aval, "shape")]
        if name in (ENTER, LEAVE):
            if is_auto(out.aval):
                self.known[out] = states[0]
            return
        if name == "reshard" and is_auto(out.aval):
            self.known[out] = states[0]
            return
        rule = RULES.get(name)
        if rule is None and not any(state.sliced or state.pending for state in states):
            return
        if is_auto(out.aval) and name not in _KEEPS_PENDING:
            states = yield from self._summed(operation, states)
        if name in _LOOPS:
            yield from self._loops(_LOOPS[name], states)
        if name in RESHAPING:
            yield from self._reshaping(operation, states)
            return
        yield from self._at_the_edges(operation, states)
        natural = rule(operation, states) if rule else _elementwise(operation, states)
        if name.startswith("scatter"):
            self.scattered.add(out)
        if name in ("gather", "scatter-add") and _conflict(states):
            self.unclear.add(out)
        if is_auto(out.aval):
            self.known[out] = natural
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
        for move in transition(natural, after, num_bytes(out.aval), self.sizes):
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

    def _loops(self, count: int, states: list[State]) -> Iterator[Implied]:
        """An elementwise function that compilers write as loops: they end once no element on any device changes."""
        if axes := self._real(dict.fromkeys(axis for state in states for axis in state.sliced)):
            flag, pending = jax.ShapeDtypeStruct((), bool), placed((), frozenset(axes))
            move = Move("all-reduce", axes, 1, wire_bytes("all-reduce", self._count(axes), 1))
            yield from [Implied(move, flag, pending, placed(()), "once a turn of a while loop")] * count

    def again(self, operation: Operation) -> bool:
        """Whether an earlier operation in the same frame had the same operands and parameters: XLA computes and moves a
        value once."""
        operands = tuple(
            ("literal", str(value.literal.val)) if value.literal is not None else self.twins.setdefault(value, value)
            for value in operation.operands
        )
        types = tuple(_said(value.aval) for value in operation.results)
        alike = self.first.setdefault((operation.frame, operation.name, operands, types), [])
        # A loop's parameters are its body, which takes long to write out: only if everything else is the same.
        first = next((one for one in alike if self._written(one) == self._written(operation)), operation)
        if first is operation:
            alike.append(operation)
        for value, same in zip(operation.results, first.results):
            self.twins[value] = self.twins.get(same, same)
        return first is not operation

    def _written(self, operation: Operation) -> str:
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
                yield Implied(move, value.aval, before, state, "an operand of a product")
        return _dot_general(operation, wanted)

    def _at_the_edges(self, operation: Operation, states: list[State]) -> Iterator[Implied]:
        """What XLA moves by itself if an operation reads the neighbours of slices: for a convolution or a reduction of
        windows along sliced places, the rows that a window reaches past its slice's ends; for a reshape, slices whose
        elements lie elsewhere afterwards; for a Fourier transform, the whole array, whichever of its dimensions are
        sliced (JAX 0.10.2; not 0.12). All are estimates."""
        source, state = operation.operands[0], states[0]
        moved: list[tuple[str, tuple[str, ...], int]] = []
        if operation.name == "fft" and (axes := self._real(state.sliced)):
            moved.append(("all-gather", axes, num_bytes(source.aval)))
        elif operation.name == "reshape" and is_auto(operation.results[0].aval):
            kept = _reshape(operation, states).sliced
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
            yield Implied(move, source.aval, state, state, GUESS)

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
            if (same := self.twins.get(value, value)) in self.gathered:
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
            yield Implied(move, value.aval, before, after, note)

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
            yield Implied(move, out.aval, natural, after, "each device's best")

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
                yield Implied(move, value.aval, state, operation.results[0].state, GUESS)
        for out in operation.results:
            if is_auto(out.aval):
                self.known[out] = _elementwise(operation, states)

    def _real(self, axes) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    def _count(self, axes) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)


@functools.lru_cache(4096)
def _said(aval: Any) -> str:
    return str(aval)


def placed(axes, pending=frozenset(), copied=frozenset()) -> State:
    """The state of a whole array, in explicit mode."""
    return State("explicit", tuple(axes), pending, copied)


def _conflict(states: list[State]) -> bool:
    """Whether one mesh axis slices both a table and its indices (or updates)."""
    return any(set(states[0].sliced) & set(state.sliced) for state in states[1:])


def _sliced(state: State, after: State) -> State:
    """A scatter's result: each device adds only to the rows it will hold."""
    taken = set(state.sliced) | state.pending
    dims = (mine or tuple(a for a in axes if a not in taken) for mine, axes in zip(state.axes, after.axes))
    return placed(dims, state.pending, state.copied)


def _elementwise(operation: Operation, states: list[State]) -> State:
    shape = operation.results[0].shape
    same = [state for state, v in zip(states, operation.operands) if getattr(v.aval, "shape", None) == shape]
    return max(same, key=lambda state: len(state.sliced), default=placed([()] * len(shape)))


def _same(operation: Operation, states: list[State]) -> State:
    return states[0]


def _dot_general(operation: Operation, states: list[State]) -> State:
    (left_sum, right_sum), (left_batch, right_batch) = operation.params["dimension_numbers"]
    left, right = states
    dims = [left.axes[i] or right.axes[j] for i, j in zip(left_batch, right_batch)]
    dims += [axes for i, axes in enumerate(left.axes) if i not in left_sum and i not in left_batch]
    dims += [axes for i, axes in enumerate(right.axes) if i not in right_sum and i not in right_batch]
    summed = {axis for i in left_sum for axis in left.axes[i]} | {axis for i in right_sum for axis in right.axes[i]}
    return placed(dims, left.pending | right.pending | summed)


def _convolution(operation: Operation, states: list[State]) -> State:
    """A sum over the input channels, as in a product; along other dimensions, slices stay where they are. The gradient
    of a weight is a convolution, too, with the batch in the channels' place, and is a sum over the places of two
    arrays."""
    numbers, (left, right) = operation.params["dimension_numbers"], states
    (batch, channels, *places), (made, given, *window) = numbers.lhs_spec, numbers.rhs_spec
    along = [() if right.axes[j] else left.axes[i] for i, j in zip(places, window)]
    dims: list[tuple[str, ...]] = [()] * len(left.axes)
    for at, axes in zip(numbers.out_spec, (left.axes[batch], right.axes[made], *along)):
        dims[at] = axes
    summed = frozenset((*left.axes[channels], *right.axes[given], *(a for j in window for a in right.axes[j])))
    return placed(dims, (left.pending | right.pending | summed) - {a for axes in dims for a in axes})


def _reduction(operation: Operation, states: list[State]) -> State:
    axes, state = operation.params["axes"], states[0]
    dims = (mine for i, mine in enumerate(state.axes) if i not in axes)
    return placed(dims, state.pending | {axis for i in axes for axis in state.axes[i]})


def _transpose(operation: Operation, states: list[State]) -> State:
    state = states[0]
    return placed((state.axes[i] for i in operation.params["permutation"]), state.pending, state.copied)


def _broadcast_in_dim(operation: Operation, states: list[State]) -> State:
    dims: list[tuple[str, ...]] = [()] * len(operation.results[0].shape)
    for source, target in enumerate(operation.params["broadcast_dimensions"]):
        dims[target] = states[0].axes[source]
    return placed(dims, states[0].pending, states[0].copied)


def _stack(operation: Operation, states: list[State]) -> State:
    state, axis = max(states, key=lambda state: len(state.sliced)), operation.params["axis"]
    return placed((*state.axes[:axis], (), *state.axes[axis:]), state.pending, state.copied)


def _unstack(operation: Operation, states: list[State]) -> State:
    gone, state = operation.params["axis"], states[0]
    return placed((axes for i, axes in enumerate(state.axes) if i != gone), state.pending, state.copied)


def _squeeze(operation: Operation, states: list[State]) -> State:
    gone, state = operation.params["dimensions"], states[0]
    return placed((axes for i, axes in enumerate(state.axes) if i not in gone), state.pending, state.copied)


def _reshape(operation: Operation, states: list[State]) -> State:
    """A mesh axis that the result's type has stays where it has it; one that it lacks is gathered at the front.

    Where types say nothing, it stays with a dimension that begins with the same elements: the first of those that are
    joined or cut.
    """
    state, out = states[0], operation.results[0]
    if is_auto(out.aval):
        before, shape, sizes = operation.operands[0].shape, out.shape, out.aval.sharding.mesh.shape
        found: list[tuple[str, ...]] = [()] * len(shape)
        for index, axes in enumerate(state.axes):
            whole, count = math.prod(before[index:]), math.prod(sizes[axis] for axis in axes)
            fits = [i for i, size in enumerate(shape) if math.prod(shape[i:]) == whole and size % count == 0 < size]
            if axes and fits:
                found[fits[-1]] = axes
        return placed(found, state.pending, state.copied)
    dims = list(out.state.axes)
    lost = tuple(axis for axis in state.sliced if axis not in out.state.sliced)
    if lost and dims:
        dims[0] = (*dims[0], *lost)
    return placed(dims, state.pending, state.copied)


def _gather(operation: Operation, states: list[State]) -> State:
    """A lookup: indices' dimensions keep their mesh axes, and so do dimensions that are taken whole; a dimension that
    is looked up leaves a pending sum, since each device finds only the rows that it holds."""
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    table, ids = states[0], states[1]
    shape = operation.operands[0].shape
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(shape)) if i not in gone]
    batch = iter(ids.axes[:-1])
    dims = []
    for index in range(len(operation.results[0].shape)):
        if index in numbers.offset_dims:
            source = kept[numbers.offset_dims.index(index)]
            dims.append(table.axes[source] if sizes[source] == shape[source] else ())
        else:
            dims.append(next(batch))
    looked_up = {axis for i in numbers.start_index_map for axis in table.axes[i]}
    used: set[str] = set()
    unique = []
    for axes in dims:
        unique.append(tuple(axis for axis in axes if axis not in used))
        used.update(axes)
    return placed(unique, frozenset(looked_up - used))


def _scatter(operation: Operation, states: list[State]) -> State:
    """The transpose of a lookup: dimensions of indices are summed over, but for those that lookups were mapped over."""
    numbers = operation.params["dimension_numbers"]
    updates = states[2]
    dims = list(states[0].axes)
    for index, target in updated_dims(operation):
        dims[target] = updates.axes[index]
    of_indices = [axes for i, axes in enumerate(updates.axes) if i not in numbers.update_window_dims]
    for target, index in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims):
        dims[target] = of_indices[index] or dims[target]
    summed = {axis for axes in of_indices for axis in axes}
    batching = {axis for i in numbers.operand_batching_dims for axis in dims[i]}
    held = {axis for axes in dims for axis in axes}
    return placed(dims, frozenset(summed - batching - held))


# By primitive; all others leave their results as elementwise operations do.
RULES: dict[str, Callable[[Operation, list[State]], State]] = {
    "reshard": _same,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "reshape": _reshape,
    "gather": _gather,
    "scatter-add": _scatter,
    **dict.fromkeys((*REDUCTIONS - {"reduce"}, "argmax", "argmin"), _reduction),
}


_LOOPS = {"igamma": 2, "igammac": 2, "igamma_grad_a": 2}  # how many each is
_KEEPS_PENDING = {"reshard", "transpose", "squeeze", "reshape", "reduce_sum"}


def updated_dims(operation: Operation) -> list[tuple[int, int]]:
    """The dimensions of a scatter's updates that are dimensions of the array, each with that one."""
    numbers = operation.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = (i for i in range(len(operation.operands[0].shape)) if i not in gone)
    return list(zip(numbers.update_window_dims, kept))
