"""Refusals of manual programs, in the notation: the rule, what was seen, the line of the user's program, the fix."""

import collections
import linecache
import os
import re
from collections.abc import Collection, Sequence

import numpy as np

from trellis._compat import maps_no_copies, of_groups, refuses_copies, refuses_slices
from trellis.errors import TrellisError, did_you_mean, shortened
from trellis.frames import in_a_library, users_line
from trellis.mesh.meshes import MeshError, mesh_text
from trellis.notation import NotationError, PendingSumError, Shape, TypeMismatch
from trellis.notation.binding import Bindings, left_axes

_REFUSED = re.compile(r"unreduced|reduced")
# What JAX says (0.10.2 and 0.12) when it differentiates operations on a copy other than products and sums.
_OF_A_COPY = re.compile(
    "another input is reduced on|only accepts inputs that are reduced|cannot accept args which are reduced"
    "|reduced rule for .* not implemented"
)
# How JAX 0.10 to 0.12 name the operation that they refuse.
_OPERATION = (r"rule for (\w+)", r"(\w+) is a non-linear operation", r"`(\w+)`", r"passed to (\w+)")


def raise_in_notation(error: Exception, bindings: Bindings) -> None:
    """Turns JAX's refusal of an operation on a pending sum or a copy into one in the notation; lets others pass."""
    text = str(error)
    line = error_line(error)
    if of_groups(error):
        raise NotationError(among_groups("one", line, bindings)) from error
    if maps_no_copies(error):
        raise NotationError(
            f"JAX cannot map over an operation that begins or ends a pending sum or a copy, got one under vmap, "
            f"in `{bindings.function}`{line}: write the mapped dimension in the text, or use jax.lax.map"
        ) from error
    if isinstance(error, NotationError):
        if (told := located(error)) != text:
            raise type(error)(told).with_traceback(error.__traceback__) from error.__cause__
        return
    if cast := re.search(r"Unsupported pcast from=(\w+), to='(\w+)'", text):
        raise TypeMismatch(
            f"JAX cannot cast a value between these states, got pcast to '{cast[2]}' of one that is {cast[1]}, in "
            f"`{bindings.function}`{line}: add the missing reshard before it, or leave out the cast"
        ) from error
    if "argument to VJP function" in text and (along := re.findall(r"U:\(?([\w,]+)", text)):
        raise PendingSumError(
            f"only a settled value can be differentiated, got a sum pending along {along[0]}, in "
            f"`{bindings.function}`{line}: settle it first with reshard"
        ) from error
    if "branches must have equal output types" in text:
        types = re.findall(r"has type (\S+)", text)
        raise TypeMismatch(
            f"the branches of a cond must return the same type, got {' and '.join(types) or 'several'}, in "
            f"`{bindings.function}`{line}: reshard the result of one to match the other"
        ) from error
    if mixed := re.search(r"lax\.(\w+) can only accept axis_name .*input type: (\S+), axes: \(?([^)]*)\)? and", text):
        along = [axis.strip(" '") for axis in mixed[3].split(",") if axis.strip(" '")]
        held = set(re.findall(r"\w+", "".join(re.findall(r"\{([^}]*)\}", mixed[2]))))
        alike = [axis for axis in along if axis not in held]
        raise TypeMismatch(
            f"a value must differ along all mesh axes of a JAX collective, or along none, got {mixed[1]} over "
            f"{', '.join(along)} of one that is the same along {', '.join(alike)}, in `{bindings.function}`{line}: "
            f"leave {alike[0] if alike else 'one'} out, or use reshard"
        ) from error
    if (wrong := _of_a_rule(text, f"`{bindings.function}`{line}")) is not None:
        raise wrong from error
    if carried := re.search(
        r"has type (\S+) but the corresponding output carry component has type (\S+), so the manual axis types", text
    ):
        first, later = map(_varying, carried.groups())
        fix = f"start it with jax.lax.pcast(..., {_axes(later - first)}, to='varying')"
        if sums := [s for s in dict.fromkeys(bindings.pending) if (later - first) & set(s.pending)]:
            fix += f', or if it is a pending sum with reshard("{settled(sums[-1])} -> {sums[-1]}", ...)'
        if not later - first:
            fix = f"return jax.lax.pcast(..., {_axes(first - later)}, to='varying') from it"
        raise TypeMismatch(
            f"a loop's carry must start with the type that its body returns, got {carried[1]} and then {carried[2]}, "
            f"in `{bindings.function}`{line}: {fix}"
        ) from error
    _raise_of_left(error, f"`{bindings.function}`{line}", left_axes())
    if not _REFUSED.search(text):
        return
    if (copied := re.search(r"args which are reduced.*?R:\(?(\w+)", text)) is not None:
        raise TypeMismatch(
            f"a copy '~{copied[1]}' can only be multiplied with an operand that {copied[1]} slices, got a collective "
            f"of one or a cast, in `{bindings.function}`{line}: use the value from before the reshard to '~{copied[1]}'"
        ) from error
    if "Inputs cannot be replicated on the same axes" in text:
        raise TypeMismatch(
            "a copy '~x' can only be multiplied with an operand that x slices, got an elementwise operation of one "
            f"with a value that is the same on all devices, in `{bindings.function}`{line}: use the value from before "
            "the reshard to '~'"
        ) from error
    found = next(filter(None, (re.search(words, text) for words in _OPERATION)), None)
    axes = re.findall(r"U:\(?([\w,]+)", text)
    axes = {axis for group in axes for axis in group.split(",") if axis}
    operation = (
        found.group(1) if found else "mul" if "bilinear" in text or "should be reduced" in text else "an operation"
    )
    raise PendingSumError(refusal(operation, axes, line, bindings)) from error


