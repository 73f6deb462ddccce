"""Where the types put an equation's result before anything moves: the rules of explicit mode.

Each rule says what the operands' placements make of a result when every device works on what it has. A dimension
that is summed over leaves a pending sum along its mesh axes. Where the equation's own type is elsewhere, the
difference is communication.

Some operations are refused on sharded dimensions by JAX's types, and `auto_axes` leaves them to the compiler: inside
such a region types say nothing, so placements are carried through it by the same rules.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AxisType

from .rows import wire_bytes
from .transition import Move, Place, transition

GUESS = "the compiler chooses"


def place_of(aval) -> Place:
    """The placement that a type carries, over explicit mesh axes.

    `spec.partitions` is read, never the spec's items: JAX refuses to index a spec that has states.
    """
    ndim = len(getattr(aval, "shape", ()))
    sharding = getattr(aval, "sharding", None)
    if sharding is None or getattr(sharding, "mesh", None) is None or sharding.mesh.empty:
        return Place(((),) * ndim)
    mesh, spec = sharding.mesh, sharding.spec
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    dims = []
    for entry in spec.partitions:
        axes = entry if isinstance(entry, tuple) else (entry,)
        dims.append(tuple(axis for axis in axes if isinstance(axis, str) and axis in explicit))
    dims += [()] * (ndim - len(dims))
    return Place(tuple(dims), frozenset(spec.unreduced or ()) & explicit, frozenset(spec.reduced or ()) & explicit)


def shape_of(variable) -> tuple[int, ...]:
    """The shape of a value of a jaxpr."""
    return getattr(variable.aval, "shape", ())


def num_bytes(aval) -> int:
    """Bytes of a whole array; a random key counts its words."""
    dtype = aval.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * 8
    return math.prod(aval.shape) * np.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Implied:
    """A communication that an equation implies: of a value of this type, from and to these placements."""

    move: Move
    aval: Any
    before: Place
    after: Place
    note: str = ""


def _auto(aval) -> bool:
    """Whether a type says nothing because a mesh axis is left to the compiler."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Auto in getattr(mesh, "axis_types", ())


