"""In which order a dimension's parts stand after JAX's own collectives, which no type of a manual program says.

The parts of a dimension over `x/y` are numbered by two digits, that of `x` the major one. A device has one value of
each, and a gather gives it all values of one, outermost in what it holds. Gathered over `y` and then `x`, or over
`("x", "y")` at once, the parts stand as in the whole array. Gathered over `x` alone, or first, a device's parts are no
neighbours there, and what it holds is no slice. So a digit that was gathered out of its place stays in the list of mesh
axes that slice a dimension, marked `GATHERED`, until another collective takes it away again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from trellis.program.manual import COLLECTIVES, axes_over
from trellis.program.reading import Body, Operation, Program, Value
from trellis.program.scopes import transition_in
from trellis.program.slices import (
    Axes,
    Dims,
    apart,
    bare_axis,
    gathered,
    is_gathered,
    joined_of,
    place_and_count,
    slices_kept,
)

# Operations that put elements in another order, besides those that `slices_kept` knows nothing of.
_REORDERS = frozenset(("rev", "sort", "concatenate"))


def collected(operation: Operation, operands: list[Dims], sizes: Mapping[str, int]) -> list[Dims]:
    """How the results of a collective are sliced, as far as this is known.

    Args:
        operation: one of `COLLECTIVES`.
        operands: for each operand, how it is.
        sizes: of the mesh axes.
    """
    over = [(axis, sizes[axis]) for axis in axes_over(operation) if sizes.get(axis, 1) > 1]
    if operation.name == "ragged_all_to_all" or operation.params.get("axis_index_groups"):
        return [((),) * len(value.shape) for value in operation.results]
    return [_one(operation, dims, over) for dims, _ in zip(operands, operation.results)]


def _one(operation: Operation, dims: Dims, over: list[tuple[str, int]]) -> Dims:
    if not over:
        return dims if len(dims) == len(operation.results[0].shape) else ((),) * len(operation.results[0].shape)
    kind, params = COLLECTIVES[operation.name], operation.params
    if operation.name == "ppermute":
        return dims if len(over) == 1 else tuple(_permuted(axes, over, params["perm"]) for axes in dims)
    axes = {axis for axis, _ in over}
    # Parts of one slice that meet parts of another make a dimension of their own.
    rest = [() if axes.intersection(map(bare_axis, mine)) else mine for mine in dims]
    if kind == "all-gather":
        at = params["all_gather_dimension"]
        if not params["tiled"]:
            whole = next((i for i, mine in enumerate(dims) if axes.issubset(mine)), None)
            parts: Axes = ()
            if whole is not None:
                parts, rest[whole] = apart(_gathered(dims[whole], over))
            return (*rest[:at], parts, *rest[at:])
        rest[at] = _gathered(dims[at], over)
    elif kind == "reduce-scatter":
        at = params["scatter_dimension"]
        if not params["tiled"]:
            return (*rest[:at], *rest[at + 1 :])
        rest[at] = _scattered(operation, dims[at], over)
    elif kind == "all-to-all":
        split, joined = params["split_axis"], params["concat_axis"]
        rest[split] = rest[joined] = ()
        if split != joined:
            rest[split], rest[joined] = _scattered(operation, dims[split], over), _gathered(dims[joined], over)
    return tuple(rest)


def _gathered(dim: Axes, over: list[tuple[str, int]]) -> Axes:
    """A dimension whose parts are gathered, those along the last mesh axis innermost; no axes if nothing is known."""
    for axis, count in reversed(over):
        if axis not in dim or any(joined_of(each) for each in dim):
            return ()
        dim = tuple(gathered(axis, 0, count) if each == axis else _moved(each, 1) for each in dim)
    while dim and is_gathered(dim[-1]) and place_and_count(dim[-1])[0] == sum(map(is_gathered, dim)) - 1:
        dim = dim[:-1]  # it stands where it does in the whole array
    return dim


def _scattered(operation: Operation, dim: Axes, over: list[tuple[str, int]]) -> Axes:
    """A dimension of which each device keeps one of its outermost parts along each mesh axis in turn."""
    # The gradient of a gather in an order that did not matter, as before a sum over all parts, has none itself.
    if not any(map(is_gathered, dim)) and "transpose(" in operation.scope:
        return ()
    if any(joined_of(each) or bare_axis(each) == axis and not is_gathered(each) for each in dim for axis, _ in over):
        return ()
    for axis, count in over:
        first = next((i for i, each in enumerate(dim) if is_gathered(each) and place_and_count(each)[0] == 0), len(dim))
        if first < len(dim) and place_and_count(dim[first])[1] != count:
            return ()
        dim = tuple(_moved(each, -1) for each in dim)
        dim = (*dim[:first], axis, *dim[first + 1 :])
    return dim


def _moved(axis: str, by: int) -> str:
    """A digit, one place further in or out in what a device holds if it was gathered."""
    if not is_gathered(axis):
        return axis
    place, count = place_and_count(axis)
    return gathered(bare_axis(axis), place + by, count)


def _permuted(dim: Axes, over: list[tuple[str, int]], pairs) -> Axes:
    """A dimension whose slices went to other devices along several mesh axes, which are in the mesh's order.

    They stay as they are if they went around a ring, and are those of another order of axes if each device has what it
    has in that.
    """
    axes = [axis for axis, _ in over]
    if not set(axes).intersection(map(bare_axis, dim)):
        return dim
    start = next((i for i in range(len(dim)) if set(dim[i : i + len(axes)]) == set(axes)), None)
    if start is None:
        return ()
    counts = dict(over)
    digits = list(itertools.product(*(range(count) for _, count in over)))

    def number(device: int, order) -> int:
        found, own = 0, dict(zip(axes, digits[device]))
        for axis in order:
            found = found * counts[axis] + own[axis]
        return found

    before, total = dim[start : start + len(axes)], math.prod(counts.values())
    if len(pairs) == total and len({(number(b, before) - number(a, before)) % total for a, b in pairs}) == 1:
        return dim
    for after in itertools.permutations(before):
        if len(pairs) == total and all(number(a, before) == number(b, after) for a, b in pairs):
            return (*dim[:start], *after, *dim[start + len(axes) :])
    return ()


def out_of_order(axes: Axes) -> bool:
    """Whether a dimension's parts stand in another order than in the whole array."""
    return any(map(is_gathered, axes))


