"""Where operands go: the rules of a layout, in one place.

For an operation over the names N (those of all operands together):

1. `compute` assigns mesh axes to N, earlier entries first.
2. Every operand is moved to agree. Along mesh axes that slice names it lacks,
   it is held as copies, whose gradient is a pending sum (`~`). So a gathered
   parameter's gradient arrives as one reduce-scatter, and an activation's as
   one all-reduce. Each operation moves its own operands. An array that feeds
   several products is moved once if the program says so, with `dot_each`; a
   table that is looked up and multiplied, with `nn.tied`.
3. The result of a product holds pending sums over the mesh axes of the names
   that it sums; they are settled to what `compute` gives the result.
"""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from trellis._compat import is_tracer, mapped_over
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import current_layout
from trellis.mesh.meshes import MeshError
from trellis.mesh.reshard import place, reshard
from trellis.named import backend
from trellis.named.arguments import shown
from trellis.named.array import NamedArray, asking, notice
from trellis.named.axis import NamesError
from trellis.named.operand import on_mesh, refuse_dealt, types_of
from trellis.notation import Shape, spec_of, typeof
from trellis.notation.binding import check_divides
from trellis.notation.state import sharding_on, state_of

Assignment = dict[str, tuple[str, ...]]


def assign(operands: list[NamedArray], names: tuple[str, ...]) -> Assignment | None:
    """The mesh axes of each name in an operation, or None if nothing is to be placed."""
    modes = {state_of(x.array).mode for x in operands}
    if "manual" in modes:
        return from_slices(operands, names)
    layout = current_layout()
    if layout is not None and modes != {"none"}:
        return dict(zip(names, layout.assign(names), strict=True))
    if "explicit" in modes:
        return _from_types(operands, names)
    return None


def _from_types(operands, names) -> Assignment:
    """The assignment without a layout, from the operands' types: the first to slice a name wins, mapped axes aside."""
    found: Assignment = {}
    used = set(mapped_over())
    for x in operands:
        sizes = jax.typeof(x.array).sharding.mesh.shape
        for name, axes in zip(x.names, state_of(x.array).axes, strict=True):
            axes = tuple(a for a in axes if sizes[a] > 1)
            if axes and name not in found and not used.intersection(axes):
                found[name] = axes
                used |= set(axes)
    return {name: found.get(name, ()) for name in names}


def from_slices(operands: list[NamedArray], names: tuple[str, ...]) -> Assignment:
    """In manual mode, the operands' own slices, which have to agree."""
    found: Assignment = {}
    for x in operands:
        for dim in x.dims:
            if found.setdefault(str(dim.name), dim.axes) != dim.axes:
                raise NamesError(
                    f"in manual mode a name must be sliced the same way in all operands, got {dim.name} over "
                    f"{'/'.join(found[str(dim.name)]) or 'nothing'} and over {'/'.join(dim.axes) or 'nothing'} in "
                    f"{types_of(operands)}: reshard one of them"
                )
    return {name: found.get(name, ()) for name in names}


def missing_axes(x: NamedArray, where: Assignment) -> frozenset[str]:
    """The mesh axes that slice names which `x` does not have."""
    return frozenset(axis for name, axes in where.items() if name not in x.names for axis in axes)


def bring(x: NamedArray, where: Assignment | None) -> NamedArray:
    """An operand as an operation wants it (rule 2)."""
    if where is None:
        return x
    return move(x, tuple(where[name] for name in x.names), missing_axes(x, where))


def outside(x: NamedArray) -> frozenset[str]:
    """Inside a mapped program, the mesh axes of each map that slices this array: a parameter from outside."""
    layout, state = current_layout(), state_of(x.array)
    if layout is None or state.mode != "explicit":
        return frozenset()
    own = {a for mine in state.axes for a in mine}
    return frozenset(a for group in layout.mapped if own.intersection(group) and _has_devices(group) for a in group)


