"""One verb for communication: `reshard("before -> after", x)`, in all three modes, and its four named forms."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding

from trellis._compat import mapped_over, move
from trellis.errors import TrellisError
from trellis.mesh.landing import on_mesh_in_force
from trellis.mesh.layout import is_dealt
from trellis.mesh.linear import linear
from trellis.mesh.manual import ops
from trellis.mesh.manual.reshard import known_axes, manual_reshard
from trellis.mesh.meshes import mesh_text, same_mesh
from trellis.mesh.route import route
from trellis.notation import Dim, NotationError, Shape, parse_transition, spec_of
from trellis.notation.binding import check_divides
from trellis.notation.state import State, state_of
from trellis.notation.transition import kind_of


class ReshardError(TrellisError, ValueError):
    """A transition that does not fit its array, or a verb that does not fit its transition."""


def reshard(transition: str, x):
    """Moves an array from one sharding to another.

    The text gives both shardings, and both are checked. What moves follows from it:

        a/x -> a          all-gather          (gradient: slice)
        a/x -> a ~x       all-gather          (gradient: reduce-scatter)
        a +x -> a         all-reduce          (gradient: nothing moves)
        a +x -> a/x       reduce-scatter      (gradient: all-gather)
        a/x b -> a b/x    all-to-all          (gradient: all-to-all)
        a -> a/x          slice               (gradient: all-gather)
        a -> a ~x         cast                (gradient: all-reduce)
        a -> a +x         zeros elsewhere     (gradient: nothing moves; in manual mode an all-reduce)

    In explicit mode this is one `jax.reshard` for each collective, in manual
    mode the `jax.lax` collectives themselves, in auto mode a sharding
    constraint (there are no pending sums there). Without a mesh it does nothing.

    Names: those of `x`.
    Gradient: by the table, nothing, an all-gather, an all-reduce, a reduce-scatter or an all-to-all.
    Moves: by the table, nothing, an all-gather, an all-reduce, a reduce-scatter or an all-to-all.

    Args:
        transition: `before -> after`, the same dimensions on both sides.
        x: a plain or a named array.

    Raises:
        ReshardError: `x` is not what `before` says, or lies on another mesh than the one in force.
        NotationError: the text is not a transition.
        NotationError: a mesh axis does not divide its dimension.
    """
    before, after = parse_transition(transition)
    return _reshard(before, after, x, transition)


def all_gather(transition: str, x):
    """Brings slices of a dimension together: `reshard` for a transition such as `a/x -> a` or `a/x -> a ~x`.

    Names: those of `x`.
    Gradient: each device's own slice of it; a reduce-scatter where the result is held as copies (`~x`).
    Moves: an all-gather.

    Raises:
        ReshardError: the transition is another, or `x` is not what it says.
    """
    return _verb("all-gather", transition, x)


def reduce_scatter(transition: str, x):
    """Sums over devices, each of which gets a slice: `reshard` for a transition such as `a +x -> a/x`.

    Names: those of `x`.
    Gradient: an all-gather.
    Moves: a reduce-scatter.

    Raises:
        ReshardError: the transition is another, or `x` is not what it says.
    """
    return _verb("reduce-scatter", transition, x)


def all_reduce(transition: str, x):
    """Sums over devices, all of which get the whole: `reshard` for a transition such as `a +x -> a`.

    Names: those of `x`.
    Gradient: the same on all devices; nothing moves.
    Moves: an all-reduce.

    Raises:
        ReshardError: the transition is another, or `x` is not what it says.
    """
    return _verb("all-reduce", transition, x)


def all_to_all(transition: str, x):
    """Exchanges slices of one dimension for slices of another: `reshard` for a transition such as `a/x b -> a b/x`.

    Names: those of `x`.
    Gradient: an all-to-all, back.
    Moves: an all-to-all.

    Raises:
        ReshardError: the transition is another, or `x` is not what it says.
    """
    return _verb("all-to-all", transition, x)


def _verb(kind: str, transition: str, x):
    before, after = parse_transition(transition)
    kinds = sorted({kind for kind, *_ in kind_of(before, after)})
    if kinds != [kind]:
        name = kind.replace("-", "_")
        raise ReshardError(
            f"{name} can only perform {'an' if kind[0] == 'a' else 'a'} {kind}, got a transition that is "
            f"{', '.join(kinds) or 'nothing'}, in '{transition}': correct the text, or use reshard for any transition"
        )
    return _reshard(before, after, x, transition)


def _reshard(before: Shape, after: Shape, x, transition: str):
    named = hasattr(x, "names") and hasattr(x, "array")
    array = x.array if named else x
    if named:
        _check_names(before, x, transition)
    if not hasattr(array, "dtype"):
        raise ReshardError(
            f"a transition takes an array, got {type(array).__name__}, in reshard('{transition}'): pass one, or "
            "convert it with jnp.asarray(x)"
        )
    if (moved := on_mesh_in_force(array)) is not array:
        if named and (dealt := [name for name in x.names if is_dealt(name)]):
            raise ReshardError(
                f"an array with dealt-out positions must be placed before it is resharded, got '{dealt[0]}' of one on "
                f"no mesh, in reshard('{transition}'): write shard(x, 'compute') first"
            )
        array = moved
    if before.ellipsis:
        before, after = _fill(before, after, array, x.names if named else None)
    state = state_of(array)
    if state.mode == "manual":
        moved = manual_reshard(before, after, array)
        return x.with_array(moved, after) if named else moved
    if state.mode == "none":
        return x
    _check_mesh(array, transition)
    known_axes((before, after), jax.typeof(array).sharding.mesh, f"reshard('{transition}')")
    _check_state(before, state, array, transition)
    moved = place(array, [dim.axes for dim in after.dims], after.pending, after.copied, names=before.names)
    return x.with_array(moved) if named else moved


def _check_mesh(array, transition: str) -> None:
    own, here = jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()
    if not here.empty and not same_mesh(own, here):
        raise ReshardError(
            f"an array must be on the mesh in force, got one of ({mesh_text(own)}) where the mesh in force is "
            f"({mesh_text(here)}), in reshard('{transition}'): move it there first, with shard(x)"
        )


def _check_names(before: Shape, x, transition: str) -> None:
    names = before.names
    if names != (tuple(x.names)[len(x.names) - len(names) :] if before.ellipsis else tuple(x.names)):
        raise ReshardError(
            f"a transition must name the dimensions of its array in order, got '{before.bare()}' for an array with "
            f"'{' '.join(map(str, x.names))}', in reshard('{transition}'): write the array's own names"
        )


def _fill(before: Shape, after: Shape, array, names) -> tuple[Shape, Shape]:
    """Writes out `...`: the leading dimensions keep their sharding."""
    extra = array.ndim - len(before.dims)
    axes = state_of(array).axes
    lead = tuple(Dim(names[i] if names else f"_{i}", axes[i]) for i in range(extra))
    return (
        Shape(lead + before.dims, before.pending, before.copied),
        Shape(lead + after.dims, after.pending, after.copied),
    )


def _check_state(before: Shape, state: State, array, transition: str) -> None:
    if array.ndim != len(before.dims):
        raise ReshardError(
            f"a transition needs one name for each dimension, got {len(before.dims)} names for an array of shape "
            f"{array.shape}, in reshard('{transition}'): write all dimensions, or '...' for leading ones"
        )
    for dim, size in zip(before.dims, array.shape, strict=True):
        if isinstance(dim.name, int) and dim.name != size:
            raise ReshardError(
                f"a literal dimension must match the array's size, got {dim.name} for an array of shape "
                f"{array.shape}, in reshard('{transition}'): write {size}, or a name"
            )
    if state.mode == "auto":
        return
    mesh = jax.typeof(array).sharding.mesh
    axes = [dim.axes for dim in before.dims]
    wanted = (_real_slices(axes, mesh), _real(before.pending, mesh), _real(before.copied, mesh))
    seen = (_real_slices(state.axes, mesh), _real(state.pending, mesh), _real(state.copied, mesh))
    if wanted != seen:
        held = Shape(
            tuple(Dim(d.name, a) for d, a in zip(before.dims, state.axes, strict=True)),
            tuple(sorted(state.pending)),
            tuple(sorted(state.copied)),
        )
        raise ReshardError(
            f"the left side of a transition must describe the array, got an array of type '{held}', in "
            f"reshard('{transition}'): write '{held} -> ...'"
        )


def _real(axes, mesh) -> frozenset[str]:
    return frozenset(axis for axis in axes if mesh.shape[axis] > 1)


def _real_slices(axes, mesh) -> tuple[tuple[str, ...], ...]:
    """Those along which there are several devices."""
    return tuple(tuple(axis for axis in mine if mesh.shape[axis] > 1) for mine in axes)


def place(array, axes, pending=(), copied=(), *, names=None):
    """Moves a plain array (explicit or auto mode) to the given mesh axes and states.

    If more than one collective is needed, sums are settled first and each step is a move of its own (see
    `trellis.mesh.route`). XLA's partitioner finds no good route for a transition of several kinds: it gathers the whole
    array and sends several times the bytes (`benchmarks/transitions.py`).

    If slices go from one mesh axis to another while sums stay pending (or copies, whose gradient is such a sum), they
    are gathered first and cut again afterwards: to the compiler of JAX 0.10.2, partial sums are copies, and it sends
    slices to whichever device has them.

    Args:
        array: any sharding.
        axes: for each dimension the mesh axes that slice it.
        pending, copied: the states of the result.
        names: the dimensions' names, for the ledger and for errors.

    Raises:
        NotationError: a mesh axis does not divide its dimension.
    """
    state = state_of(array)
    if state.mode == "none":
        return array
    mesh, axes = jax.typeof(array).sharding.mesh, tuple(map(tuple, axes))
    if other := [a for mine in axes for a in mine if a not in mesh.shape]:
        raise ReshardError(
            f"an array can only be moved over axes of its own mesh, got '{other[0]}' for one of a mesh with "
            f"{', '.join(mesh.axis_names)}: move it to the mesh in force first, with shard(x) or shard(x, 'compute')"
        )
    axes = _real_slices(axes, mesh)
    pending, copied = _real(pending, mesh), _real(copied, mesh)
    if state.mode == "explicit" and (axes, pending, copied) == (state.axes, state.pending, state.copied):
        return array
    if (pending or copied) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise ReshardError(
            f"only numbers can be pending sums or copies, got {array.dtype} as "
            f"'{'+' if pending else '~'}{sorted(pending or copied)[0]}', in reshard: leave out '+' and '~', since "
            "random keys have neither sums nor gradients"
        )
    names = names or tuple(f"_{i}" for i in range(array.ndim))
    for name, size, mine in zip(names, array.shape, axes, strict=True):
        check_divides(name, size, mine, mesh.shape, f"'{'/'.join((str(name), *mine))}'")
    if state.mode == "explicit" and (pending & state.pending or copied & state.copied) and _changes(state.axes, axes):
        array = place(array, map(_shared, state.axes, axes), state.pending, state.copied, names=names)
        state = state_of(array)
    if state.mode == "auto":
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(axes)))
    if copied - state.copied and (idle := state.copied - copied):
        # Settles the gradient of copies along other axes first: compilers do not turn partial sums into others at once.
        array = _move(array, names, State("explicit", state.axes, state.pending, state.copied - idle), mesh)
        state = state_of(array)
    if array.dtype == bool and state.pending and not pending:
        # XLA ends the process if it knows the booleans that it sums over devices (docs/published-bugs.md, 36).
        return place(array.astype("int32"), axes, pending, copied, names=names) != 0
    real = State(state.mode, _real_slices(state.axes, mesh), state.pending, state.copied)
    for between in _apart(real, axes, pending, copied):
        array = place(array, between.axes, between.pending, between.copied, names=names)
        state = state_of(array)
    settled = _settled(state, axes, pending, array.shape, mesh)
    way = route(settled.axes, axes, array.shape, mesh.shape)
    if state.mode == "explicit" and (len(way) > 1 or way and settled.axes != state.axes):
        for between in (settled.axes, *way[:-1]):
            array = _move(array, names, _between(state, between, settled.pending, copied), mesh)
    return _move(array, names, State("explicit", axes, pending, copied), mesh)


def _move(array, names, after: State, mesh):
    before = state_of(array)
    if before == after:
        return array
    for state in (*_one_by_one(before, after), after):
        with jax.named_scope(text := _scope(names, state_of(array), state)):
            try:
                array = _moved(array, state, mesh)
            except Exception as error:  # the class has no public name
                if "has duplicate entries" not in str(error):
                    raise
                over = ", ".join(sorted(mapped_over()))
                raise ReshardError(
                    "a function under vmap cannot slice over the mesh axes that slice the mapped dimension, got "
                    f"{text} in a vmap over {over}: leave '{over}' out of the text, or reshard the result after the "
                    "vmap"
                ) from error
    return array


def _moved(array, after: State, mesh):
    """`jax.reshard`, also of complex numbers: where these become partial sums, as gradients of copies do, XLA (JAX
    0.10.2) ends the process. So the first device's numbers and the others' zeros are made by hand."""
    before, spec = state_of(array), lambda state: spec_of(state.axes, state.pending, state.copied)
    there = NamedSharding(mesh, spec(after))
    if jax.numpy.issubdtype(array.dtype, jax.numpy.complexfloating):
        if before.copied - after.copied:
            back = lambda _, gradient: place(gradient, before.axes, before.copied, before.pending)
            return linear(lambda _, x: move(x, there), back)((), array)
        if begun := after.pending - before.pending:
            whole = dataclasses.replace(
                before, axes=tuple(tuple(a for a in mine if a not in begun) for mine in before.axes)
            )
            begin = lambda x: ops.begin(x, tuple(sorted(begun)))
            made = dataclasses.replace(whole, pending=whole.pending | begun)
            here = None if not jax.sharding.get_abstract_mesh().empty else mesh
            run = jax.shard_map(begin, mesh=here, in_specs=spec(whole), out_specs=spec(made))
            array = jax.jit(run, inline=True)(move(array, NamedSharding(mesh, spec(whole))))
    return move(array, there)


def _one_by_one(before: State, after: State) -> Iterator[State]:
    """States on the way from slices to partial sums, or back, one mesh axis of a dimension after the other.

    If slices along two axes become partial sums over both at once, XLA's partitioner puts some in the places of other
    devices' slices (docs/published-bugs.md, 28). The gradient of copies that become slices does the same.
    """
    held, pending, copied = list(before.axes), before.pending, before.copied
    for i, (was, now) in enumerate(zip(before.axes, after.axes, strict=True)):
        come, gone = now[len(was) :], was[len(now) :]
        if now[: len(was)] == was and before.copied.intersection(come):
            for count in range(1, len(come)):
                held[i], copied = (*was, *come[:count]), copied.difference(come[:count])
                yield State("explicit", tuple(held), pending, copied)
        elif was[: len(now)] == now and after.pending.intersection(gone):
            for count in range(1, len(gone)):
                held[i], pending = was[:-count], pending | after.pending.intersection(gone[-count:])
                yield State("explicit", tuple(held), pending, copied)


def _apart(state: State, axes, pending, copied) -> Iterator[State]:
    """Where an array lies on the way, if sums land in slices while others are summed, or copies are made of slices.

    Copies are made in the opposite order: their gradient is a sum that lands in the slices.
    """
    if state.mode != "explicit":
        return
    if pending <= state.pending:
        for held, left in _landing(state.axes, axes, state.pending - pending):
            yield State("explicit", held, pending | left, state.copied)
    before, after = ({axis for mine in each for axis in mine} for each in (state.axes, axes))
    made, gathered = copied - state.copied, before - after
    if made and gathered and not after - before:
        landing = [*_landing(axes, state.axes, made)] or [(state.axes, made - gathered)]
        for held, left in reversed(landing):
            yield State("explicit", held, state.pending, state.copied | left)


def _landing(before, after, sums: frozenset[str]) -> Iterator[tuple[tuple, frozenset[str]]]:
    """The slices while partial sums land in them, one dimension after the other, and the sums that are left.

    The sums that land nowhere are the last: then each device has a slice to sum. All at once would be one sum of the
    whole array. Nothing, if slices go elsewhere too, or if one step is all.
    """
    held, left = list(before), sums
    if all(new[: len(old)] == tuple(old) for old, new in zip(before, after, strict=True)):
        for i, new in enumerate(after):
            if new != held[i] and left.difference(new):
                held[i], left = new, left.difference(new)
                yield tuple(held), left


def _settled(state: State, axes, pending, shape, mesh) -> State:
    """Where an array lies once its sums are settled: scattered over a dimension if all of them go there."""
    settled = state.pending - pending
    homes = {i for axis in settled for i in range(len(axes)) if axis in axes[i]}
    held = list(_real_slices(state.axes, mesh))
    if len(homes) == 1 and settled <= set(axes[home := homes.pop()]):
        scattered = (*held[home], *(axis for axis in axes[home] if axis in settled))
        if shape[home] % math.prod(mesh.shape[axis] for axis in scattered) == 0:
            held[home] = scattered
    return State("explicit", tuple(held), state.pending & pending, state.copied)


def _between(state: State, axes, pending, copied) -> State:
    """The state at a step on the way: what has been gathered by then is already held as the copies that it will be."""
    sliced = {axis for mine in axes for axis in mine}
    gathered = {axis for mine in state.axes for axis in mine} - sliced
    return State("explicit", axes, pending, (state.copied - sliced) | (gathered & copied))


def _shared(before, after) -> tuple[str, ...]:
    """The major mesh axes that slice a dimension before and after."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    return tuple(axis for axis, _ in alike)


def _changes(before, after) -> bool:
    """Whether slices go to other devices along mesh axes other than those that they leave."""
    left, come = [], []
    for old, new in zip(before, after, strict=True):
        same = len(_shared(old, new))
        if old[same:] and new[same:]:
            return True
        left += old[same:]
        come += new[same:]
    return bool(left and come) and sorted(left) != sorted(come)


@functools.lru_cache(maxsize=4096)
def _scope(names, before: State, after: State) -> str:
    def shape(state: State) -> Shape:
        return Shape(tuple(map(Dim, names, state.axes)), tuple(sorted(state.pending)), tuple(sorted(state.copied)))

    return scope_name(f"{shape(before)} -> {shape(after)}")


def scope_name(text: str) -> str:
    """The name scope that carries a transition's text into the program, for the ledger."""
    return f"reshard[{text}]"


__all__ = [
    "NotationError",
    "ReshardError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "place",
    "reduce_scatter",
    "reshard",
]