def _raise_of_left(error: Exception, place: str, left: Collection[str]) -> None:
    """Puts into our words that JAX's types refuse an operation on slices along mesh axes that are left; lets others
    pass. These types have no partial sums and copies."""
    if left and (refuses_slices(error) or "out_sharding" in str(error)):
        raise MeshError(
            "JAX can compute an operation on slices along a mesh axis that is left to the surrounding program only if "
            f"it knows how the result is sliced, got one where it does not ({shortened(str(error), 240)}), in {place}: "
            f"jax.reshard the array first, pass out_sharding, or add {' and '.join(map(repr, sorted(left)))} to the "
            "axes of shard_map"
        ) from error


def among_groups(operation: str, line: str, bindings: Bindings) -> str:
    """The text of a refusal of a collective after which devices are not alike along its mesh axis."""
    return (
        f"a collective must run along whole mesh axes, got {operation} with axis_index_groups, in "
        f"`{bindings.function}`{line}: split that axis of the mesh in two, and use one of them"
    )


def not_along(name: str, function: str, mesh) -> str:
    """The text of a refusal of a collective of JAX's along an axis that is not manual."""
    if name in mesh.axis_names:
        return (
            f"a collective must run along manual axes, got '{name}', which is left to the surrounding program, in "
            f"`{function}`: leave it out (a sum over a dimension that '{name}' slices is whole there), or add "
            f"'{name}' to the axes of shard_map"
        )
    return (
        f"a collective must run along axes of the mesh ({mesh_text(mesh)}), got {name!r}, in `{function}`: "
        f"{did_you_mean(name, mesh.axis_names)}"
    )


def none_manual(function: str, mesh, asked: Collection[str]) -> str:
    """The text of a refusal of a call of `shard_map` that makes no mesh axis manual."""
    if not asked:
        return (
            f"a manual function must make mesh axes manual, got axes of none, in `{function}`: name some of "
            f"{', '.join(mesh.axis_names)}, or leave axes out for all of them"
        )
    return (
        f"a mesh axis cannot become manual twice, got a call where all of ({mesh_text(mesh)}) are manual, in "
        f"`{function}`: remove its @shard_map, or call its `__wrapped__`"
    )


def no_permutation(pairs: Sequence, count: int) -> str | None:
    """What is wrong with the pairs of devices that a permute sends from and to, of `count` along its mesh axes."""
    for each in zip(*pairs):
        if wrong := [d for d in each if not isinstance(d, int | np.integer) or not -count <= d < count]:
            return f"{wrong[0]}, which is none of {count} devices"
        if twice := [d for d, times in collections.Counter(d % count for d in each).items() if times > 1]:
            return f"device {twice[0]} twice in {tuple(each)}"
    return None


def raise_of_call(error: Exception, name: str, mesh, left: Collection[str] = ()) -> None:
    """Puts what JAX says of a whole call, after its body was traced, into our words; lets any other error pass.

    Args:
        error: from `jax.shard_map`, also where the call is differentiated or mapped.
        name: of the function.
        mesh: that it runs on.
        left: the mesh axes that are left to the surrounding program.
    """
    if isinstance(error, TrellisError):
        return
    text = str(error)
    _raise_of_left(error, f"`{name}`", left)
    if refuses_copies(error):
        raise NotationError(
            "JAX cannot map over a manual function with a pending sum or a copy in its annotations, got one under "
            f"vmap, in `{name}`: settle it inside, write the mapped dimension in its annotations and texts, or use "
            "jax.lax.map"
        ) from error
    if isinstance(error, NotImplementedError) and "Closing over" in text:
        raise TypeMismatch(
            f"a manual function must receive its arrays as arguments, got one from outside it, in `{name}`: pass it "
            f"as an annotated argument ({text.split('Got input with ')[-1]})"
        ) from error
    if isinstance(error, TypeError) and "incompatible shapes for broadcasting" in text:
        raise TypeMismatch(
            "arrays in manual mode must broadcast by their sizes on a device, got "
            f"{text.splitlines()[0].split('broadcasting: ')[-1].rstrip('.')}, in `{name}`: reshard one of them, or "
            "correct the annotation that says how it is sliced"
        ) from error
    if isinstance(error, ValueError) and "of type `Explicit`" in text:  # JAX 0.10: all of type; 0.12: that is of type
        raise MeshError(
            f"pending sums and copies need explicit mesh axes, got ({mesh_text(mesh)}) with auto ones, in `{name}`: "
            "make the mesh without axis_type, or use jax.lax.psum inside"
        ) from error
    _raise_of_a_largest(error, name)
    if _OF_A_COPY.search(text):
        raise _of_a_copy(name) from error