def looks_up(operation: Operation, operands: list[Dims], inputs: list[Value]) -> Axes:
    """The mesh axes of a dimension out of order in which an operation looks for the position of the largest or smallest
    number, or looks up positions that are made of inputs: these count in the order of the whole array. None if there is
    no such dimension."""
    if operation.name in ("argmax", "argmin"):
        return next((operands[0][i] for i in operation.params["axes"] if out_of_order(operands[0][i])), ())
    if operation.name == "gather":
        dims = operation.params["dimension_numbers"].start_index_map
    elif operation.name == "dynamic_slice":
        dims = [i for i, size in enumerate(operation.params["slice_sizes"]) if size < operation.operands[0].shape[i]]
    else:
        return ()
    if odd := [operands[0][i] for i in dims if out_of_order(operands[0][i])]:
        seen, left = set(), list(operation.operands[1:])
        while left:
            value = left.pop()
            if value in inputs:
                return odd[0]
            if value.maker is not None and value not in seen:
                seen.add(value)
                left.extend(value.maker.operands)
    return ()


def order_text(axes: Axes) -> str:
    """How the parts of such a dimension came there, for messages."""
    local = sorted((place_and_count(axis)[0], bare_axis(axis)) for axis in axes if is_gathered(axis))
    return f"sliced over '{'/'.join(map(bare_axis, axes))}' and gathered over '{'/'.join(axis for _, axis in local)}'"


def in_order(program: Program) -> dict[Value, tuple[bool, ...]]:
    """Of values anywhere in a program, which dimensions are known to stand in the order of the whole array: those of
    arguments and of texts, and what operations keep of them."""
    found = {value: (True,) * len(value.shape) for value in program.inputs}

    def of(value: Value) -> tuple[bool, ...]:
        return found.get(value) or (False,) * len(getattr(value.aval, "shape", ()))

    def follow(body: Body) -> None:
        for operation in body.operations:
            for inner in operation.bodies:
                for value, outer in operation.entering(inner):
                    given = of(outer)
                    found[value] = given[len(given) - len(value.shape) :]
                follow(inner)
            found.update(zip(operation.results, _kept(operation, of)))

    follow(program)
    return found


def _kept(operation: Operation, of) -> Iterator[tuple[bool, ...]]:
    """For each result of an operation, which of its dimensions stand in order."""
    for i, value in enumerate(operation.results):
        rank = len(value.shape)
        if "reshard[" in operation.scope and transition_in(operation.scope):
            yield (True,) * rank
        elif operation.bodies:
            inner = operation.bodies[-1].results
            mine = of(inner[i]) if len(inner) == len(operation.results) else ()
            yield ((False,) * rank + mine)[len(mine) :]
        elif operation.name in COLLECTIVES:
            mine = of(operation.operands[i]) if i < len(operation.operands) else ()
            yield mine if len(mine) == rank else (False,) * rank
        elif operation.name in _REORDERS:
            yield (False,) * rank
        else:
            marked = [tuple(("in order",) if one else () for one in of(each)) for each in operation.operands]
            yield tuple(bool(axes) for axes in slices_kept(operation, marked, value.shape))
