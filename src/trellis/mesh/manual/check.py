"""No pending sum is lost: a check of a manual program's equations, after tracing and before anything runs.

JAX refuses most nonlinear operations on a pending sum on its own. It forgets some (0.10.2 and 0.12: cumsum, argmax,
`where` with a constant; 0.10.2 also max over a dimension and lookups by index): there the result of a forgotten
reduction would be a wrong number. And it knows nothing of pending sums where some mesh axes are left to the
surrounding program.
"""

import linecache
import os
import re
import traceback

import jax
from jax.extend.core import JaxprEqn

from trellis.frames import in_a_library
from trellis.mesh.manual.ops import marked
from trellis.notation import PendingSumError, Shape
from trellis.notation.binding import Bindings
from trellis.program.manual import COLLECTIVES, SUMS, axes_over
from trellis.program.reading import ENTER, LEAVE, Body, Operation, Program, Value

Axes = frozenset[str]
_NONE: Axes = frozenset()

# What keeps a sum of terms a sum of terms, one operand at a time or alike in all.
_LINEAR = {
    "add", "add_any", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "split",
    "concatenate", "pad", "reduce_sum", "copy", "copy_p", "reduce_precision", "pvary", "optimization_barrier",
    "convert_element_type", ENTER, LEAVE,
}  # fmt: skip
# Calls of jitted functions, whose programs are traced once: lines inside may be an earlier call's.
_SHARED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}


def check_pending(program: Program, bindings: Bindings) -> list[Axes]:
    """The mesh axes along which each result of a program is pending.

    Args:
        program: the body of a `shard_map`.
        bindings: those of the call, for messages.

    Raises:
        PendingSumError: an operation other than a sum takes a pending sum.
    """
    return _pending(program, [_NONE] * len(program.inputs), bindings)


def _pending(body: Body, inputs: list[Axes], bindings: Bindings) -> list[Axes]:
    held: dict[Value, Axes] = dict(zip(body.inputs, inputs, strict=True))
    of = lambda value: held.get(value, _NONE) | _typed(value)
    for operation in body.operations:
        operands = [of(value) for value in operation.operands]
        held.update(zip(operation.results, _outputs(operation, operands, bindings), strict=True))
    return [of(value) for value in body.results]


def _outputs(operation: Operation, operands: list[Axes], bindings: Bindings) -> list[Axes]:
    name, none = operation.name, [_NONE] * len(operation.results)
    if name == "name":
        begun, ended = marked(operation.params["name"])
        return [(operands[0] | begun) - ended]
    if operation.bodies:
        return _inner(operation, operands, bindings)
    axes = _NONE.union(*operands)
    if not axes or not operation.results:
        return none
    over = set(axes_over(operation))
    rest = axes - over if name in SUMS else axes
    rounded = name == "convert_element_type" and not jax.numpy.issubdtype(
        operation.params["new_dtype"], jax.numpy.inexact
    )
    if not rounded and all(rest <= _typed(value) for value in operation.results):
        return none
    moved = name in COLLECTIVES and name not in (*SUMS, "pmax", "pmin") and not axes & over
    linear = (name in _LINEAR and not rounded) or name in SUMS or moved
    # Where JAX's types carried the sum into the operation and not out of it, it was lost.
    if linear and all(part == axes for part in operands) and not any(map(_typed, operation.operands)):
        return [rest] * len(none)
    raise PendingSumError(refusal(name, axes, _line_of(operation), bindings))


def _typed(value: Value) -> Axes:
    """The axes along which a value is pending by its JAX type."""
    mat = getattr(value.aval, "mat", None)
    return mat.unreduced if mat is not None else _NONE