def _raise_of_a_largest(error: Exception, name: str) -> None:
    """Says what to write for the derivative of a largest value over devices, which JAX has not."""
    if found := re.search("Differentiation rule for '(pmax|pmin)' not implemented", str(error)):
        raise TypeMismatch(
            f"JAX cannot differentiate a largest or smallest value over devices, got jax.lax.{found[1]}, in `{name}`: "
            f"give it jax.lax.stop_gradient(values) if the result does not depend on it, as a softmax does not, or "
            "gather the values and compare them on each device"
        ) from error


def raise_of_gradient(error: Exception, name: str) -> None:
    """Puts what JAX says when it differentiates a manual function into our words; lets any other error pass."""
    text = str(error)
    if (wrong := _of_a_rule(text, f"`{name}`")) is not None:
        raise wrong from error
    _raise_of_a_largest(error, name)
    wanted = found[1] if (found := re.search(r"Expected cotangent type (.*) but got", text)) else ""
    if re.search(r"\bR:", wanted):
        raise TypeMismatch(
            "JAX can only differentiate sums and rearrangements of a pending sum '+x', got another operation on one "
            f"(such as `where`), in `{name}`: settle it first"
        ) from error
    if re.search(r"\bU:", wanted) or re.search("reduced rule for .* not implemented", text):
        raise _of_a_copy(name) from error


def _of_a_rule(text: str, place: str) -> TypeMismatch | None:
    """What JAX says of a custom backward rule, in our words."""
    rule = re.search(r"bwd rule produced an output of type (\S+) corresponding to an input of type (\S+), so", text)
    if rule is None:
        return None
    given, wanted = map(_varying, rule.groups())
    axes = _axes(wanted ^ given)
    fix = (
        f"return jax.lax.pcast(gradient, {axes}, to='varying'), and leave out a sum that JAX makes itself"
        if wanted - given
        else f"return jax.lax.psum(gradient, {axes}), or pass jax.lax.pcast(argument, {axes}, to='varying')"
    )
    return TypeMismatch(
        "a custom backward rule must return a gradient that differs between devices as its argument does, got "
        f"{rule[1]} for {rule[2]}, in {place}: {fix}"
    )


def _varying(kind: str) -> set[str]:
    """The mesh axes along which an array differs, by its type as JAX writes it."""
    return {axis for group in re.findall(r"V:\(?([\w,]+)", kind) for axis in group.split(",") if axis}


def _axes(axes: Collection[str]) -> str:
    """Mesh axes as a tuple of Python's."""
    return str(tuple(sorted(axes)))


def _of_a_copy(name: str) -> TypeMismatch:
    return TypeMismatch(
        "JAX can only differentiate products and sums of a copy '~x', got another operation on one (such as a norm, "
        f"`where`, flip or tanh), in `{name}`: do it before the reshard to '~'"
    )


def refusal(operation: str, axes, line: str, bindings: Bindings) -> str:
    """The text of a refusal, with the missing `reshard`."""
    candidates = [s for s in dict.fromkeys(bindings.pending) if not axes or set(axes) & set(s.pending)]
    axes = axes or {a for s in candidates for a in s.pending}
    along = f" along {', '.join(sorted(axes))}" if axes else ""
    fixes = " or ".join(f'reshard("{s} -> {settled(s, axes)}", ...)' for s in candidates[-3:])
    if operation in ("add", "add_any", "sub") and candidates:
        last = candidates[-1]
        fixes += f', or reshard("{settled(last, axes)} -> {last}", ...) of what it is added to,'
    return (
        f"a pending sum can only be added to sums pending over the same axes, reshaped or settled, got {operation} of "
        f"a sum pending{along}, in `{bindings.function}`{line}: write {fixes or 'a reshard that settles it'} first"
    )


def settled(shape: Shape, axes=None) -> Shape:
    """The shape without its pending sums (only those over `axes`, if given)."""
    rest = tuple(a for a in shape.pending if axes and a not in axes)
    return Shape(shape.dims, rest, shape.copied, shape.ellipsis)


def eqn_line(eqn) -> str:
    """Where the user's code made an equation, as ` (file.py:12: the line)`."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    for frame in frames:
        if not in_a_library(frame.file_name):
            return _line(frame.file_name, frame.line_num)
    return ""


def error_line(error: BaseException) -> str:
    """Where the user's code was when an error was raised, in the same form."""
    frame = users_line(error)
    return _line(frame.filename, frame.lineno) if frame else ""


def located(error: Exception) -> str:
    """An error's text with the line of the user's program in its place: `rule, got values, in place (line): fix`."""
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