def _mapped(layout, x: NamedArray) -> frozenset[str]:
    """The mesh axes of the maps around this code, for an array that has a gradient."""
    if layout is None or state_of(x.array).mode != "explicit" or not jnp.issubdtype(x.dtype, jnp.inexact):
        return frozenset()
    return frozenset(a for group in layout.mapped if _has_devices(group) for a in group)


def _has_devices(group: tuple[str, ...]) -> bool:
    """Whether `mapped_name` says here which device computes: not in a user's own `jax.vmap` or backward rule."""
    try:
        jax.lax.axis_size(mapped_name(group))
    except NameError:
        return False
    return True


def mapped_name(axes: tuple[str, ...]) -> str:
    """What `vmap` calls the dimension whose positions are the devices along these mesh axes."""
    return f"mapped over {'/'.join(axes)}"


def _on_each_device(x: NamedArray, axes: frozenset[str]) -> NamedArray:
    """The same values, as a value that is mapped over these mesh axes, whatever its origin."""
    for group in current_layout().mapped:
        if axes.intersection(group):  # `outside` has found them
            device = jax.reshard(jax.lax.axis_index(mapped_name(group)), spec_of(()))
            # The compiler drops a factor of one; this way every derivative of the array is mapped, too.
            x = x.with_array(x.array * (1 - 0 * device).astype(x.dtype))
    return x


def of_each_device(x: NamedArray) -> NamedArray:
    """Inside a mapped program, a value from outside that is differentiated there: whole, and each device's own, so that
    its gradient is, too. Anything else stays as it is."""
    layout = current_layout()
    if layout is None or not layout.mapped or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    elsewhere = state_of(x.array).mode == "none"
    x = x.with_array(on_mesh(x.array, x.names, "grad"))
    axes = _mapped(layout, x) if elsewhere else outside(x)
    if not axes:
        return x
    kept = tuple(tuple(a for a in mine if a not in axes) for mine in state_of(x.array).axes)
    return _on_each_device(move(x, kept, frozenset()), axes)


def kept_by_each_device(x: NamedArray) -> NamedArray:
    """Inside a mapped program, a whole value as each device's own. Beside each row's values, in an operation that takes
    no copies, the gradient of one from outside is so summed on each device first, and then over devices."""
    axes = _mapped(current_layout(), x)
    return _on_each_device(x, axes) if axes else x


def bring_to_product(x: NamedArray, where: Assignment | None, other: NamedArray) -> NamedArray:
    """An operand as a product wants it; inside a mapped program, also beside a parameter from outside.

    Such a parameter is whole to the program. Along the mapped mesh axes that slice it at rest it is held as copies, for
    a product with what each device has of its own. For a product with another such parameter it is only gathered.

    Args:
        other: the other operand, where it came from.
    """
    if where is None:
        return x
    layout = current_layout()
    if layout is None and state_of(x.array).mode == "none" and any(where[n] for n in x.names):
        raise MeshError(
            f"a product needs arrays of one mesh, got {typeof(x)}, which is on none, beside one that is sliced over "
            f"{', '.join(a for n in x.names for a in where[n])}, while no layout is in force: call it inside `with "
            "layout:`, which puts it there"
        )
    mine, theirs = outside(x), outside(other)
    missing = missing_axes(x, where)
    if not mine and (own := theirs or (missing and _mapped(layout, x))):
        # For copies along mesh axes other than the mapped ones, each device's own gradient is settled along these
        # first.
        x = _on_each_device(x, own)
    if mine and not theirs and (rest := _mapped(layout, x) - mine):
        # Maps in each other, of which not all slice it at rest: its gradient is a sum over those too.
        x = _on_each_device(x, rest)
    copied = frozenset() if theirs else mine
    return move(x, tuple(where[name] for name in x.names), missing | copied)


def from_product(result: NamedArray, x: NamedArray, y: NamedArray) -> NamedArray:
    """The product of two operands as they came, with a gradient that is mapped where `bring_to_product` makes copies,
    even if it is taken inside the mapped program and begins with a constant."""
    if state_of(result.array).pending or bool(mine := outside(x)) == bool(theirs := outside(y)):
        return result
    return _on_each_device(result, mine | theirs)


