"""Checks a manual program's equations, after tracing and before anything runs: no pending sum may be lost.

JAX refuses most nonlinear operations on a pending sum on its own, but lets some through. It carries the sum on in the
type of a `pad` with ones, a `sort` or a cast to whole numbers, which each device would do to its own part. It loses the
sum in others (0.10.2 and 0.12: cumsum, argmax, `where` with a constant; 0.10.2 also max over a dimension and lookups by
index). In a `stack` and a choice between two arrays, it carries the sum of one over what the other holds whole. And it
knows nothing of pending sums if some mesh axes are left to the surrounding program. So the check has its own list of
what is linear. It also follows which values were settled, and refuses to sum one of these again.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from trellis._compat import in_a_rule
from trellis.mesh.manual.ops import marked
from trellis.mesh.manual.refusals import among_groups, eqn_line, no_permutation, refusal
from trellis.mesh.meshes import mesh_text
from trellis.notation import NotationError, PendingSumError
from trellis.notation.binding import Bindings
from trellis.program.manual import COLLECTIVES, SUMS, axes_over
from trellis.program.reading import ENTER, LEAVE, Body, Operation, Program, Value

Axes = frozenset[str]
_NONE: Axes = frozenset()

# Sums whose operand may be settled already, which JAX's types do not tell.
_SECOND_SUMS = {"psum", "psum_invariant", "reduce_scatter"}
# Collectives after which all devices along their axes hold the same.
_SAME_AFTER = {name for name, kind in COLLECTIVES.items() if kind in ("all-reduce", "all-gather")}
# Sums of which all devices then hold the whole. What is reduced and scattered is summed too, and differs.
_SETTLES = SUMS & _SAME_AFTER
# Operations that move slices between devices and combine none.
_MOVES = set(COLLECTIVES) - SUMS - {"pmax", "pmin"}
# Operations that keep a sum of terms a sum of terms, if all operands are such sums alike.
_LINEAR = {
    "add", "add_any", "sub", "neg", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice",
    "split", "unstack", "concatenate", "stack", "pad", "reduce_sum", "copy", "copy_p", "reduce_precision", "pvary",
    "convert_element_type", "layout_constraint",
}  # fmt: skip
# Operations that pass each operand on as it is.
_ALIKE = {"optimization_barrier", ENTER, LEAVE}
# What is also linear if JAX's types carry the sum on: these refuse products of two sums, and ask for a copy.
_CARRIED = _LINEAR | SUMS | _MOVES | {
    "mul", "div", "dot_general", "select_n", "dynamic_slice", "preduced", "vary_unreduced_cast_p",
    "reduced_vary_cast_p",
}  # fmt: skip
# The operands whose elements a result holds as they are: these must be sums of as many terms.
_JOINED = {
    "concatenate": slice(None),
    "stack": slice(None),
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(2),
}
# Of these, those whose result has a place for each element; and operations after which it has.
_HOLDS_PARTS = {"concatenate", "stack", "reshape", "transpose", "squeeze", "convert_element_type", "pvary", "neg"}
# Operations that make only zeros of zeros.
_KEEPS_ZEROS = {"broadcast_in_dim", "convert_element_type", "reshape", "pvary", "copy", "transpose", "squeeze"}
# Calls of jitted functions, whose programs are traced once: lines inside may be an earlier call's.
_SHARED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "linear"}


class SecondSum(PendingSumError):
    """A sum over devices of what is the same on all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What is known of a value along mesh axes.

    Attributes:
        pending: each device holds a part of the sum.
        settled: each device holds the same sum over devices.
        same: each device holds the same, whether it was summed, gathered or given so.
        partly: a part of it is the same sum over devices on each, joined with what differs.
        given: whether the value depends on an argument. A constant is the same everywhere, and its sum counts devices.
    """

    pending: Axes = _NONE
    settled: Axes = _NONE
    same: Axes = _NONE
    partly: Axes = _NONE
    given: bool = False


def check_pending(program: Program, bindings: Bindings, untold: Mapping[Value, Axes] | None) -> list[Axes]:
    """The mesh axes along which each result of a program is pending.

    Args:
        program: the body of a `shard_map`.
        bindings: those of the call, for messages.
        untold: the mesh axes along which a value differs although its JAX type says that it is the same; None if they
            are not known. Then only what was summed or gathered counts as the same on all devices.

    Raises:
        PendingSumError: an operation other than a sum takes a pending sum, or a sum is taken twice.
    """
    given = [Held(given=True)] * len(program.inputs)
    return [held.pending for held in _Check(bindings, untold).body(program, given)]


def check_second_sums(program: Program, bindings: Bindings, cotangents: Iterable[int] = ()) -> None:
    """Checks the program of a rule of a `jax.custom_vjp` alone: it must not sum what was summed.

    Args:
        program: of its forward rule, or of its backward rule.
        bindings: those of the call, for messages.
        cotangents: which inputs are cotangents. JAX's types have summed these along each mesh axis along which they
            are the same on all devices.

    Raises:
        SecondSum: it sums over devices what was summed over them already.
    """
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    given = [Held(given=True)] * len(program.inputs)
    for i in cotangents:
        given[i] = Held(settled=manual - varying(program.inputs[i]), given=True)
    _SecondSums(bindings, None).body(program, given)


class _Check:
    def __init__(self, bindings: Bindings, untold: Mapping[Value, Axes] | None):
        self.bindings, self.untold = bindings, untold

    def body(self, body: Body, given: list[Held]) -> list[Held]:
        """What the results hold, if the inputs hold what is given (and what JAX's types say)."""
        held: dict[Value, Held] = dict(zip(body.inputs, given, strict=True))
        manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)

        def of(value: Value) -> Held:
            known = held.get(value, Held())
            pending = known.pending | summed(value)
            by_type = manual - varying(value) - self.untold.get(value, _NONE) if self.untold is not None else _NONE
            return dataclasses.replace(known, pending=pending, same=(known.same | by_type) - pending)

        for operation in body.operations:
            operands = [of(value) for value in operation.operands]
            if operation.name in _SECOND_SUMS:
                self.refuse_second_sum(operation, operands, body)
            held.update(zip(operation.results, self.operation(operation, operands), strict=True))
        return [of(value) for value in body.results]

    def operation(self, operation: Operation, operands: list[Held]) -> list[Held]:
        name = operation.name
        groups = operation.params.get("axis_index_groups")
        if groups and COLLECTIVES.get(name) == "all-reduce":  # JAX's types take its result for the same on all devices
            raise NotationError(among_groups(name, line_of(operation), self.bindings))
        if name == "ppermute":
            self.check_pairs(operation)
        if name == "name":
            begun, ended = marked(operation.params["name"])
            return [dataclasses.replace(operands[0], pending=(operands[0].pending | begun) - ended)]
        if name in _ALIKE:
            return operands
        if operation.bodies:
            return self.inner(operation, operands)
        pending = self.pending(operation, [held.pending for held in operands])
        over = frozenset(axes_over(operation)) if name in COLLECTIVES and not groups else _NONE
        settled = (_alike_along("settled", operands, operation) - over) | (over if name in _SETTLES else _NONE)
        same = (_alike_along("same", operands, operation) - over) | (over if name in _SAME_AFTER else _NONE)
        parts = _NONE.union(*(held.settled | held.partly for held in operands if name in _HOLDS_PARTS)) - settled
        given, lost = any(held.given for held in operands), [pending | summed(value) for value in operation.results]
        return [Held(pending, settled - each, same - each, parts - each, given) for each in lost]

    def check_pairs(self, operation: Operation) -> None:
        """Refuses a permute that is no permutation of devices, of which JAX tells in a lowering, without the line, and
        one in another order of mesh axes than that in which JAX counts them (0.12 refuses it in a lowering, too)."""
        mesh, axes = jax.sharding.get_abstract_mesh(), axes_over(operation)
        count, place = math.prod(mesh.shape[axis] for axis in axes), f"`{self.bindings.function}`{line_of(operation)}"
        if wrong := no_permutation(operation.params["perm"], count):
            raise NotationError(
                f"a permute must send from a device once at most, and to one once at most, got {wrong}, in {place}: "
                f"count devices along '{'/'.join(axes)}' from 0, as in (i, (i + 1) % size)"
            )
        order = tuple(axis for axis in mesh.axis_names if axis in axes)
        if axes != order:
            raise NotationError(
                "a permute along several mesh axes must name them in the mesh's order, in which JAX counts its devices "
                f"whatever order it is given (`axis_index` counts in that), got {axes} on the mesh "
                f"({mesh_text(mesh)}), in {place}: write {order}, and count along '{'/'.join(order)}'"
            )

    def pending(self, operation: Operation, operands: list[Axes]) -> Axes:
        """The axes along which the results are pending, where JAX's types do not say so."""
        axes = _NONE.union(*operands)
        if not axes or not operation.results:
            return _NONE
        name = operation.name
        rest = axes - set(axes_over(operation)) if name in SUMS else axes
        if any(map(summed, operation.operands)):
            # If JAX's types carried the sum into the operation and not out of it, it was lost.
            carried = all(rest <= summed(value) for value in operation.results)
            if carried and name in _CARRIED and _alike(operation, operands):
                return _NONE
        elif _linear(operation, operands, axes):
            return rest
        raise PendingSumError(refusal(name, axes, line_of(operation), self.bindings))

    def refuse_second_sum(self, operation: Operation, operands: list[Held], body: Body) -> None:
        """Refuses a sum over devices of what is the same on all of them. A mean of that is right, but of a sum it is
        not what was meant: a gradient that JAX's types have summed, say."""
        sizes = jax.sharding.get_abstract_mesh().shape
        over = [a for a in axes_over(operation) if sizes.get(a, 1) > 1]
        settled, same, partly = (
            sorted(_NONE.union(*(getattr(held, what) for held in operands if held.given)).intersection(over))
            for what in ("settled", "same", "partly")
        )
        # The transpose of a value that was the same on all devices is a sum of their shares, which may be equal.
        if "transpose" in operation.scope and not in_a_rule(operation.equation):
            return
        left = [] if _is_mean(operation, body) else same or partly
        if twice := settled or left:
            was, fix = "was summed over it already", "leave the second sum out"
            if not settled and same:
                was, fix = "is the same on all devices along it", f"leave '{same[0]}' out of the sum"
            elif not settled:
                was += " in a part, and is joined with what was not"
                fix = "sum the others alone, and join them then"
            raise SecondSum(
                f"a sum over devices needs values that differ between them, got {operation.name} over '{twice[0]}' of "
                f"a value that {was}, in `{self.bindings.function}`{line_of(operation)}: {fix}"
            )

    def inner(self, operation: Operation, operands: list[Held]) -> list[Held]:
        """Follows the bodies of a loop, of branches, or of a call that does not take its operands as they are."""
        name, outs = operation.name, None
        known = dict(zip(operation.operands, operands, strict=True))
        loop, typed = operation.is_loop, any(map(summed, operation.operands))
        differs = self.differs(operation.operands[0], operands[0]) if name == "cond" else _NONE
        if name == "scan" and any(map(summed, operation.operands[sum(operation.carries) :])):
            raise self.refused(operation, operands)  # JAX has no slice of a pending sum at a turn's index
        for body in operation.bodies:
            entering = operation.entering(body)
            given = [known[outer] for _, outer in entering] or [Held()] * len(body.inputs)
            if loop:  # what is carried may be another sum in the next turn
                given = [Held(held.pending, given=held.given) for held in given]
            got = self.body(body, given)
            if name == "while" and body is operation.bodies[0]:
                differs = self.differs(body.results[0], got[0])
                continue
            # Marks of pending sums (unlike JAX's types) do not pass through programs that call others their own way.
            if entering and len(got) == len(operation.results):
                pairs = zip(outs or got, got, strict=True)
                outs = [
                    Held(
                        a.pending | b.pending,
                        a.settled & b.settled,
                        a.same & b.same,
                        a.partly & b.partly,
                        a.given or b.given,
                    )
                    for a, b in pairs
                ]
            elif any(held.pending for held in operands) and not typed:
                raise self.refused(operation, operands)
            if loop and not typed:
                # A sum that a loop carries is pending from the first turn on, or never.
                first, count = operation.carries
                before, after = given[first : first + count], got[:count]
                if [held.pending for held in before] != [held.pending for held in after]:
                    raise self.refused(operation, [*after, *operands])
        # Each device may have chosen another branch, or as many turns as no other.
        return [
            dataclasses.replace(o, settled=o.settled - differs, same=o.same - differs, partly=o.partly - differs)
            for o in outs or [Held()] * len(operation.results)
        ]

    def differs(self, choice: Value, held: Held) -> Axes:
        """The mesh axes along which devices may choose differently."""
        return (varying(choice) | (self.untold or {}).get(choice, _NONE)) - held.same

    def refused(self, operation: Operation, held: list[Held]) -> PendingSumError:
        axes = _NONE.union(*(each.pending for each in held))
        return PendingSumError(refusal(operation.name, axes, line_of(operation), self.bindings))


