"""The collectives of manual mode on one device's slice, each with the gradient that the notation promises.

JAX's own manual types carry `+x` and `~x` if all mesh axes are manual. If some
are left to the surrounding program, both are just "varying" to JAX. Then the
collectives below pair each forward operation with its gradient by hand, and a
pending sum is marked by name for the check in `check.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from trellis.mesh import permute as _permute
from trellis.mesh.linear import linear
from trellis.mesh.parts import own_part
from trellis.notation import Shape
from trellis.notation.binding import live, partly_manual
from trellis.program.reading import OWN_MARK

Axes = tuple[str, ...]

_PENDING, _SETTLED = f"{OWN_MARK}pending ", f"{OWN_MARK}settled "


def mark_pending(x, axes: Axes, shape: Shape | None = None):
    """Types a local result as a partial sum along mesh axes (those of size 1 have nothing to sum).

    Args:
        shape: its type in the notation, for messages about a `reshard` that was forgotten.
    """
    if axes and shape is not None and (bindings := live()) is not None:
        bindings.pending.append(shape)
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = tuple(a for a in axes if sizes[a] > 1)
    x = vary(x, axes)
    if not axes:
        return x
    if partly_manual():
        return checkpoint_name(x, _PENDING + " ".join(axes))
    return lax.pcast(x, axes, to="unreduced")


def _settle(x, axes: Axes):
    return checkpoint_name(x, _SETTLED + " ".join(axes)) if partly_manual() else x


def marked(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The mesh axes along which a name begins and ends a pending sum; empty for names that are not these marks."""
    axes = lambda mark: frozenset(name.removeprefix(mark).split() if name.startswith(mark) else ())
    return axes(_PENDING), axes(_SETTLED)


def without_single_axes(x):
    """Takes mesh axes of size 1 out of a value's type, which a device's index along one brings in."""
    sizes = jax.sharding.get_abstract_mesh().shape
    mat = jax.typeof(x).mat
    for state in (mat.varying, mat.unreduced):
        if single := tuple(a for a in sizes if sizes[a] == 1 and a in state):
            x = lax.psum(x, single)
    return x


def vary(x, axes: Axes):
    """Types a value as differing along mesh axes, if it is not yet: one value on all devices is a legal slice."""
    mat = jax.typeof(x).mat
    missing = tuple(a for a in axes if a not in {*mat.varying, *mat.unreduced})
    for state in (mat.reduced, frozenset(axes) - mat.reduced):  # one cast takes one state
        if group := tuple(a for a in missing if a in state):
            x = lax.pcast(x, group, to="varying")
    return x


def varying_axes(*arrays) -> Axes:
    """The mesh axes along which any of the arrays differs, sorted."""
    return tuple(sorted(frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))))


def gather(x, dim: int, axes: Axes, *, copied: bool):
    """`a/x -> a` (gradient: slice) and `a/x -> a ~x` (gradient: reduce-scatter)."""
    if not copied:
        return _gather_same(x, dim, axes)
    if partly_manual():
        return _gather_varying(x, dim, axes)
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="reduced")


def reduce(x, axes: Axes):
    """`a +x -> a`: all-reduce (gradient: nothing moves)."""
    return lax.psum(_settle(x, axes), axes)


