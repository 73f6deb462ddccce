"""`reshard` in manual mode: each step of a transition as a `jax.lax` collective."""

import math

import jax

from trellis.mesh.manual import ops
from trellis.mesh.manual.refusals import settled
from trellis.mesh.manual.single import single_axes, typed_as
from trellis.notation import Shape, TypeMismatch, typeof
from trellis.notation.binding import bind_shape, check_divides, left_axes, live, partly_manual, real_axes
from trellis.notation.state import state_of
from trellis.notation.transition import Step, plan


class TransitionError(TypeMismatch):
    """A transition that no collective performs, or that does not fit the value it is applied to."""


def manual_reshard(before: Shape, after: Shape, x):
    """Moves one device's slice from one sharding to another, inside `shard_map`.

    Args:
        before: what `x` is; held against its JAX type and the names bound so far in this call.
        after: the same dimensions, elsewhere.
        x: a plain array, one device's slice.

    Raises:
        TransitionError: `x` is not what `before` says, or there is no such collective.
        TypeMismatch: a name has another length in this call.
        NotationError: a mesh axis does not divide its dimension.
    """
    where = f"reshard('{before} -> {after}')"
    mesh = jax.sharding.get_abstract_mesh()
    known_axes((before, after), mesh, where)
    _check_manual((before, after), mesh, where)
    bindings = live()
    bind_shape(before, x, where, bindings)
    written = before, after
    before, after = real_axes(before, mesh), real_axes(after, mesh)
    mentioned = {a for s in (before, after) for a in (*s.mesh_axes, *s.pending, *s.copied)}
    x = check_slice(x, before, where, mentioned=mentioned)
    if x.dtype == bool and set(before.pending) - set(after.pending):
        raise TransitionError(
            f"only numbers can be summed over devices, got {typeof(x)}, in {where}: cast the summed values to int32, "
            "and compare the sum with 0"
        )
    if bindings is not None and written[0].pending and written[0] in bindings.pending:
        bindings.pending.remove(written[0])
    shape = _whole(before, x, mesh)
    for dim, size in zip(after.dims, shape, strict=True):
        check_divides(dim.name, size, dim.axes, mesh.shape, where)
    steps = plan(before, after)
    if not x.size and steps:
        x, steps = ops.empty(x, _part(after, shape, mesh), before, after), []
    for step in steps:
        # The ledger reads the names off this scope: JAX's types have none.
        with jax.named_scope(f"reshard[{step.before} -> {step.after}]"):
            x = _perform(step, x, where)
    x = typed_as(x, *written)
    return x if bindings is None else bindings.made(x, after)


_LEFT = "the left side of a text must describe the array"


def check_slice(x, shape: Shape, where: str, rule: str = _LEFT, mentioned: set[str] | None = None):
    """Checks a slice's manual type against a shape, and types it as differing along the axes that slice it.

    Args:
        mentioned: the mesh axes of the whole text. Along others the value may differ: a dimension that they slice may
            have been scanned or mapped away. None for all.

    Raises:
        TransitionError: a sum is pending, a copy is made or a value differs along an axis, and the text says nothing.
    """
    bindings = live()
    if bindings is not None and (known := bindings.held(x, shape)) is not None:
        raise TransitionError(
            f"{rule}, got a slice '{known}' for '{shape}', in {where}: write '{known}', or reshard it from there"
        )
    single = bindings is not None and bindings.single
    x = x if single else ops.without_single_axes(x)
    state = state_of(x)
    sliced, states = {*shape.mesh_axes, *(single_axes() if single else ())}, {*shape.pending, *shape.copied}
    if partly_manual():  # a type does not tell partial sums from slices, but both differ from device to device
        extra = state.varying - sliced - states
        same = set(shape.pending) - state.varying
        wrong = (set(shape.pending), set(shape.pending) - same, "+", "pending") if same else None
    else:
        extra = state.varying - sliced
        wrong = next(
            (
                (said, held, sign, what)
                for said, held, sign, what in (
                    (set(shape.pending), set(state.pending), "+", "pending"),
                    (set(shape.copied), set(state.copied), "~", "copied"),
                )
                if said != held
            ),
            None,
        )
    if wrong:
        said, held, sign, what = wrong
        seen = f"{what} along {', '.join(sorted(held))}" if held else f"not {what} along {', '.join(sorted(said))}"
        fix = f"write {' '.join(sign + axis for axis in sorted(held)) or f'no {sign}{sorted(said)[0]}'} there"
        if sign == "+" and said - held and said - held <= state.varying:
            # To JAX's types, what each device multiplies or sums by itself is no part of a sum.
            fix += f"; if these are partial sums, make them with einsum('... -> ... +{sorted(said - held)[0]}', ...)"
        elif sign == "+" and (
            lost := [s for s in (bindings.pending if bindings else ()) if (said - held) & set(s.pending)]
        ):
            # JAX lets some nonlinear operations through, and takes their result for the whole.
            before = " or ".join(f'reshard("{s} -> {settled(s, said - held)}", ...)' for s in lost[-3:])
            fix += f"; if an operation took a sum that is pending there, settle it before that: {before}"
        raise TransitionError(f"{rule}, got {typeof(x)}, which is {seen}, for '{shape}', in {where}: {fix}")
    if extra := extra if mentioned is None else extra & mentioned:
        raise TransitionError(
            f"{rule}, got {typeof(x)}, which differs along "
            f"{', '.join(sorted(extra))}, for '{shape}', in {where}: write which dimension '{sorted(extra)[0]}' "
            f"slices, or '+{sorted(extra)[0]}' if these are partial sums that einsum made"
        )
    return ops.vary(x, tuple(a for a in shape.mesh_axes if a in jax.sharding.get_abstract_mesh().manual_axes))