class _SecondSums(_Check):
    """Of a part of a program: which of its inputs are pending, where JAX's types do not say so, the whole one tells."""

    def operation(self, operation: Operation, operands: list[Held]) -> list[Held]:
        settled = super().operation(operation, [dataclasses.replace(held, pending=_NONE) for held in operands])
        return [dataclasses.replace(held, pending=_NONE) for held in settled]

    def pending(self, operation: Operation, operands: list[Axes]) -> Axes:
        return _NONE


def _alike(operation: Operation, operands: list[Axes]) -> bool:
    """Whether all operands that an operation joins are sums of as many terms; of a cast, whether it is to floats."""
    if operation.name == "convert_element_type":
        return bool(jax.numpy.issubdtype(operation.params["new_dtype"], jax.numpy.inexact))
    if operation.name == "pad":
        return operands[0] == operands[1] or (bool(operands[0]) and _is_zero(operation.operands[1]))
    joined = _JOINED.get(operation.name, slice(0))
    axes = _NONE.union(*operands[joined])
    return all(part == axes or _is_zero(value) for value, part in zip(operation.operands[joined], operands[joined]))


def _linear(operation: Operation, operands: list[Axes], axes: Axes) -> bool:
    """Whether an operation makes sums that are pending along `axes`, by our own marks, into such a sum."""
    name = operation.name
    if name in ("mul", "div"):  # by one number, the same on all devices
        first, second = operation.operands
        if name == "mul" and operands[1]:
            first, second = second, first
        one = operands.count(axes) == 1 and (name == "mul" or bool(operands[0]))
        return one and not second.shape and not axes & varying(second)
    if name in _MOVES:
        return not axes.intersection(axes_over(operation))
    if name == "pad":
        return _alike(operation, operands)
    return (name in _LINEAR or name in SUMS) and all(part == axes for part in operands) and _alike(operation, operands)


