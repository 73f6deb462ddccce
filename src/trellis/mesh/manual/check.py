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
from jax.extend.core import Literal

from trellis.mesh.manual.ops import marked
from trellis.notation import PendingSumError, Shape
from trellis.notation.binding import Bindings

_SETTLES = {"unreduced_psum", "unreduced_reduce_scatter", "psum", "psum_invariant", "reduce_scatter"}
_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
# What runs its programs on its operands. Others that hold one (reductions, scatters, kernels) do more than that.
_RUNS = _CALLS | {"remat", "remat2", "checkpoint", "scan", "cond", "while", "shard_map"}
_MOVES = {"all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ppermute"}
# What keeps a sum of terms a sum of terms, one operand at a time or alike in all.
_LINEAR = {
    "add", "add_any", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "split",
    "concatenate", "pad", "reduce_sum", "copy", "copy_p", "reduce_precision", "pvary", "optimization_barrier",
    "convert_element_type",
}  # fmt: skip
_LIBRARIES = re.compile(
    r"[/\\](site-packages[/\\](jax|equinox)|trellis[/\\](notation|mesh|named|collectives))[/\\]|<frozen|contextlib"
)


def check_pending(jaxpr, bindings: Bindings, pending_in=None, line: str = "") -> list[frozenset[str]]:
    """The mesh axes along which each output of a program is pending.

    Args:
        jaxpr: the traced body of a `shard_map`, or a program inside it.
        bindings: those of the call, for messages.
        pending_in: the axes along which each input is pending, where JAX's types do not say so.
        line: the place to name for equations inside jitted functions (their own may be an earlier call's).

    Raises:
        PendingSumError: an operation other than a sum takes a pending sum.
    """
    held = dict(zip(jaxpr.invars, pending_in or [frozenset()] * len(jaxpr.invars), strict=True))

    def pending(var) -> frozenset[str]:
        own = frozenset() if isinstance(var, Literal) else held.get(var, frozenset())
        return own | _typed(var)

    for eqn in jaxpr.eqns:
        ins = [pending(var) for var in eqn.invars]
        for var, axes in zip(eqn.outvars, _outputs(eqn, ins, bindings, line), strict=True):
            if axes:
                held[var] = axes
    return [pending(var) for var in jaxpr.outvars]


def _outputs(eqn, ins: list[frozenset[str]], bindings: Bindings, line: str) -> list[frozenset[str]]:
    name = eqn.primitive.name
    none = [frozenset()] * len(eqn.outvars)
    if name == "name":
        begun, ended = marked(eqn.params["name"])
        return [(ins[0] | begun) - ended]
    if name in _RUNS and (inner := _programs(eqn)):
        return _inner(eqn, inner, ins, bindings, line)
    axes = frozenset().union(*ins) if ins else frozenset()
    if not axes or not eqn.outvars:
        return none
    over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    over = {over} if isinstance(over, str) else set(over)
    rest = axes - over if name in _SETTLES else axes
    rounded = name == "convert_element_type" and not jax.numpy.issubdtype(eqn.params["new_dtype"], jax.numpy.inexact)
    if not rounded and all(rest <= _typed(var) for var in eqn.outvars):
        return none
    alike = all(part == axes for part in ins)
    linear = (name in _LINEAR and not rounded) or name in _SETTLES or (name in _MOVES and not axes & over)
    # Where JAX's types carried the sum into the operation and not out of it, it was lost.
    if linear and alike and not any(_typed(var) for var in eqn.invars):
        return [rest] * len(eqn.outvars)
    raise PendingSumError(refusal(name, axes, line or eqn_line(eqn), bindings))


def _typed(var) -> frozenset[str]:
    """The axes along which a value is pending by its JAX type."""
    mat = getattr(var.aval, "mat", None)
    return mat.unreduced if mat is not None else frozenset()


def _programs(eqn) -> list:
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns") and hasattr(item, "invars"):
                found.append(item)
    return found


def _inner(eqn, programs, ins, bindings, line) -> list[frozenset[str]]:
    name = eqn.primitive.name
    line = line or eqn_line(eqn)
    outs = [frozenset()] * len(eqn.outvars)
    for program in programs:
        # A conditional's first operand is its index; other programs take the equation's operands as they are.
        given = ins[1:] if name == "cond" else ins
        matches = len(given) == len(program.invars)
        got = check_pending(program, bindings, given if matches else None, line if name in _CALLS else "")
        # The marks of pending sums (unlike JAX's types) do not pass through programs that call others their own way.
        if matches and len(got) == len(outs):
            outs = [a | b for a, b in zip(outs, got, strict=True)]
        elif any(ins) and not any(map(_typed, eqn.invars)):
            raise PendingSumError(refusal(name, frozenset().union(*ins), line, bindings))
    if name == "scan" and not any(map(_typed, eqn.invars)):
        (program,) = programs
        # Carries have the same shape inside and outside, scanned values one dimension more outside.
        carry = sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(eqn.outvars, program.outvars, strict=True))
        kept = sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(eqn.invars, program.invars, strict=True))
        first = kept - carry
        if outs[:carry] != ins[first : first + carry]:
            raise PendingSumError(refusal(name, frozenset().union(*outs[:carry], *ins), line, bindings))
    return outs


def met_line(jaxpr, var, sliced) -> str:
    """Where a value that ends up differing along other mesh axes than `sliced` first met one that is the same there.

    A forgotten gather or sum shows there: what it would have made the same on all devices meets what is.
    """
    wanted, line, axes = {var}, "", _varying(var) - set(sliced)
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        wanted.update(v for v in eqn.invars if not isinstance(v, Literal) and axes & _varying(v))
        if eqn.primitive.name == "pvary" and axes & _varying(eqn.outvars[0]) - _varying(eqn.invars[0]):
            line = eqn_line(eqn)
    return line


def _varying(var) -> frozenset[str]:
    mat = getattr(var.aval, "mat", None)
    return mat.varying if mat is not None else frozenset()


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


def eqn_line(eqn) -> str:
    """Where the user's code made an equation, as ` (file.py:12: the line)`."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    for frame in frames:
        if not _LIBRARIES.search(frame.file_name):
            return _line(frame.file_name, frame.line_num)
    return ""


def error_line(error: BaseException) -> str:
    """Where the user's code was when an error was raised, in the same form."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _LIBRARIES.search(f.filename)]
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