def _inner(operation: Operation, operands: list[Axes], bindings: Bindings) -> list[Axes]:
    """Through the bodies of a loop, of branches, or of a call that does not take its operands as they are."""
    name, outputs = operation.name, [_NONE] * len(operation.results)
    marks = dict(zip(operation.operands, operands, strict=True))
    refuse = lambda axes: PendingSumError(refusal(name, _NONE.union(*axes), _line_of(operation), bindings))
    typed = any(map(_typed, operation.operands))
    for body in operation.bodies:
        entering = operation.entering(body)
        given = [marks[outer] for _, outer in entering] or [_NONE] * len(body.inputs)
        got = _pending(body, given, bindings)
        # The marks of pending sums (unlike JAX's types) do not pass through programs that call others their own way.
        if entering and len(got) == len(outputs):
            outputs = [a | b for a, b in zip(outputs, got, strict=True)]
        elif any(operands) and not typed:
            raise refuse(operands)
        if name == "scan" and not typed:
            first, count = operation.params["num_consts"], operation.params["num_carry"]
            if got[:count] != given[first : first + count]:
                raise refuse([*got[:count], *operands])
    return outputs


def met_line(program: Program, value: Value, sliced) -> str:
    """Where a value that ends up differing along other mesh axes than `sliced` first met one that is the same there.

    A forgotten gather or sum shows there: what it would have made the same on all devices meets what is.
    """
    wanted, line, axes = {value}, "", _varying(value) - set(sliced)
    for operation in reversed(program.operations):
        if wanted.isdisjoint(operation.results):
            continue
        wanted.update(v for v in operation.inputs if axes & _varying(v))
        if operation.name == "pvary" and axes & _varying(operation.results[0]) - _varying(operation.operands[0]):
            line = _line_of(operation)
    return line


def _varying(value: Value) -> Axes:
    mat = getattr(value.aval, "mat", None)
    return mat.varying if mat is not None else _NONE


def refusal(operation: str, axes, line: str, bindings: Bindings) -> str:
    """The text of a refusal, with the `reshard` that was forgotten."""
    candidates = [s for s in dict.fromkeys(bindings.pending) if not axes or set(axes) & set(s.pending)]
    axes = axes or {a for s in candidates for a in s.pending}
    along = f" along {', '.join(sorted(axes))}" if axes else ""
    fixes = " or ".join(f'reshard("{s} -> {settled(s, axes)}", ...)' for s in candidates[-3:])
    return (
        f"a pending sum may only be added to sums pending alike, reshaped or settled, got {operation} of a sum "
        f"pending{along}, in `{bindings.function}`{line}: write {fixes or 'a reshard that settles it'} before"
    )


def settled(shape: Shape, axes=None) -> Shape:
    """The shape without its pending sums (those over `axes`)."""
    rest = tuple(a for a in shape.pending if axes and a not in axes)
    return Shape(shape.dims, rest, shape.copied, shape.ellipsis)


def _line_of(operation: Operation) -> str:
    """Where the user's code made an operation, as ` (file.py:12: the line)`."""
    equation, frame = operation.equation, operation.frame
    while frame.equation is not None and frame.equation.primitive.name in _SHARED:
        equation, frame = frame.equation, frame.outer
    return _equation_line(equation)


def _equation_line(equation: JaxprEqn) -> str:
    for frame in getattr(equation.source_info.traceback, "frames", ()):
        if not in_a_library(frame.file_name):
            return _line(frame.file_name, frame.line_num)
    return ""


def error_line(error: BaseException) -> str:
    """Where the user's code was when an error was raised, in the same form."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not in_a_library(f.filename)]
    return _line(frames[-1].filename, frames[-1].lineno) if frames else ""


def located(error: Exception) -> str:
    """An error's text with the line of the user's program at its place: `rule, got values, in place (line): fix`."""
    text, line = str(error), error_line(error)
    if not line or line in text:
        return text
    places = list(re.finditer(r", in [^:]+(?=: )", text))
    end = places[-1].end() if places else len(text)
    return text[:end] + line + text[end:]


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    text = text if len(text) <= 80 else text[:77] + "..."
    return f" ({os.path.basename(file)}:{number}{f': {text}' if text else ''})"