def move(x: NamedArray, axes, copied: frozenset[str]) -> NamedArray:
    """An array at the given mesh axes, held as copies over `copied` if it has a gradient."""
    state = state_of(x.array)
    if state.mode in ("none", "manual"):
        return x
    copied -= state.pending
    if not jnp.issubdtype(x.dtype, jnp.inexact) or state.mode == "auto":
        copied = frozenset()
    if state.mode == "explicit" and (axes, copied, frozenset()) == (state.axes, state.copied, state.pending):
        return x
    return NamedArray(_gather(x, axes, copied), x.names)


def _gather(x: NamedArray, axes, copied):
    layout, array, held = current_layout(), x.array, state_of(x.array).axes
    if layout is not None and layout.gather == "per_axis" and copied:
        # Each has a reduce-scatter of its own in the backward pass. Minor axes and last dimensions come first, as in
        # `place`: compilers copy slices that come together along any dimension but the first, and copy less while more
        # of the array is still elsewhere.
        gathered = [a for mine in held for a in mine if not any(a in each for each in axes)]
        for axis in reversed(gathered):
            now = state_of(array)
            step = tuple(tuple(a for a in each if a != axis) for each in now.axes)
            array = place(array, step, (), now.copied | copied.difference(gathered) | ({axis} & copied), names=x.names)
    return place(array, axes, (), copied, names=x.names)


def settle(x: NamedArray) -> NamedArray:
    """Moves an array to where `compute` has its names; pending sums are summed on the way.

    Without a layout, and in manual mode, they are summed, and nothing else moves.

    Names: those of `x`.
    Gradient: an all-gather where a sum was scattered, else nothing moves.
    Moves: an all-reduce of a pending sum, a reduce-scatter where the layout slices the result over that mesh axis.

    Raises:
        NamesError: `x` is not a named array.
    """
    if not isinstance(x, NamedArray):
        raise NamesError(f"settle takes a named array, got {shown(x)}, in settle: name its dimensions with named(...)")
    if asking:
        notice(x)
    if state_of(x.array).mode == "manual" and state_of(x.array).pending:
        return reshard(f"{x.type} -> {Shape(x.type.dims, (), x.type.copied)}", x)
    return to_layout(x)


def to_layout(x: NamedArray) -> NamedArray:
    """`settle` for a result; in manual mode, where the text says what moves, it stays as it is."""
    layout = current_layout()
    if layout is not None and state_of(x.array).mode == "none":
        x = x.with_array(on_mesh(x.array, x.names, "settle"))
    state = state_of(x.array)
    if state.mode in ("none", "manual"):
        return x
    if layout is None:
        return NamedArray(place(x.array, state.axes, (), state.copied, names=x.names), x.names) if state.pending else x
    return NamedArray(place(x.array, layout.assign(x.names), names=x.names), x.names)


def settle_selected(x: NamedArray, names: tuple[str, ...]) -> NamedArray:
    """`to_layout` for a result that has positions selected along names: it is whole along a name if mesh axes do not
    divide the new size."""
    layout = current_layout()
    if layout is None or state_of(x.array).mode in ("none", "manual"):
        return to_layout(x)
    sizes = layout.mesh.shape
    axes = [
        mine if n not in names or x.shape[n] % math.prod(sizes[a] for a in mine) == 0 else ()
        for n, mine in zip(x.names, layout.assign(x.names), strict=True)
    ]
    return NamedArray(place(x.array, tuple(axes), names=x.names), x.names)