class Placements:
    """Where the values of one jaxpr are: what their types say, and what the rules say where types do not."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes
        self.known: dict = {}
        self.scattered: set = set()  # results of scatters, which need no slice after a sum
        self.values: dict = {}  # each value's first twin: equal operations on equal values
        self.first: dict = {}  # the first equation of each kind of twins
        self.unclear: set = set()  # results of lookups where one mesh axis slices both the table and the indices

    def __getitem__(self, variable) -> Place:
        if isinstance(variable, Literal):
            return place_of(variable.aval)
        for same in (variable, self.values.get(variable)):
            if same in self.known:
                return self.known[same]
        return place_of(variable.aval)

    def enter(self, equation: JaxprEqn, inner) -> "Placements":
        """The placements inside a call, with those of its arguments."""
        child = Placements(self.sizes)
        if len(inner.invars) == len(equation.invars):
            pairs = zip(inner.invars, equation.invars)
            child.known = {v: self[outer] for v, outer in pairs if _auto(v.aval)}
        return child

    def leave(self, equation: JaxprEqn, inner, child: "Placements") -> None:
        """Takes the results' placements out of a call."""
        for outer, variable in zip(equation.outvars, inner.outvars):
            if _auto(outer.aval):
                self.known[outer] = child[variable]

    def implied(self, equation: JaxprEqn) -> Iterator[Implied]:
        """The communication of one equation; notes where its results are."""
        if not equation.outvars or not hasattr(equation.outvars[0].aval, "shape"):
            return
        name, out = equation.primitive.name, equation.outvars[0]
        places = [self[variable] for variable in equation.invars if hasattr(variable.aval, "shape")]
        if name == "reshard" and _auto(out.aval):
            self.known[out] = places[0]
            return
        rule = _RULES.get(name)
        if rule is None and not any(place.sharded or place.pending for place in places):
            return
        if name in _RESHAPING:
            yield from self._reshaping(equation, places)
            return
        natural = rule(equation, places) if rule else _elementwise(equation, places)
        if name.startswith("scatter"):
            self.scattered.add(out)
        if name in ("gather", "scatter-add") and _conflict(places):
            self.unclear.add(out)
        if _auto(out.aval):
            self.known[out] = natural
            return
        after = place_of(out.aval)
        if name == "dot_general":
            natural = yield from self._operands(equation, places, after)
        elif rule is None:
            return
        elif name.startswith("scatter") or self._scattered(name, equation):
            natural = _sliced(natural, after)
        elif name in ("argmax", "argmin"):
            yield from self._argmax(equation, natural, after)
            return
        note = GUESS if self._unclear(equation) else ""
        for move in transition(natural, after, num_bytes(out.aval), self.sizes):
            yield Implied(move, out.aval, natural, after, note)

    def _scattered(self, name: str, equation: JaxprEqn) -> bool:
        source = equation.invars[0]
        return name == "reshard" and not isinstance(source, Literal) and source in self.scattered

    def again(self, equation: JaxprEqn) -> bool:
        """Whether an equation before it had the same operands and parameters: XLA computes and moves a value once."""
        operands = tuple(
            ("literal", str(v.val)) if isinstance(v, Literal) else self.values.setdefault(v, v) for v in equation.invars
        )
        params = sorted(equation.params.items())
        key = (equation.primitive.name, operands, str(params), str([v.aval for v in equation.outvars]))
        first = self.first.setdefault(key, equation)
        for variable, same in zip(equation.outvars, first.outvars):
            self.values[variable] = self.values.get(same, same)
        return first is not equation

    def _unclear(self, equation: JaxprEqn) -> bool:
        around = (*equation.outvars, *equation.invars)
        return any(not isinstance(variable, Literal) and variable in self.unclear for variable in around)

    def _operands(self, equation: JaxprEqn, places: list[Place], after: Place) -> Generator[Implied, None, Place]:
        """A product gathers an operand whose contracted dimension is sharded alone, or whose free dimension the
        result does not have sharded; the rest is what the result has before its pending sums are settled."""
        contracted, batch = equation.params["dimension_numbers"]
        free = len(batch[0])
        wanted = []
        for side in (0, 1):
            dims = []
            for index, axes in enumerate(places[side].dims):
                if index in contracted[side]:
                    other = places[1 - side].dims[contracted[1 - side][list(contracted[side]).index(index)]]
                    dims.append(axes if axes == other else ())
                elif index in batch[side]:
                    dims.append(axes)
                else:
                    dims.append(tuple(axis for axis in axes if axis in after.dims[free]))
                    free += 1
            wanted.append(Place(tuple(dims), places[side].pending, places[side].copied))
        for variable, before, place in zip(equation.invars, places, wanted):
            for move in transition(before, place, num_bytes(variable.aval), self.sizes):
                yield Implied(move, variable.aval, before, place, "an operand of a product")
        return _dot_general(equation, wanted)

    def _argmax(self, equation: JaxprEqn, natural: Place, after: Place) -> Iterator[Implied]:
        """Each device's best value and its index are gathered."""
        axes = tuple(axis for axis in natural.pending if self.sizes.get(axis, 1) > 1)
        count = math.prod(self.sizes[axis] for axis in axes)
        if count == 1:
            return
        here = math.prod(self.sizes.get(axis, 1) for axis in natural.sharded)
        for variable in (equation.invars[0], equation.outvars[0]):
            item = num_bytes(variable.aval) // max(math.prod(shape_of(variable)), 1)
            payload = math.prod(shape_of(equation.outvars[0])) * item * count // here
            move = Move("all-gather", axes, payload, wire_bytes("all-gather", count, payload))
            yield Implied(move, equation.outvars[0].aval, natural, after, "each device's best")

    def _reshaping(self, equation: JaxprEqn, places: list[Place]) -> Iterator[Implied]:
        """Operations that cut, join or turn a dimension: free along whole dimensions, left to the compiler along
        sharded ones, where the row is an estimate."""
        kind, touched = _RESHAPING[equation.primitive.name]
        for index in touched(equation):
            axes = tuple(axis for axis in places[0].dims[index] if self.sizes.get(axis, 1) > 1)
            if not axes:
                continue
            source = equation.invars[0].aval
            local = num_bytes(source) // math.prod(self.sizes.get(axis, 1) for axis in places[0].sharded)
            count = math.prod(self.sizes[axis] for axis in axes)
            payload = local * count if kind == "all-gather" else local
            move = Move(kind, axes, payload, wire_bytes(kind, count, payload))
            yield Implied(move, source, places[0], place_of(equation.outvars[0].aval), GUESS)
        for out in equation.outvars:
            if _auto(out.aval):
                self.known[out] = _elementwise(equation, places)


