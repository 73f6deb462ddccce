"""Where operands go: the rules of a layout, in one place.

For an operation over the names N (those of all operands together):

1. `compute` assigns mesh axes to N, earlier entries first.
2. Every operand is moved to agree. Over mesh axes that slice names it lacks it
   is held as copies whose gradient is a pending sum (`~`), so that a gathered
   parameter's gradient arrives as one reduce-scatter, and an activation's as
   one all-reduce however many products it feeds: the moved array is kept with
   the operand and reused.
3. The result of a product holds pending sums over the mesh axes of its
   contracted names; they are settled to what `compute` gives the result.
"""

import jax
import jax.numpy as jnp

from trellis._compat import is_tracer, same_trace
from trellis.mesh.layout import current_layout
from trellis.mesh.reshard import place
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.notation import PendingSumError, Shape, spec_of, typeof
from trellis.notation.state import state_of

Assignment = dict[str, tuple[str, ...]]


def union(operands: list[NamedArray]) -> tuple[str, ...]:
    """All names: those of the operand that has most first, then the others' in order."""
    first = max(operands, key=lambda x: len(x.names))
    names = list(first.names)
    for x in operands:
        names += [name for name in x.names if name not in names]
    return tuple(names)


def check_sizes(operands: list[NamedArray], what: str) -> None:
    """A name has one size in an operation.

    Raises:
        NamesError: with the full types of all operands.
    """
    sizes: dict[str, int] = {}
    for x in operands:
        for name, size in x.shape.items():
            if sizes.setdefault(name, size) != size:
                types = " and ".join(typeof(o) for o in operands)
                raise NamesError(
                    f"a name has one size in an operation, got {name}={sizes[name]} and {name}={size} "
                    f"in {what} of {types}: rename one of them, or slice it"
                )


def assign(operands: list[NamedArray], names: tuple[str, ...]) -> Assignment | None:
    """The mesh axes of each name in an operation, or None where nothing is to be placed."""
    modes = {state_of(x.array).mode for x in operands}
    if "manual" in modes:
        return _from_slices(operands, names)
    layout = current_layout()
    if layout is not None and modes != {"none"}:
        return dict(zip(names, layout.assign(names), strict=True))
    if "explicit" in modes:
        return _from_types(operands, names)
    return None


def _from_types(operands, names) -> Assignment:
    """Without a layout the operands' own types decide, the first that slices a name wins."""
    found: Assignment = {}
    used: set[str] = set()
    for x in operands:
        for name, axes in zip(x.names, state_of(x.array).axes, strict=True):
            if axes and name not in found and not used & set(axes):
                found[name] = axes
                used |= set(axes)
    return {name: found.get(name, ()) for name in names}


