"""Transitions as collectives on one device's slices, while JAX does not track what varies (`check_vma=False`)."""

import contextlib
import math

import jax
from jax import lax

from trellis.mesh.parts import own_part, with_part
from trellis.mesh.permute import permute, renumbered
from trellis.notation import Dim, Shape
from trellis.notation.state import State
from trellis.notation.transition import Step, plan

Axes = tuple[str, ...]


def moved(x: jax.Array, before: State, after: State, sizes, *, scoped: bool = False) -> jax.Array:
    """Moves one device's part of an array from one sharding to another.

    Args:
        x: what this device holds.
        before, after: where the whole array lies.
        sizes: those of the mesh axes; axes of size 1 move nothing.
        scoped: a name scope around this says the transition in the notation already, for the ledger.
    """
    shapes = [_shape(state, sizes) for state in (before, after)]
    for step in plan(*shapes):
        said = contextlib.nullcontext() if scoped else jax.named_scope(f"reshard[{step.before} -> {step.after}]")
        with said:
            x = _perform(step, x, sizes)
    return x


def _shape(state: State, sizes) -> Shape:
    real = lambda axes: tuple(a for a in axes if sizes[a] > 1)
    dims = tuple(Dim(f"_{i}", real(axes)) for i, axes in enumerate(state.axes))
    return Shape(dims, tuple(sorted(real(state.pending))), tuple(sorted(real(state.copied))))


def _perform(step: Step, x: jax.Array, sizes) -> jax.Array:
    match step.kind:
        case "all-gather":
            return lax.all_gather(x, step.axes, axis=step.dim, tiled=True)
        case "reduce-scatter":
            return lax.psum_scatter(x, step.axes, scatter_dimension=step.dim, tiled=True)
        case "all-reduce":
            return lax.psum(x, step.axes)
        case "all-to-all":
            return lax.all_to_all(x, step.axes, split_axis=step.to, concat_axis=step.dim, tiled=True)
        case "permute":
            before, after = (s.dims[step.dim].axes[-len(step.axes) :] for s in (step.before, step.after))
            return _permuted(x, before, after, sizes)
        case "slice":
            return own_part(x, step.dim, step.axes)
    return _cast(step, x)


def _cast(step: Step, x: jax.Array) -> jax.Array:
    """Leaves copies what they were. As a pending sum, a slice is in its place between zeros (in `a/x -> a +x`, 3 and 4
    of `1 2 3 4` are `0 0 3 4` on the second device), and a value that is whole everywhere is on the first device."""
    made = set(step.after.pending) - set(step.before.pending)
    for dim, (held, kept) in enumerate(zip(step.before.dims, step.after.dims, strict=True)):
        if gone := held.axes[len(kept.axes) :]:
            x = _in_its_place(x, dim, gone)
            made -= set(gone)
    made = tuple(sorted(made))
    if not made:
        return x
    first = lax.axis_index(made) == 0
    return lax.select(lax.broadcast(first, x.shape), x, lax.full_like(x, 0))


def _in_its_place(x: jax.Array, dim: int, axes: Axes) -> jax.Array:
    """A device's slice of a dimension over its last mesh axes, with zeros where the others have theirs."""
    size = x.shape[dim]
    shape = (*x.shape[:dim], size * lax.axis_size(axes), *x.shape[dim + 1 :])
    return with_part(lax.full(shape, 0, x.dtype), x, lax.axis_index(axes) * size, dim)


def _permuted(x: jax.Array, before: Axes, after: Axes, sizes) -> jax.Array:
    """The same slices on other devices: from where `a/x/y` has them to where `a/y/x` does."""
    pieces = range(math.prod(sizes[a] for a in before))
    return permute(x, before, [(p, renumbered(p, after, before, sizes)) for p in pieces])