def whole(x: NamedArray, names: tuple[str, ...], what: str, by_order: tuple[str, ...] | None = None) -> NamedArray:
    """Gathers the given axes, for operations that JAX refuses on a sliced dimension.

    Args:
        by_order: those of them along which the operation depends on the order; all if not given.

    Raises:
        NamesError: the layout is strict, or has positions dealt out and the operation goes by their order.
    """
    state, layout = state_of(x.array), current_layout()
    refuse_dealt(names if by_order is None else by_order, what, x)
    sliced = [n for n, axes in zip(x.names, x.slices or state.axes, strict=True) if axes and n in names]
    if not sliced:
        return x
    if state.mode == "manual" or (layout is not None and layout.strict):
        raise NamesError(
            f"{what} needs the whole of '{sliced[0]}', got {typeof(x)}"
            f"{'' if state.mode == 'manual' else ' under a strict layout'}: reshard it first"
        )
    axes = tuple(() if n in names else mine for n, mine in zip(x.names, state.axes, strict=True))
    return NamedArray(place(x.array, axes, state.pending, state.copied, names=x.names), x.names)


def refuse_slices(operands: Iterable[NamedArray | None], names: tuple[str, ...], what: str) -> None:
    """In a manual program, refuses slices with which a device cannot compute by itself.

    For what computes on plain arrays: other operations ask `from_slices` and `whole` of their own.

    Args:
        operands: all of them; None for those that are not given.
        names: along which every device needs the whole. Others are sliced alike in all operands.

    Raises:
        NamesError: one of these names is sliced, or another differently.
    """
    given = [x for x in operands if x is not None]
    if any(x.slices for x in given):
        for x in given:
            whole(x, names, what)
        from_slices(given, ())


def widen(x: NamedArray, names: tuple[str, ...]):
    """The plain array with all names of an operation in order, of size 1 if `x` does not have them."""
    if x.names == names:
        return x.array
    array = transpose_array(x.array, [names.index(name) for name in x.names])
    return jnp.expand_dims(array, [i for i, name in enumerate(names) if name not in x.names])


def transpose_array(array, places: list[int]):
    """The array with its dimensions at the given places."""
    order = sorted(range(len(places)), key=places.__getitem__)
    return array if order == sorted(order) else jnp.transpose(array, order)


def spread(x: NamedArray, names: tuple[str, ...], where: Assignment | None, sizes: dict[str, int]):
    """The plain array broadcast to all names, of the given sizes."""
    if x.names == names:
        return x.array
    places = [names.index(name) for name in x.names]
    array = transpose_array(x.array, places)
    shape = tuple(sizes[name] for name in names)
    state, spec = state_of(array), None
    if where and state.mode == "explicit":
        mesh = jax.typeof(array).sharding.mesh.shape
        for name in names:
            check_divides(name, sizes[name], where[name], mesh, f"'{'/'.join((name, *where[name]))}'")
        spec = spec_of([where[name] for name in names], state.pending)
    return backend.broadcast(array, shape, spec and sharding_on(array, spec), dims=sorted(places))


def locally(fn, array):
    """Runs a function along whole dimensions of a plain array, whatever slices the others.

    JAX partitions some functions itself, but not their gradients (a sort's, say): so each device runs its own slices.

    Args:
        fn: gives one array or several, with dimensions in the same order; sliced ones keep their sizes.
        array: in any mode.
    """
    state = state_of(array)
    if state.mode != "explicit" or not any(state.axes) or state.pending or state.copied:
        return fn(array)
    spec = spec_of(state.axes)
    return by_device(fn, mesh=own_mesh(array), in_specs=spec, out_specs=spec)(array)


def own_mesh(array):
    """The mesh of an array for `shard_map`, if none is in force: its own, or that of a traced value's type."""
    if not jax.sharding.get_abstract_mesh().empty:
        return None
    own = jax.typeof(array) if is_tracer(array) else array
    return getattr(getattr(own, "sharding", None), "mesh", None)


def one_axis_one_name(where: Assignment, operands: list[NamedArray], what: str) -> None:
    """Checks that in manual mode a mesh axis slices one name; else devices combine unrelated slices.

    Raises:
        NamesError: it slices two.
    """
    owner: dict[str, str] = {}
    for name, axes in where.items():
        for axis in axes:
            if owner.setdefault(axis, name) != name:
                raise NamesError(
                    f"a mesh axis can slice only one name in an operation, got '{axis}' on '{owner[axis]}' and on "
                    f"'{name}' in {types_of(operands)}, in {what}: gather one of them with reshard"
                )