def _conflict(places: list[Place]) -> bool:
    """Whether one mesh axis slices both a table and its indices (or updates)."""
    return any(set(places[0].sharded) & set(place.sharded) for place in places[1:])


def _sliced(place: Place, after: Place) -> Place:
    """A scatter's result: each device adds only to the rows it will hold."""
    taken = set(place.sharded) | place.pending
    dims = [mine or tuple(a for a in axes if a not in taken) for mine, axes in zip(place.dims, after.dims)]
    return Place(tuple(dims), place.pending, place.copied)


def _elementwise(equation: JaxprEqn, places: list[Place]) -> Place:
    shape = shape_of(equation.outvars[0])
    same = [place for place, v in zip(places, equation.invars) if getattr(v.aval, "shape", None) == shape]
    return max(same, key=lambda place: len(place.sharded), default=Place(((),) * len(shape)))


def _same(equation: JaxprEqn, places: list[Place]) -> Place:
    return places[0]


def _dot_general(equation: JaxprEqn, places: list[Place]) -> Place:
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = places
    dims = [left.dims[i] or right.dims[j] for i, j in zip(left_batch, right_batch)]
    dims += [axes for i, axes in enumerate(left.dims) if i not in left_sum and i not in left_batch]
    dims += [axes for i, axes in enumerate(right.dims) if i not in right_sum and i not in right_batch]
    summed = {axis for i in left_sum for axis in left.dims[i]} | {axis for i in right_sum for axis in right.dims[i]}
    return Place(tuple(dims), left.pending | right.pending | summed)


def _reduction(equation: JaxprEqn, places: list[Place]) -> Place:
    axes, place = equation.params["axes"], places[0]
    dims = tuple(mine for i, mine in enumerate(place.dims) if i not in axes)
    return Place(dims, place.pending | {axis for i in axes for axis in place.dims[i]})


def _transpose(equation: JaxprEqn, places: list[Place]) -> Place:
    place = places[0]
    return Place(tuple(place.dims[i] for i in equation.params["permutation"]), place.pending, place.copied)


def _broadcast_in_dim(equation: JaxprEqn, places: list[Place]) -> Place:
    dims: list[tuple[str, ...]] = [()] * len(shape_of(equation.outvars[0]))
    for source, target in enumerate(equation.params["broadcast_dimensions"]):
        dims[target] = places[0].dims[source]
    return Place(tuple(dims), places[0].pending, places[0].copied)


def _squeeze(equation: JaxprEqn, places: list[Place]) -> Place:
    gone, place = equation.params["dimensions"], places[0]
    return Place(tuple(axes for i, axes in enumerate(place.dims) if i not in gone), place.pending, place.copied)