def _from_slices(operands, names) -> Assignment:
    found: Assignment = {}
    for x in operands:
        for dim in x.dims:
            if found.setdefault(dim.name, dim.axes) != dim.axes:
                types = " and ".join(typeof(o) for o in operands)
                raise NamesError(
                    f"in manual mode a name is sliced alike in all operands, got {dim.name} over "
                    f"{found[dim.name] or 'nothing'} and over {dim.axes or 'nothing'} in {types}: reshard one of them"
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


def placed(x: NamedArray, where: Assignment) -> NamedArray | None:
    """The operand as `bring` would move it, if it was moved before."""
    return (x._placed or {}).get((tuple(where[name] for name in x.names), missing_axes(x, where)))


def remember(x: NamedArray, where: Assignment, moved: NamedArray) -> None:
    """Keeps a moved operand for the next time it is brought there."""
    _remember(x, (tuple(where[name] for name in x.names), missing_axes(x, where)), moved)


def _remember(x: NamedArray, key, moved: NamedArray) -> None:
    if is_tracer(x.array) and same_trace(x.array, moved.array):
        x._placed = {**(x._placed or {}), key: moved}


def move(x: NamedArray, axes, copied: frozenset[str]) -> NamedArray:
    """An array at the given mesh axes, with copies over `copied` where it has a gradient; moved at most once."""
    state = state_of(x.array)
    if state.mode in ("none", "manual"):
        return x
    copied -= state.pending
    if not jnp.issubdtype(x.dtype, jnp.inexact) or state.mode == "auto":
        copied = frozenset()
    if state.mode == "explicit" and (axes, copied, frozenset()) == (state.axes, state.copied, state.pending):
        return x
    key = (axes, copied)
    if x._placed is not None and key in x._placed:
        return x._placed[key]
    moved = NamedArray(_gather(x, axes, copied), x.names)
    _remember(x, key, moved)
    return moved


def _gather(x: NamedArray, axes, copied):
    layout = current_layout()
    array, held = x.array, state_of(x.array)
    gathered = {a for mine in held.axes for a in mine} - {a for mine in axes for a in mine}
    if gathered and copied - gathered - held.copied:
        # Copies first, where nothing is gathered: the gradient is then scattered over the gathered axes before the
        # rest of it is summed, instead of being summed whole over all of them together.
        array = place(array, held.axes, held.pending, held.copied | (copied - gathered), names=x.names)
        held = state_of(array)
    if layout is None or layout.gather == "joint" or not copied:
        return place(array, axes, (), copied, names=x.names)
    # One mesh axis after the other, minor ones first, each with its own reduce-scatter in the backward pass.
    for axis in [a for mine in held.axes for a in reversed(mine)]:
        now = state_of(array)
        if any(axis in mine for mine in axes):
            continue
        step = tuple(tuple(a for a in mine if a != axis) for mine in now.axes)
        array = place(array, step, (), now.copied | ({axis} & copied), names=x.names)
    return place(array, axes, (), copied, names=x.names)


def settle(x: NamedArray) -> NamedArray:
    """Moves an array to what `compute` says of its names; pending sums are summed on the way."""
    layout = current_layout()
    state = state_of(x.array)
    if layout is None or state.mode in ("none", "manual"):
        return x
    return NamedArray(place(x.array, layout.assign(x.names), names=x.names), x.names)


def whole(x: NamedArray, names: tuple[str, ...], what: str) -> NamedArray:
    """Gathers the given axes, for operations that JAX refuses on a sliced dimension.

    Raises:
        NamesError: the layout is strict.
    """
    state = state_of(x.array)
    sliced = [n for n, axes in zip(x.names, x.slices or state.axes, strict=True) if axes and n in names]
    if not sliced:
        return x
    layout = current_layout()
    if state.mode == "manual" or (layout is not None and layout.strict):
        raise NamesError(
            f"{what} needs the whole of '{sliced[0]}', got {typeof(x)}"
            f"{'' if state.mode == 'manual' else ' under a strict layout'}: reshard it first"
        )
    axes = tuple(() if n in names else mine for n, mine in zip(x.names, state.axes, strict=True))
    return NamedArray(place(x.array, axes, state.pending, state.copied, names=x.names), x.names)


def refuse_pending(x: NamedArray, what: str) -> None:
    """Only linear operations make sense on partial sums.

    Raises:
        PendingSumError: `x` holds some; the message says which reshard was forgotten.
    """
    state = state_of(x.array)
    if state.pending:
        settled = Shape(x.type.dims, (), x.type.copied)
        raise PendingSumError(
            f"{what} is not linear, and each device holds only a partial sum, got {typeof(x)}: "
            f'sum first, with reshard("{x.type} -> {settled}", x)'
        )


def widen(x: NamedArray, names: tuple[str, ...]):
    """The plain array with all names of an operation in order, of size 1 where `x` does not have them."""
    if x.names == names:
        return x.array
    array = transpose_array(x.array, [names.index(name) for name in x.names])
    return jnp.expand_dims(array, [i for i, name in enumerate(names) if name not in x.names])


def transpose_array(array, places: list[int]):
    """The dimensions in the order of the places where they go."""
    order = sorted(range(len(places)), key=places.__getitem__)
    return array if order == sorted(order) else jnp.transpose(array, order)


def spread(x: NamedArray, names: tuple[str, ...], where: Assignment | None, sizes: dict[str, int]):
    """The plain array broadcast to all names, of the given sizes."""
    if x.names == names:
        return x.array
    places = [names.index(name) for name in x.names]
    array = transpose_array(x.array, places)
    shape = tuple(sizes[name] for name in names)
    state = state_of(array)
    spec = spec_of([where[name] for name in names], state.pending) if where and state.mode == "explicit" else None
    return jax.lax.broadcast_in_dim(array, shape, sorted(places), out_sharding=spec)
