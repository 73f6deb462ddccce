"""Checks a manual program's equations: slices that meet, and slices that leave, must lie as the texts say.

A JAX type says along which mesh axes devices hold different values, not which dimension a mesh axis slices, nor which
of two on one dimension is the major one: `a/x/y b`, `a/y/x b` and `a/y b/x` are one type. Annotations say it where
values enter and leave, and the texts of `reshard` where they move. In between, this check follows it from operation to
operation, JAX's own collectives among them. What is not known is not checked against anything.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from trellis.mesh.manual.check import copied, line_of, summed, varying
from trellis.mesh.manual.reshard import TransitionError
from trellis.notation import Dim, Shape
from trellis.notation.binding import Bindings, TypeMismatch
from trellis.program.manual import COLLECTIVES, axes_over
from trellis.program.order import collected, in_order, looks_up, order_text, out_of_order
from trellis.program.reading import LEAVE, Body, Operation, Program, Value
from trellis.program.scopes import transition_in
from trellis.program.sizes import state_at
from trellis.program.slices import (
    GATHERED,
    JOINED,
    Axes,
    Dims,
    bare_axis,
    broadcasts,
    is_apart,
    plain_axes,
    slices_kept,
    windows,
)

# Operations whose operands do not meet element by element.
_NOT_ELEMENTWISE = frozenset("dot_general ragged_dot_general sort gather triangular_solve conv_general_dilated".split())


def check_slices(
    program: Program, given: list[Dims], bindings: Bindings
) -> tuple[list[Dims], dict[Value, frozenset[str]]]:
    """How the dimensions of each result of a program are sliced, as far as that is known; and of values anywhere in it,
    along which mesh axes they differ although their JAX types say that they are the same.

    Args:
        program: the body of a `shard_map`.
        given: how those of its arguments are.
        bindings: those of the call, for messages.

    Raises:
        TypeMismatch: slices of two orders, or of two mesh axes, meet on one dimension, or a text says of a value what
            another text or an annotation says otherwise.
    """
    check = _Check(bindings, program)
    return check.body(program, given), check.untold


def sliced_as(shape: Shape, dims: Dims) -> Shape:
    """A shape with its dimensions sliced differently, for messages."""
    named = tuple(Dim(dim.name, plain_axes(axes)) for dim, axes in zip(shape.dims, dims, strict=True))
    return Shape(named, shape.pending, shape.copied)


def otherwise(known: Dims, said: Dims) -> bool:
    """Whether a text has mesh axes slice other dimensions than they are known to slice, or in another order.

    JAX's types refuse other mesh axes. Nothing may be known of some of them, as after a product over a slice, and one
    that slices two dimensions, as of a block of products, is in either of them. What stands out of order is no slice.
    """
    if len(known) == len(said) and known != said and any(map(out_of_order, known)):
        return True
    known, said = (tuple(tuple(a for a in axes if not is_apart(a)) for axes in dims) for dims in (known, said))
    counts = [Counter(bare_axis(a) for axes in dims for a in axes) for dims in (known, said)]
    alike = {axis for axis, count in counts[0].items() if counts[1][axis] == count}
    mine, its = (tuple(tuple(a for a in axes if bare_axis(a) in alike) for axes in dims) for dims in (known, said))
    return len(known) == len(said) and mine != its


def no_slice(shape: Shape, dims: Dims) -> tuple[str, str]:
    """What a message adds if dimensions were joined and not the first alone is sliced, or a dimension was gathered out
    of order, and the fix; empty if neither."""
    for dim, axes in zip(shape.dims, dims, strict=True):
        if out_of_order(axes):
            why = f" ('{dim.name}' was {order_text(axes)}, so its parts are not in their order)"
            return why, gathered_right(axes)
        if any(axis.startswith(JOINED) for axis in axes):
            why = (
                f" ('{dim.name}' joins dimensions of which not only the first is sliced, so this is not a slice of it)"
            )
            return why, "reshard it before they are joined"
    return "", ""


# An operand of an operation, and a dimension of it.
Place = tuple[int, int]


class _Check:
    def __init__(self, bindings: Bindings, program: Program):
        self.bindings, self.program = bindings, program
        # JAX (0.10.2, 0.12.0) takes some values for the same on all devices that may differ: what a `sort` gives beside
        # its keys, as `argsort` does, if it was the same before; the results of a branch or a loop that each device
        # chooses, or repeats, for itself; and what a callback gives. Along which axes these, and what is made of them,
        # differ:
        self.untold: dict[Value, frozenset[str]] = {}
        # The mesh axes along which devices choose for themselves whether the operations of a body run.
        self.chosen: frozenset[str] = frozenset()

    @functools.cached_property
    def in_order(self) -> dict[Value, tuple[bool, ...]]:
        """Of values anywhere in the program, which dimensions stand in the order of the whole array."""
        return in_order(self.program)

    def differs(self, value: Value) -> frozenset[str]:
        return self.untold.get(value, frozenset())

    def body(self, body: Body, given: list[Dims]) -> list[Dims]:
        held: dict[Value, Dims] = dict(zip(body.inputs, given, strict=True))

        def of(value: Value) -> Dims:
            known = held.get(value, _unknown(value))
            along = varying(value) | self.differs(value)
            return tuple(tuple(a for a in axes if a.startswith(GATHERED) or bare_axis(a) in along) for axes in known)

        for operation in body.operations:
            for inner, outer in (pair for mine in operation.bodies for pair in operation.entering(mine)):
                self.untold[inner] = self.differs(inner) | self.differs(outer)
            operands = [of(value) for value in operation.operands]
            found = self.operation(operation, operands)
            self.follow(operation)
            held.update(zip(operation.results, found, strict=True))
        return [of(value) for value in body.results]

    def follow(self, operation: Operation) -> None:
        """Records what JAX's types do not say of an operation's results.

        Raises:
            TypeMismatch: numbers that have a gradient are sorted by keys of each device's own, or go into a branch that
                each device chooses for itself: JAX would not sum it.
        """
        along = frozenset().union(*map(self.differs, operation.operands))
        if operation.name == "sort":
            along = along.union(*map(varying, operation.operands))
            rule = "operands that are sorted together must differ along the same mesh axes"
            self.refuse_unlike(operation, operation.operands, along, f"{rule}, got some that are the same along {{}}")
        elif operation.name == "cond":
            rule = "a branch that each device chooses for itself must take numbers that differ as the choice does"
            values = [value for value in operation.operands[1:] if not copied(value)]  # copies' gradients stay pending
            self.refuse_unlike(
                operation, values, self.choice(operation), f"{rule}, got some that are the same along {{}}"
            )
        elif operation.name in COLLECTIVES:
            along -= set(axes_over(operation))
        elif operation.name == LEAVE:  # what differs along an inner function's own mesh axes is sliced around it
            along -= set(state_at(operation.results[0].aval).sliced)
            along |= varying(operation.operands[0]) - set(operation.params["newly_manual_axes"])
        elif operation.name == "io_callback":  # each device calls it for itself
            along = along.union(jax.sharding.get_abstract_mesh().manual_axes)
        else:
            along = along.union(*map(varying, operation.operands))
        for i, value in enumerate(operation.results):
            inner = [b.results[i] for b in operation.bodies if len(b.results) == len(operation.results)]
            found = frozenset().union(*map(self.differs, inner)) if operation.bodies else along
            if axes := (found | self.choice(operation)) - varying(value) - summed(value):
                self.untold[value] = axes

    def choice(self, operation: Operation) -> frozenset[str]:
        """The mesh axes along which devices choose a branch, or end a loop, differently."""
        if operation.name not in ("cond", "while"):
            return frozenset()
        value = operation.operands[0] if operation.name == "cond" else operation.bodies[0].results[0]
        return varying(value) | self.differs(value)

    def refuse_unlike(self, operation: Operation, values: Iterable[Value], along: frozenset[str], rule: str) -> None:
        """Refuses numbers that are the same on devices that each do something else with them, since JAX would not sum
        their gradient."""
        for value in values:
            if jnp.issubdtype(value.aval.dtype, jnp.inexact) and (lacks := sorted(along - varying(value))):
                raise TypeMismatch(
                    f"{rule.format(', '.join(lacks))}, in `{self.bindings.function}`{line_of(operation)}: write "
                    f"jax.lax.pcast(values, {tuple(lacks)}, to='varying') first"
                )

    def operation(self, operation: Operation, operands: list[Dims]) -> list[Dims]:
        if waits := sorted(self.chosen.intersection(axes_over(operation) if operation.name in COLLECTIVES else ())):
            raise TypeMismatch(
                "a collective must run on all devices along its mesh axes or on none, got one over "
                f"{', '.join(waits)} in a branch or a loop that each device chooses for itself, in "
                f"`{self.bindings.function}`{line_of(operation)}: share the choice first, as with jax.lax.pmax, or "
                "move the collective out"
            )
        if "reshard[" in operation.scope and (texts := transition_in(operation.scope)):
            return self.text(operation, operands, texts)
        if operation.bodies:
            return self.inner(operation, operands)
        if operation.name in COLLECTIVES:
            return collected(operation, operands, jax.sharding.get_abstract_mesh().shape)
        for (i, own), (j, its) in _meeting(operation, operands):
            one, other = (tuple(a for a in operands[at][dim] if not is_apart(a)) for at, dim in ((i, own), (j, its)))
            self.refuse_out_of_order(operation, (one, other), (i, own), (j, its))
            common = [a for a in one if a in other]
            if one and other and (not common or common != [a for a in other if a in one]):
                raise TypeMismatch(
                    f"slices that are combined must be cut the same way, got one over {_over(one)} and one over "
                    f"{_over(other)}, in `{self.bindings.function}`{line_of(operation)}: reshard one of them"
                )
        self.refuse_turned(operation, operands)
        if axes := looks_up(operation, operands, self.program.inputs):
            raise TypeMismatch(
                "positions must be looked up in a dimension whose parts stand in their order, got one "
                f"{order_text(axes)}, in `{self.bindings.function}`{line_of(operation)}: {gathered_right(axes)}"
            )
        return [slices_kept(operation, operands, value.shape) for value in operation.results]

    def refuse_out_of_order(self, operation: Operation, met: tuple[Axes, Axes], *places: tuple[int, int]) -> None:
        """Refuses a dimension that was gathered out of order if it meets one that stands in order, or in another."""
        odd = [out_of_order(axes) for axes in met]
        if not any(odd) or met[0] == met[1]:
            return

        def known(axes: Axes, place: tuple[int, int]) -> bool:
            value = operation.operands[place[0]]
            return bool(axes) or self.in_order.get(value, (False,) * (place[1] + 1))[place[1]]

        if all(map(known, met, places)):
            axes = met[odd.index(True)]
            raise TypeMismatch(
                f"parts of a dimension that are combined must stand in one order, got one {order_text(axes)} and one "
                f"in another order, in `{self.bindings.function}`{line_of(operation)}: {gathered_right(axes)}"
            )

    def refuse_turned(self, operation: Operation, operands: list[Dims]) -> None:
        """Refuses arrays that meet element by element if a mesh axis slices different dimensions of them."""
        if operation.name in _NOT_ELEMENTWISE or not operation.results:
            return
        named = [tuple(map(plain_axes, dims)) for dims in operands]
        alike = [dims for value, dims in zip(operation.operands, named) if value.shape == _shape(operation)]
        for one, other in itertools.combinations(alike, 2):
            for axis in {a for axes in one for a in axes}:
                # In a block of products, both dimensions are sliced over one mesh axis.
                mine, its = ([i for i, axes in enumerate(dims) if axis in axes] for dims in (one, other))
                if its and not set(mine) & set(its):
                    raise TypeMismatch(
                        f"slices that are combined must be slices of the same dimension, got dimension {mine[0]} of "
                        f"one and dimension {its[0]} of another sliced over '{axis}', in "
                        f"`{self.bindings.function}`{line_of(operation)}: transpose one of them, or reshard it"
                    )

    def text(self, operation: Operation, operands: list[Dims], texts: tuple[Shape, Shape]) -> list[Dims]:
        """Within a `reshard`: what comes from outside lies as its left side says, what it makes as its right side."""
        before, after = (tuple(dim.axes for dim in text.dims) for text in texts)
        for value, dims in zip(operation.operands, operands, strict=True):
            inside = value.maker is not None and transition_in(value.maker.scope) == texts
            if "transpose(" not in operation.scope and not inside and otherwise(dims, before):
                known = sliced_as(texts[0], dims)
                why, fix = no_slice(texts[0], dims)
                fix = fix or f"write '{known}', or reshard it from there"
                raise TransitionError(
                    f"the left side of a text must describe the array, got a slice '{known}' for '{texts[0]}'{why}, "
                    f"in `{self.bindings.function}`{line_of(operation)}: {fix}"
                )
        return [after if len(after) == len(value.shape) else _unknown(value) for value in operation.results]

    def inner(self, operation: Operation, operands: list[Dims]) -> list[Dims]:
        """Follows the bodies of a loop, of branches, or of a call that does not take its operands as they are."""
        known = dict(zip(operation.operands, operands, strict=True))
        given = {
            body: [known[outer] for _, outer in operation.entering(body)] or [_unknown(v) for v in body.inputs]
            for body in operation.bodies
        }
        before = self.chosen
        try:
            return self.loop(operation, given, known) if operation.is_loop else self.branches(operation, given)
        finally:
            self.chosen = before

    def branches(self, operation: Operation, given: dict[Body, list[Dims]]) -> list[Dims]:
        self.chosen |= self.choice(operation)
        outs: list[Dims] = []
        for body, dims in given.items():
            got = self.body(body, dims)
            if len(got) != len(operation.results):
                return [_unknown(value) for value in operation.results]
            for one, other in zip(outs, got):
                self.refuse_other(one, other, "branches must return slices that are cut the same way", operation)
            outs = [max(each, key=_count) for each in zip(outs, got)] if outs else got
        return outs

    def loop(self, operation: Operation, given: dict[Body, list[Dims]], known: dict[Value, Dims]) -> list[Dims]:
        first, count = operation.carries
        body = operation.bodies[-1]
        dims = given[body]
        dims[first + count :] = [each[1:] for each in dims[first + count :]]  # a turn's slice of what is scanned
        while True:
            before = dims[first : first + count]
            for condition in operation.bodies[:-1]:
                self.body(condition, [*given[condition][: len(condition.inputs) - count], *before])
            self.chosen |= self.choice(operation)
            got = self.body(body, dims)
            for one, other in zip(before, got):
                self.refuse_other(
                    one, other, "a loop must carry slices that are cut the same way in every iteration", operation
                )
            # What a turn leaves unknown is unknown in the next.
            dims[first : first + count] = [a if a == b else ((),) * len(a) for a, b in zip(before, got)]
            if not self.carried(operation) and dims[first : first + count] == before:
                break
        # The turns of a loop go through the slices of what is scanned in order, and so do the results that it stacks.
        scanned = {operation.operands[at] for at in range(first + count, len(operation.operands))}
        turns = max((known[v][0] for v in scanned if known[v]), key=len, default=())
        return [*got[:count], *((turns, *each) for each in got[count:])]

    def carried(self, operation: Operation) -> bool:
        """Records for the next turn what types do not say of what a loop carries; whether that is more than before."""
        more = False
        first, count = operation.carries
        after = operation.bodies[-1].results[:count]
        for each in operation.bodies:
            begin = first if each is operation.bodies[-1] else len(each.inputs) - count
            for value, made in zip(each.inputs[begin : begin + count], after, strict=True):
                if self.differs(made) - self.differs(value) - varying(value):
                    self.untold[value] = self.differs(value) | self.differs(made)
                    more = True
        return more

    def refuse_other(self, one: Dims, other: Dims, rule: str, operation: Operation) -> None:
        if unclear := [i for i, pair in enumerate(zip(one, other)) if () in pair and any(map(out_of_order, pair))]:
            one, other = (tuple(() if i in unclear else axes for i, axes in enumerate(dims)) for dims in (one, other))
        if otherwise(one, other):
            seen = " and ".join(
                " ".join("/".join(("_", *map(bare_axis, axes))) for axes in dims) for dims in (one, other)
            )
            raise TypeMismatch(
                f"{rule}, got {seen}, in `{self.bindings.function}`{line_of(operation)}: reshard one of them"
            )


def _meeting(operation: Operation, operands: list[Dims]) -> Iterator[tuple[Place, Place]]:
    """The dimensions whose elements an operation brings together."""
    if operation.name == "dot_general":
        contracted, batch = operation.params["dimension_numbers"]
        for left, right in (contracted, batch):
            yield from (((0, i), (1, j)) for i, j in zip(left, right))
        return
    if operation.name == "gather":  # rows are looked up by position: only those of one place meet the place's positions
        numbers = operation.params["dimension_numbers"]
        places = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        yield from (((0, i), (1, j)) for i, j in zip(*places))
        return
    if operation.name.startswith("scatter"):
        yield from (((0, j), (2, i)) for i, j in windows(operation))
        return
    if operation.name == "dynamic_update_slice":
        whole, update = (value.shape for value in operation.operands[:2])
        yield from (((0, i), (1, i)) for i in range(len(whole)) if whole[i] == update[i])
        return
    shapes = [value.shape for value in operation.operands]
    if operation.name in ("stack", "concatenate"):
        met = [pair for pair in itertools.combinations(range(len(shapes)), 2) if shapes[pair[0]] == shapes[pair[1]]]
    elif len(operation.results) == 1 or operation.name == "sort":
        met = itertools.combinations([i for i, shape in enumerate(shapes) if broadcasts(shape, _shape(operation))], 2)
    else:
        met = ()
    for i, j in met:
        for dim, (one, other, size, its) in enumerate(zip(operands[i], operands[j], shapes[i], shapes[j])):
            if size == its or set(one) & set(other):  # one row of a slice may be added to each of another
                yield (i, dim), (j, dim)


def gathered_right(axes: Axes) -> str:
    """The fix for a dimension that was gathered out of order, for messages."""
    whole = ", ".join(repr(bare_axis(axis)) for axis in axes)
    return f"gather it over the last of its mesh axes first, or over ({whole}) at once"


def _over(axes: Axes) -> str:
    """The mesh axes of a slice, for messages."""
    text = "'" + "/".join(bare_axis(axis) for axis in axes) + "'"
    return text + " (made by joining dimensions)" if any(axis.startswith(JOINED) for axis in axes) else text


def _shape(operation: Operation) -> tuple[int, ...]:
    return operation.results[0].shape


def _unknown(value: Value) -> Dims:
    return ((),) * len(value.shape)


def _count(dims: Dims) -> int:
    return sum(map(len, dims))