def _reshape(equation: JaxprEqn, places: list[Place]) -> Place:
    """A mesh axis that the result's type has stays where it has it; one that it lacks was gathered from its front."""
    place, (out,) = places[0], equation.outvars
    if _auto(out.aval):
        before, shape = shape_of(equation.invars[0]), shape_of(out)
        if before[: len(shape)] != shape[: len(before)]:
            return Place(((),) * len(shape))
        return Place((*place.dims, *[()] * len(shape))[: len(shape)], place.pending, place.copied)
    after = place_of(out.aval)
    dims = list(after.dims)
    lost = tuple(axis for axis in place.sharded if axis not in after.sharded)
    if lost and dims:
        dims[0] = (*dims[0], *lost)
    return Place(tuple(dims), place.pending, place.copied)


def _gather(equation: JaxprEqn, places: list[Place]) -> Place:
    """A lookup: indices' dimensions keep their mesh axes, and so do dimensions that are taken whole; a dimension that
    is looked up leaves a pending sum, since each device finds only the rows that it holds."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    table, ids = places[0], places[1]
    shape = shape_of(equation.invars[0])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(shape)) if i not in gone]
    batch = iter(ids.dims[:-1])
    dims = []
    for index in range(len(shape_of(equation.outvars[0]))):
        if index in numbers.offset_dims:
            source = kept[numbers.offset_dims.index(index)]
            dims.append(table.dims[source] if sizes[source] == shape[source] else ())
        else:
            dims.append(next(batch))
    looked_up = {axis for i in numbers.start_index_map for axis in table.dims[i]}
    used: set[str] = set()
    unique = []
    for axes in dims:
        unique.append(tuple(axis for axis in axes if axis not in used))
        used.update(axes)
    return Place(tuple(unique), frozenset(looked_up - used))


def _scatter(equation: JaxprEqn, places: list[Place]) -> Place:
    """The transpose of a lookup: dimensions of indices are summed over."""
    numbers = equation.params["dimension_numbers"]
    updates = places[2]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(places[0].dims)) if i not in gone]
    dims = list(places[0].dims)
    for index, target in zip(numbers.update_window_dims, kept):
        dims[target] = updates.dims[index]
    summed = {a for i, axes in enumerate(updates.dims) if i not in numbers.update_window_dims for a in axes}
    batching = {axis for i in numbers.operand_batching_dims for axis in dims[i]}
    held = {axis for axes in dims for axis in axes}
    return Place(tuple(dims), frozenset(summed - batching - held))


_RULES: dict[str, Callable[[JaxprEqn, list[Place]], Place]] = {
    "reshard": _same,
    "dot_general": _dot_general,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "gather": _gather,
    "scatter-add": _scatter,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), _reduction
    ),
    **dict.fromkeys(("argmax", "argmin"), _reduction),
}


def _cut(equation: JaxprEqn) -> list[int]:
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    strides = equation.params.get("strides") or (1,) * len(before)
    return [i for i, (a, b) in enumerate(zip(before, after)) if a != b and not (strides[i] > 1 and a == b * strides[i])]


def _one(name: str) -> Callable[[JaxprEqn], list[int]]:
    return lambda equation: [equation.params[name]]


_RESHAPING: dict[str, tuple[str, Callable[[JaxprEqn], list[int]]]] = {
    "slice": ("permute", _cut),
    "pad": ("permute", _cut),
    "dynamic_slice": ("all-gather", _cut),
    "dynamic_update_slice": ("all-gather", lambda equation: [
        i for i, (a, b) in enumerate(zip(shape_of(equation.invars[0]), shape_of(equation.invars[1]))) if a != b
    ]),
    "split": ("permute", _one("axis")),
    "concatenate": ("all-to-all", _one("dimension")),
    "rev": ("permute", lambda equation: list(equation.params["dimensions"])),
    "sort": ("all-gather", _one("dimension")),
    "top_k": ("all-gather", lambda equation: [equation.params.get("axis", len(shape_of(equation.invars[0])) - 1)]),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), ("all-gather", _one("axis"))),
}  # fmt: skip