def _alike_along(what: str, operands: list[Held], operation: Operation) -> Axes:
    """The axes along which a result is made of operands that are known to be alike on all devices, and of nothing that
    differs between these. A constant does not, though JAX casts it to what differs where it meets that."""
    known: list[Axes] = [getattr(held, what) for held in operands]
    meet = [axes if held.given else axes | held.same for axes, held in zip(known, operands)]
    pairs = list(zip(meet, operation.operands, strict=True))
    return frozenset(
        a for a in _NONE.union(*known) if all(a in axes or a not in varying(value) for axes, value in pairs)
    )


def _is_mean(operation: Operation, body: Body) -> bool:
    """Whether a sum over devices is only divided by their number: the mean of values that are the same is right."""
    sizes = jax.sharding.get_abstract_mesh().shape
    count = math.prod(sizes[axis] for axis in axes_over(operation))
    uses = [use for use in body.operations if not {*operation.results}.isdisjoint(use.operands)]

    def by_count(use: Operation) -> bool:
        number = use.operands[-1].number
        return use.name == "div" and number is not None and bool(np.all(np.asarray(number.val) == count))

    return bool(uses) and all(map(by_count, uses)) and {*operation.results}.isdisjoint(body.results)


def _is_zero(value: Value) -> bool:
    """Whether a value is known to be zero everywhere, which is a sum of any number of terms."""
    while value.maker is not None and value.maker.name in _KEEPS_ZEROS:
        value = value.maker.operands[0]
    return value.number is not None and not np.any(np.asarray(value.number.val))  # jnp would trace it, under jit