def known_axes(shapes, mesh, where: str) -> None:
    """Refuses mesh axes that the mesh does not have."""
    for shape in shapes:
        for axis in (*shape.mesh_axes, *shape.pending, *shape.copied):
            if axis not in mesh.shape:
                raise TransitionError(
                    f"a text can only name axes of the mesh, got '{axis}' where the mesh has "
                    f"{', '.join(mesh.axis_names)}, in {where}: use one of these, or add '{axis}' to the mesh (size 1 "
                    "will do)"
                )


def refuse_left(shapes, where: str) -> None:
    """Refuses pending sums and copies over mesh axes that are left to the surrounding program."""
    left = left_axes()
    for sign, axis in ((s, a) for shape in shapes for s in "+~" for a in (shape.pending if s == "+" else shape.copied)):
        if axis in left:
            raise TransitionError(
                f"a text cannot have states of a mesh axis that is left to the surrounding program, which makes these "
                f"sums itself, got '{sign}{axis}', in {where}: remove it, or add '{axis}' to the axes of shard_map"
            )


def _check_manual(shapes, mesh, where: str) -> None:
    for axis in {a for s in shapes for a in (*s.mesh_axes, *s.pending, *s.copied)} - set(mesh.manual_axes):
        states = [_state(shape, axis) for shape in shapes]
        if states[0] != states[1]:
            raise TransitionError(
                f"manual mode can only move data over its own mesh axes, got '{axis}', which is left to the "
                f"surrounding program, in {where}: reshard over '{axis}' outside, or add it to the axes of shard_map"
            )


def _state(shape: Shape, axis: str):
    if axis in shape.pending or axis in shape.copied:
        return "+" if axis in shape.pending else "~"
    return next(((i, dim.axes.index(axis)) for i, dim in enumerate(shape.dims) if axis in dim.axes), None)


def _whole(shape: Shape, x, mesh) -> list[int]:
    manual = mesh.manual_axes
    return [
        size * math.prod(mesh.shape[a] for a in dim.axes if a in manual)
        for dim, size in zip(shape.dims, x.shape, strict=True)
    ]


def _part(shape: Shape, sizes: list[int], mesh) -> tuple[int, ...]:
    """The sizes of one device's slice."""
    parts = (math.prod(mesh.shape[a] for a in dim.axes if a in mesh.manual_axes) for dim in shape.dims)
    return tuple(size // part for size, part in zip(sizes, parts, strict=True))


def _perform(step: Step, x, where: str):
    match step.kind:
        case "all-gather":
            return ops.gather(x, step.dim, step.axes, copied=step.axes[0] in step.after.copied)
        case "reduce-scatter":
            return ops.scatter(x, step.dim, step.axes)
        case "all-reduce":
            return ops.reduce(x, step.axes)
        case "all-to-all":
            return ops.exchange(x, step.dim, step.to, step.axes)
        case "permute":
            before, after = (s.dims[step.dim].axes[-len(step.axes) :] for s in (step.before, step.after))
            return ops.permute(x, before, after)
        case "slice":
            return ops.cut(x, step.dim, step.axes, copied=step.axes[0] in step.before.copied)
    return _cast(step, x, where)


def _cast(step: Step, x, where: str):
    before, after = step.before, step.after
    made = sorted(set(after.pending) - set(before.pending))
    if any(axis in (*before.mesh_axes, *before.copied) for axis in made):
        raise TransitionError(
            f"only a product or a sum over a sliced dimension can make a pending sum, got '{before} -> {after}', in "
            f"{where}: remove '+{made[0]}' on the right"
        )
    if dropped := sorted(set(before.copied) - set(after.copied)):
        raise TransitionError(
            f"a copy ~{dropped[0]} is already whole on each device and cannot be cast back, got '{before} -> "
            f"{after}', in {where}: use the value from before the cast to ~{dropped[0]}"
        )
    x = ops.begin(x, tuple(made)) if made else x
    copied = tuple(sorted(set(after.copied) - set(before.copied)))
    return ops.copy(x, copied) if copied else x
