"""Slices that meet, and slices that leave, lie as the texts say: a check of a manual program's equations.

A JAX type says along which mesh axes devices hold different values, not which dimension a mesh axis slices, nor which
of two on one dimension is the major one: `a/x/y b`, `a/y/x b` and `a/y b/x` are one type. Annotations say it where
values enter and leave, the texts of `reshard` where they move. In between it is followed here, from operation to
operation. What a collective of JAX's own does to slices is not known, and is not held against anything.
"""

from collections.abc import Iterator

from trellis.mesh.manual.check import line_of, varying
from trellis.mesh.manual.reshard import TransitionError
from trellis.notation import Dim, Shape
from trellis.notation.binding import Bindings, TypeMismatch
from trellis.program.manual import COLLECTIVES, axes_over
from trellis.program.reading import Body, Operation, Program, Value
from trellis.program.rules import slices_kept
from trellis.program.scopes import transition_in

Axes = tuple[str, ...]
# For each dimension the mesh axes that slice it, major to minor; none where nothing is known.
Dims = tuple[Axes, ...]


def check_slices(program: Program, given: list[Dims], bindings: Bindings) -> list[Dims]:
    """How the dimensions of each result of a program are sliced, as far as that is known.

    Args:
        program: the body of a `shard_map`.
        given: how those of its arguments are.
        bindings: those of the call, for messages.

    Raises:
        TypeMismatch: slices of two orders, or of two mesh axes, meet on one dimension, or a text says of a value what
            another text or an annotation says otherwise.
    """
    return _Check(bindings).body(program, given)


def sliced_as(shape: Shape, dims: Dims) -> Shape:
    """A shape with its dimensions sliced otherwise, for messages."""
    return Shape(
        tuple(Dim(dim.name, axes) for dim, axes in zip(shape.dims, dims, strict=True)), shape.pending, shape.copied
    )


def otherwise(known: Dims, said: Dims) -> bool:
    """Whether a text slices dimensions over the mesh axes that slice them, but otherwise.

    Over others it cannot: JAX's types refuse that. And what is known of a part of them may be known of another value.
    """
    axes = [sorted(a for axes in dims for a in axes) for dims in (known, said)]
    return len(known) == len(said) and known != said and axes[0] == axes[1]