def scatter(x, dim: int, axes: Axes):
    """`a +x -> a/x`: reduce-scatter (gradient: all-gather)."""
    if partly_manual():
        return _scatter_varying(_settle(x, axes), dim, axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def exchange(x, whole: int, sliced: int, axes: Axes):
    """`a/x b -> a b/x`: all-to-all (gradient: the all-to-all back)."""
    return lax.all_to_all(x, axes, split_axis=sliced, concat_axis=whole, tiled=True)


def cut(x, dim: int, axes: Axes, *, copied: bool):
    """`a -> a/x` (gradient: all-gather) and `a ~x -> a/x` (gradient: nothing moves)."""
    return _cut_copied(vary(x, axes), dim, axes) if copied else _cut_same(x, dim, axes)


def permute(x, before: Axes, after: Axes):
    """`a/x/y -> a/y/x`: the same slices on other devices (gradient: the permute back)."""
    sizes, chunks = jax.sharding.get_abstract_mesh().shape, range(lax.axis_size(before))
    return _permute.permute(x, before, [(n, _permute.renumbered(n, after, before, sizes)) for n in chunks])


def copy(x, axes: Axes):
    """`a -> a ~x`: a cast (gradient: all-reduce)."""
    return lax.pcast(x, axes, to="varying" if partly_manual() else "reduced")


def begin(x, axes: Axes):
    """`a -> a +x`: a sum of which one device holds all and the others zeros (gradient: an all-reduce of the copies)."""
    return mark_pending(_only(lax.axis_index(axes), jnp.expand_dims(x, 0), 0).reshape(x.shape), axes)


def empty(x, shape: tuple[int, ...], before: Shape, after: Shape):
    """What a transition makes of an array without elements: XLA neither gathers nor scatters nothing."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    kept = {*varying_axes(x)} - {*before.mesh_axes, *before.pending, *before.copied}
    x = vary(jnp.zeros(shape, x.dtype, out_sharding=_left(x)), tuple({*kept, *after.mesh_axes}.intersection(manual)))
    x = mark_pending(x, after.pending)
    return copy(x, after.copied) if after.copied else x


def _take(x, dim: int, axes: Axes):
    """This device's slice of a value that it holds whole."""
    if not _has_states(x):
        return own_part(x, dim, axes)
    count, index = lax.axis_size(axes), lax.axis_index(axes)
    size = x.shape[dim] // count
    # JAX has no dynamic_slice of pending sums: choose one of all slices, as the sum of it and zeros.
    parts = x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    return jnp.sum(_only(index, parts, dim), dim, dtype=x.dtype)


def _put(x, dim: int, axes: Axes):
    """This device's slice at its place, and zeros elsewhere."""
    count, index = lax.axis_size(axes), lax.axis_index(axes)
    parts = jnp.broadcast_to(jnp.expand_dims(x, dim), (*x.shape[:dim], count, *x.shape[dim:]))
    return _only(index, parts, dim).reshape(*x.shape[:dim], count * x.shape[dim], *x.shape[dim + 1 :])


def _only(index, parts, dim: int):
    """`parts` at one index of a dimension, zero at the others, in the states of `parts`."""
    mat, sharding = jax.typeof(parts).mat, _left(parts)
    chosen = lax.broadcasted_iota(jnp.int32, parts.shape, dim, out_sharding=sharding) == index
    parts = vary(parts, tuple(a for a in jax.typeof(index).mat.varying if a not in mat.varying))
    zeros = vary(jnp.zeros(parts.shape, parts.dtype, out_sharding=sharding), varying_axes(parts))
    if mat.unreduced:
        zeros = lax.pcast(lax.pcast(zeros, tuple(mat.unreduced), to="varying"), tuple(mat.unreduced), to="unreduced")
    if mat.reduced:
        zeros = lax.pcast(zeros, tuple(mat.reduced), to="reduced")
    return lax.select_n(vary(chosen, varying_axes(parts)), zeros, parts)


def _left(x):
    """The sharding over mesh axes that are left to the surrounding program, for making values like `x`."""
    return jax.typeof(x).sharding if partly_manual() else None


def _has_states(x) -> bool:
    mat = jax.typeof(x).mat
    return bool(mat.unreduced or mat.reduced)


def _pair(forward, backward):
    """A linear operation with a gradient for it, since JAX's own would move more or does not know the states."""

    def op(x, dim: int, axes: Axes):
        return linear(lambda _, x: forward(x, dim, axes), lambda _, gradient: backward(gradient, dim, axes))((), x)

    return op


def _gather_invarying(x, dim: int, axes: Axes):
    return lax.all_gather(vary(x, axes), axes, axis=dim, tiled=True, to="invarying")


def _all_gather(x, dim: int, axes: Axes):
    return lax.all_gather(vary(x, axes), axes, axis=dim, tiled=True)


def _sum_scatter(x, dim: int, axes: Axes):
    # JAX 0.10 to 0.12 cannot lower psum_scatter when some mesh axes are left explicit. This moves the same bytes:
    # each device sends every other one its share of the partial sums, and adds up what it receives.
    parts = lax.all_to_all(vary(x, axes)[None], axes, split_axis=dim + 1, concat_axis=0, tiled=True)
    return jnp.sum(parts, 0, dtype=x.dtype)


_gather_same = _pair(_gather_invarying, _take)
# JAX's own gradient of a slice at the device's index is a padded all-reduce.
_cut_same = _pair(_take, _gather_invarying)
_cut_copied = _pair(_take, _put)
_gather_varying = _pair(_all_gather, _sum_scatter)
_scatter_varying = _pair(_sum_scatter, _all_gather)
