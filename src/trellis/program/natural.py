"""Where an operation's result lies if every device works on what it has: by its primitive, from its operands."""

import math
from collections.abc import Callable

from trellis.notation.state import State
from trellis.program.reading import REDUCTIONS, Operation
from trellis.program.sizes import is_auto


def placed(axes, pending=frozenset(), copied=frozenset()) -> State:
    """The state of a whole array, in explicit mode."""
    return State("explicit", tuple(axes), pending, copied)


def elementwise(operation: Operation, states: list[State], result: int = 0) -> State:
    """As the operand of the same shape that is sliced most."""
    shape = operation.results[result].shape
    same = [state for state, v in zip(states, operation.operands) if getattr(v.aval, "shape", None) == shape]
    return max(same, key=lambda state: len(state.sliced), default=placed([()] * len(shape)))


def _same(operation: Operation, states: list[State]) -> State:
    return states[0]


def dot_general(operation: Operation, states: list[State]) -> State:
    """Batch dimensions, then each operand's own; what is summed along slices is pending."""
    (left_sum, right_sum), (left_batch, right_batch) = operation.params["dimension_numbers"]
    left, right = states
    dims = [left.axes[i] or right.axes[j] for i, j in zip(left_batch, right_batch)]
    dims += [axes for i, axes in enumerate(left.axes) if i not in left_sum and i not in left_batch]
    dims += [axes for i, axes in enumerate(right.axes) if i not in right_sum and i not in right_batch]
    summed = {axis for i in left_sum for axis in left.axes[i]} | {axis for i in right_sum for axis in right.axes[i]}
    return placed(dims, left.pending | right.pending | summed)


def _convolution(operation: Operation, states: list[State]) -> State:
    """A sum over the input channels, as in a product; along other dimensions, slices stay where they are, and so they
    do along channels of which each is convolved by itself. The gradient of a weight is a convolution, too, with the
    batch in the channels' place, and is a sum over the places of two arrays."""
    numbers, (left, right) = operation.params["dimension_numbers"], states
    (batch, channels, *places), (made, given, *window) = numbers.lhs_spec, numbers.rhs_spec
    along = [() if right.axes[j] else left.axes[i] for i, j in zip(places, window)]
    dims: list[tuple[str, ...]] = [()] * len(left.axes)
    count, groups = operation.operands[0].shape[channels], operation.params["feature_group_count"]
    each = left.axes[channels] if groups == count == operation.results[0].shape[numbers.out_spec[1]] else ()
    for at, axes in zip(numbers.out_spec, (left.axes[batch], right.axes[made] or each, *along)):
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


def reshape(operation: Operation, states: list[State]) -> State:
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
    "dot_general": dot_general,
    "conv_general_dilated": _convolution,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "squeeze": _squeeze,
    "stack": _stack,
    "unstack": _unstack,
    "reshape": reshape,
    "gather": _gather,
    "scatter-add": _scatter,
    **dict.fromkeys((*REDUCTIONS - {"reduce"}, "argmax", "argmin"), _reduction),
}


def updated_dims(operation: Operation) -> list[tuple[int, int]]:
    """The dimensions of a scatter's updates that are dimensions of the array, each with that one."""
    numbers = operation.params["dimension_numbers"]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = (i for i in range(len(operation.operands[0].shape)) if i not in gone)
    return list(zip(numbers.update_window_dims, kept))