class _Check:
    def __init__(self, bindings: Bindings):
        self.bindings = bindings

    def body(self, body: Body, given: list[Dims]) -> list[Dims]:
        held: dict[Value, Dims] = dict(zip(body.inputs, given, strict=True))

        def of(value: Value) -> Dims:
            known = held.get(value, _unknown(value))
            return tuple(tuple(a for a in axes if a in varying(value)) for axes in known)

        for operation in body.operations:
            operands = [of(value) for value in operation.operands]
            held.update(zip(operation.results, self.operation(operation, operands), strict=True))
        return [of(value) for value in body.results]

    def operation(self, operation: Operation, operands: list[Dims]) -> list[Dims]:
        unknown = [_unknown(value) for value in operation.results]
        if "reshard[" in operation.scope and (texts := transition_in(operation.scope)):
            return self.text(operation, operands, texts)
        if operation.bodies:
            return self.inner(operation, operands)
        if operation.name in COLLECTIVES:
            over = set(axes_over(operation))
            moved = any(over.intersection(axes) for dims in operands for axes in dims)
            # Around a ring of one mesh axis slices keep their order.
            if moved and not (operation.name == "ppermute" and len(over) == 1):
                return unknown
        for one, other in _meeting(operation, operands):
            common = [a for a in one if a in other]
            if one and other and (not common or common != [a for a in other if a in one]):
                raise TypeMismatch(
                    f"slices that meet are slices of one dimension, cut alike, got one over '{'/'.join(one)}' and one "
                    f"over '{'/'.join(other)}', in `{self.bindings.function}`{line_of(operation)}: reshard one of them"
                )
        return [slices_kept(operation, operands, value.shape) for value in operation.results]

    def text(self, operation: Operation, operands: list[Dims], texts: tuple[Shape, Shape]) -> list[Dims]:
        """Within a `reshard`: what comes from outside of it is its left side, and what it makes its right side."""
        before, after = (tuple(dim.axes for dim in text.dims) for text in texts)
        for value, dims in zip(operation.operands, operands, strict=True):
            inside = value.maker is not None and transition_in(value.maker.scope) == texts
            if "transpose(" not in operation.scope and not inside and otherwise(dims, before):
                known = sliced_as(texts[0], dims)
                raise TransitionError(
                    f"the left side of a text is what the array is, got a slice '{known}' for '{texts[0]}', in "
                    f"`{self.bindings.function}`{line_of(operation)}: write '{known}', or reshard it from there"
                )
        return [after if len(after) == len(value.shape) else _unknown(value) for value in operation.results]

    def inner(self, operation: Operation, operands: list[Dims]) -> list[Dims]:
        """Through the bodies of a loop, of branches, or of a call that does not take its operands as they are."""
        known = dict(zip(operation.operands, operands, strict=True))
        given = {
            body: [known[outer] for _, outer in operation.entering(body)] or [_unknown(v) for v in body.inputs]
            for body in operation.bodies
        }
        if operation.is_loop:
            return self.loop(operation, given)
        outs: list[Dims] = []
        for body, dims in given.items():
            got = self.body(body, dims)
            if len(got) != len(operation.results):
                return [_unknown(value) for value in operation.results]
            for one, other in zip(outs, got):
                self.refuse_other(one, other, "branches give slices that lie alike", operation)
            outs = [max(each, key=_count) for each in zip(outs, got)] if outs else got
        return outs

    def loop(self, operation: Operation, given: dict[Body, list[Dims]]) -> list[Dims]:
        first, count = operation.carries
        body = operation.bodies[-1]
        dims = given[body]
        dims[first + count :] = [each[1:] for each in dims[first + count :]]  # a turn's slice of what is scanned
        while True:
            got = self.body(body, dims)
            before = dims[first : first + count]
            for one, other in zip(before, got):
                self.refuse_other(one, other, "a loop carries slices that lie alike in every turn", operation)
            # What a turn leaves unknown is unknown in the next.
            dims[first : first + count] = [a if a == b else ((),) * len(a) for a, b in zip(before, got)]
            if dims[first : first + count] == before:
                break
        for condition in operation.bodies[:-1]:
            self.body(condition, [*given[condition][: len(condition.inputs) - count], *before])
        return [*got[:count], *(((), *each) for each in got[count:])]

    def refuse_other(self, one: Dims, other: Dims, rule: str, operation: Operation) -> None:
        if otherwise(one, other):
            seen = " and ".join(" ".join("/".join(("_", *axes)) for axes in dims) for dims in (one, other))
            raise TypeMismatch(
                f"{rule}, got {seen}, in `{self.bindings.function}`{line_of(operation)}: reshard one of them"
            )


def _meeting(operation: Operation, operands: list[Dims]) -> Iterator[tuple[Axes, Axes]]:
    """The slices of dimensions whose elements an operation brings together."""
    if operation.name == "dot_general":
        contracted, batch = operation.params["dimension_numbers"]
        for left, right in (contracted, batch):
            yield from ((operands[0][i], operands[1][j]) for i, j in zip(left, right))
        return
    joins = operation.name in ("stack", "concatenate")
    shapes = [value.shape for value in operation.operands]
    for i, dims in enumerate(operands):
        for j in range(i) if joins or shapes[i] == operation.results[0].shape else ():
            if shapes[j] == shapes[i]:
                yield from zip(operands[j], dims)


def _unknown(value: Value) -> Dims:
    return ((),) * len(value.shape)


def _count(dims: Dims) -> int:
    return sum(map(len, dims))