def summed(value: Value) -> Axes:
    """The axes along which a value is pending by its JAX type."""
    mat = getattr(value.aval, "mat", None)
    return mat.unreduced if mat is not None else _NONE


def varying(value: Value) -> Axes:
    """The axes along which devices hold different values, by a value's JAX type."""
    mat = getattr(value.aval, "mat", None)
    return mat.varying if mat is not None else _NONE


def copied(value: Value) -> Axes:
    """The axes along which a value is a copy, by its JAX type."""
    mat = getattr(value.aval, "mat", None)
    return mat.reduced if mat is not None else _NONE


def line_of(operation: Operation) -> str:
    """Where the user's code made an operation, as ` (file.py:12: the line)`."""
    equation, frame = operation.equation, operation.frame
    while frame.equation is not None and frame.equation.primitive.name in _SHARED:
        equation, frame = frame.equation, frame.outer
    return eqn_line(equation)


def met_line(program: Program, value: Value, sliced) -> str:
    """Where a value that ends up differing along mesh axes besides `sliced` first met one that is the same there.

    A forgotten gather or sum shows there: what it would have made the same on all devices meets what is the same.
    """
    wanted, line, axes = {value}, "", varying(value) - set(sliced)
    for operation in reversed(program.operations):
        if wanted.isdisjoint(operation.results):
            continue
        wanted.update(v for v in operation.inputs if axes & varying(v))
        if operation.name == "pvary" and axes & varying(operation.results[0]) - varying(operation.operands[0]):
            line = line_of(operation)
    return line
