"""What every operation requires of its operands: as many names as dimensions, the mesh in force, no pending sums.

One rule holds for arrays that are not on the mesh: a NumPy array, one made before the layout, or one on a single device
counts as whole on every device. The first operation that uses it places it as the layout says for its names (each
device takes its slice, nothing moves), and its gradient is whole, like the array. An array of another mesh is refused.
If no mesh is in force, as after a layout has ended, the mesh is that of the other operands.
"""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import concrete_or_error
from jax.sharding import NamedSharding, SingleDeviceSharding

from trellis._compat import is_tracer
from trellis.mesh.dealing import deal
from trellis.mesh.landing import on_one_device, placed
from trellis.mesh.layout import KEY_POSITIONS, POSITIONS, current_layout, is_dealt
from trellis.mesh.meshes import MeshError, mesh_text, same_mesh
from trellis.mesh.reshard import place, scope_name
from trellis.named.arguments import refuse_keys
from trellis.named.array import NamedArray, asking, check_rank, notice
from trellis.named.axis import NamesError
from trellis.named.part_size import PartSize, by_part
from trellis.notation import Dim, PendingSumError, Shape, spec_of, typeof
from trellis.notation.state import mode_of, state_of


def operand(x, what: str, *, pending: bool = False, copies: bool = True, keys: bool = True) -> NamedArray:
    """An operand, checked and on the mesh in force.

    Args:
        x: what the caller passed.
        what: the operation, for messages.
        pending: whether the operation takes partial sums (it is linear).
        copies: whether its gradient may be a partial sum. If not, the array is no longer held as copies (`~x`), and its
            gradient is settled before it becomes the operand's. A single number is never held as copies: if it is a
            loss, its gradient is one on all devices together, where JAX's is one on each.
        keys: whether random keys may be operands, or JAX itself says clearly that they may not.

    Raises:
        NamesError: not a named array, or one whose array has other dimensions than names, or which holds keys.
        MeshError: an array of another mesh.
        PendingSumError: partial sums in an operation that is not linear.
    """
    refuse_plain((x,), what)
    check_rank(x, what)
    if asking:
        notice(x, what)
    if not keys:
        refuse_keys((x,), what)
    array = on_mesh(x.array, x.names, what)
    x = x if array is x.array else NamedArray(array, x.names, x.slices)
    if not pending:
        refuse_pending(x, what)
    settled = array if copies and x.names else no_copies(array, x.names)
    return x if settled is array else x.with_array(settled)


def refuse_plain(args, what: str) -> None:
    """Refuses what has no names.

    Raises:
        NamesError: something that is no named array.
    """
    for x in args:
        if not isinstance(x, NamedArray):
            raise NamesError(
                f"a named operation takes named arrays, got {typeof(x)} in {what}: name its dimensions with "
                "named(array, '...')"
            )


def refuse_named(args, what: str, instead: str) -> None:
    """Refuses named arrays in a function of plain ones.

    Args:
        args: what the caller passed.
        what: the function, for messages.
        instead: the function that does the same with names.

    Raises:
        NamesError: a named array.
    """
    for x in args:
        if isinstance(x, NamedArray):
            raise NamesError(
                f"a function of plain arrays takes no names, got {typeof(x)} in {what}: use {instead}, or pass its "
                ".array"
            )


def no_copies(array: jax.Array, names: tuple[str, ...] = ()) -> jax.Array:
    """A plain array, no longer held as copies (`~x`): its gradient is settled before it becomes theirs."""
    state = state_of(array)
    if state.mode != "explicit" or not state.copied:
        return array
    return place(array, state.axes, state.pending, names=names)


def refuse_others(args, what: str) -> None:
    """Refuses what is neither an array nor a number: a `Narrow` weight, a list, None.

    Raises:
        NamesError: another object.
    """
    for a in args:
        if isinstance(a, PartSize):
            a.refuse()
        if not hasattr(a, "dtype") and not isinstance(a, numbers.Number):
            raise NamesError(
                f"a named operation takes named arrays and numbers, got {type(a).__name__} in {what}: pass an array "
                "(a Narrow weight can only be a factor of dot, dot_each and einsum; elsewhere, pass its .weight)"
            )


def on_mesh(array, names: tuple[str, ...], what: str) -> jax.Array:
    """A plain array on the mesh in force; one that is on no mesh is placed as the layout says for these names.

    Raises:
        MeshError: it lies on another mesh.
    """
    here = jax.sharding.get_abstract_mesh()
    mode, traced = mode_of(here), is_tracer(array)
    if mode == "none" and traced:
        _refuse_after_its_mesh(array, names, what)
    elif mode == "none" and isinstance(array, jax.Array):
        return _closed_over(array)
    if mode in ("none", "manual"):
        return jnp.asarray(array) if isinstance(array, np.ndarray | np.generic) else array
    layout = current_layout()
    if layout is not None and not same_mesh(layout.mesh.abstract_mesh, here):
        raise MeshError(
            f"a layout can only be used on its own mesh, got one for ({mesh_text(layout.mesh)}) where the mesh in "
            f"force is ({mesh_text(here)}), in {what}: make a layout for the mesh in force, or leave out jax.set_mesh"
        )
    # A traced value has none, which JAX explains from all equations before it: asked of each, in time of their square.
    sharding = None if traced else getattr(array, "sharding", None)
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty or isinstance(sharding, SingleDeviceSharding):  # its type stays if `jax.device_put` takes it there
        return _placed(array, names, mode)
    devices = getattr(sharding, "mesh", None) if layout is not None else None
    if not same_mesh(mesh, here) or (
        devices is not None and isinstance(array, jax.Array) and _elsewhere(devices, layout)
    ):
        otherwise = ", its devices in another order" if same_mesh(mesh, here) else ""
        raise MeshError(
            f"an operation needs arrays of the mesh in force, which is ({mesh_text(here)}), got "
            f"{_shown(array, names)} of another mesh ({mesh_text(mesh)}{otherwise}), in {what}: move it there first, "
            "with shard(x) or shard(x, 'compute')"
        )
    return array


def to_differentiate(x, what: str):
    """A named or plain array as JAX differentiates it under the mesh in force: not on a device of its own.

    Raises:
        MeshError: it lies on another mesh.
    """
    array = x.array if isinstance(x, NamedArray) else x
    if not on_one_device(array) or mode_of(jax.sharding.get_abstract_mesh()) in ("none", "manual"):
        return x
    if isinstance(array.sharding, SingleDeviceSharding):
        array = jnp.asarray(jax.device_get(array))
    elif isinstance(x, NamedArray):
        array = on_mesh(array, x.names, what)
    return x.with_array(array) if isinstance(x, NamedArray) else array


def on_one_mesh(operands: list[NamedArray], what: str) -> list[NamedArray]:
    """The operands of a traced operation; if no mesh is in force, on the mesh that some of them are on.

    Those that are on no mesh are whole on it, and so are their gradients. Outside of a trace JAX takes them as they
    are.

    Raises:
        MeshError: they lie on two meshes.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        return operands
    meshes = [jax.typeof(x.array).sharding.mesh for x in operands]
    on_a_mesh = [mode_of(mesh) == "explicit" for mesh in meshes]
    placed = [x for x, on in zip(operands, on_a_mesh, strict=True) if on]
    if not placed:
        return operands
    mesh = jax.typeof(placed[0].array).sharding.mesh
    if other := [x for x in placed if not same_mesh(jax.typeof(x.array).sharding.mesh, mesh)]:
        raise MeshError(
            f"an operation needs arrays of one mesh, got {types_of([placed[0], other[0]])} of ({mesh_text(mesh)}) and "
            f"({mesh_text(jax.typeof(other[0].array).sharding.mesh)}), in {what}: move one of them, with shard"
        )
    if len(placed) == len(operands) or not any(is_tracer(x.array) for x in operands):
        return operands
    own = next((x.array.sharding.mesh for x in placed if not is_tracer(x.array)), mesh)
    whole = lambda x: jax.reshard(x.array, NamedSharding(own, spec_of([() for _ in x.names])))
    return [x if on else x.with_array(whole(x)) for x, on in zip(operands, on_a_mesh, strict=True)]


def _closed_over(array: jax.Array) -> jax.Array:
    """A value whose placement is stated, so that a program of `jit` that closes over it runs on its mesh's devices.

    JAX takes a program's devices from its arguments and from what it states, not from the constants in it.
    """
    explicit = mode_of(jax.typeof(array).sharding.mesh) == "explicit"
    return jax.device_put(array, array.sharding) if explicit and not state_of(array).pending else array


def _refuse_after_its_mesh(array, names: tuple[str, ...], what: str) -> None:
    """Refuses to differentiate outside of `jit` while an array's mesh is not in force: JAX cannot."""
    mesh = jax.typeof(array).sharding.mesh
    if mesh.empty:
        return
    try:
        concrete_or_error(None, array)
    except jax.errors.ConcretizationTypeError:
        return
    raise MeshError(
        f"a gradient of arrays of a mesh must be taken while that mesh is in force, got {_shown(array, names)} of the "
        f"mesh ({mesh_text(mesh)}) and none in force, in {what}: take it inside `with layout:`"
    )


def _shown(array, names: tuple[str, ...]) -> str:
    return typeof(NamedArray(array, names)) if names else typeof(array)


def _elsewhere(devices, layout) -> bool:
    return not is_tracer(devices) and isinstance(devices, jax.sharding.Mesh) and devices != layout.mesh


def _placed(array, names: tuple[str, ...], mode: str) -> jax.Array:
    layout = current_layout()
    axes = ((),) * len(names) if layout is None else layout.assign(names)
    if layout is not None:
        layout.check(names, array.shape)
        array = in_order_here(array, names)
    if on_one_device(array):
        array = placed(array, spec_of([() for _ in axes]), None if layout is None else layout.mesh)
    if mode == "auto":
        array = jnp.asarray(array)
        return array if layout is None else jax.lax.with_sharding_constraint(array, layout.sharding(names))
    text = f"{Shape(tuple(map(Dim, names)))} -> {Shape(tuple(map(Dim, names, axes)))}"
    with jax.named_scope(scope_name(text)):
        if is_tracer(array) and any(axes):
            array = jax.reshard(array, spec_of([() for _ in axes]))  # so that its gradient is whole, too
        return jax.reshard(array, spec_of(axes))


def in_order_here(array, names: tuple[str, ...]):
    """Deals out the positions of an array that is on no mesh, which are in their own order, as those of others are; one
    on a mesh stays as it is.

    Raises:
        NamesError: as `slices_dealt`.
    """
    return _dealt_out(array, names, "an array from outside") if jax.typeof(array).sharding.mesh.empty else array


def made_in_order(array, names: tuple[str, ...], what: str):
    """An array made here with positions in their own order, for `operand`, which deals out arrays that are on no mesh:
    one that is on a mesh, whole, is dealt out here.

    Raises:
        NamesError: as `slices_dealt`.
    """
    return array if jax.typeof(array).sharding.mesh.empty else _dealt_out(array, names, what)


def _dealt_out(array, names: tuple[str, ...], what: str):
    for dim, (name, size) in enumerate(zip(names, array.shape)):
        if slices := slices_dealt(name, size, what):
            array = deal(jnp.asarray(jax.device_get(array) if on_one_device(array) else array), slices, dim)
    return array


def check_sizes(operands: list[NamedArray], what: str) -> None:
    """Checks that a name has one size.

    Raises:
        NamesError: with the full types of all operands.
    """
    sizes: dict[str, int] = {}
    for x in operands:
        for name, size in x.shape.items():
            if sizes.setdefault(name, size) != size:
                fix = "rename one of them, or slice it"
                if (layout := current_layout()) is not None and name in layout.cut:
                    fix += f"; layers see a part of '{name}' at a time here: hand what they read of it to fold, after x"
                raise NamesError(
                    f"a name must have one size in an operation, got {name}={sizes[name]} and {name}={size} in {what} "
                    f"of {types_of(operands)}: {fix}"
                )


def union(operands: list[NamedArray]) -> tuple[str, ...]:
    """All names: first those of the operand that has most, then the others' in order."""
    first = max(operands, key=lambda x: len(x.names))
    names = list(first.names)
    for x in operands:
        names += [name for name in x.names if name not in names]
    return tuple(names)


def check_contained(operands: list[NamedArray], names: tuple[str, ...], what: str, combined: str = "") -> None:
    """Checks that operands broadcast: one's names contain the others'.

    Args:
        combined: what to do for all combinations, if not `outer`.

    Raises:
        NamesError: no operand has all the names, so that the result would be an outer product nobody asked for.
    """
    if not any(len(x.names) == len(names) for x in operands):
        raise NamesError(
            f"an operation can broadcast only if one operand's names contain the other's, got {types_of(operands)} in "
            f"{what}: rename one of them, or {combined or f'ask for all combinations with outer({what}, ...)'}"
        )


def refuse_pending(x: NamedArray, what: str) -> None:
    """Refuses partial sums: the operation is not linear.

    Raises:
        PendingSumError: `x` holds some; the message says which reshard was forgotten.
    """
    if state_of(x.array).pending:
        settled = Shape(x.type.dims, (), x.type.copied)
        raise PendingSumError(
            f'only linear operations take partial sums, got {what} of {typeof(x)}: write reshard("{x.type} -> '
            f'{settled}", ...) first, or settle(...)'
        )


def refuse_cut(names, what: str, *, summed: bool = False) -> None:
    """Refuses to compute along a name of which the program sees only a part, as a layer of a pipeline does.

    Args:
        summed: whether it is a sum, which a model whose batch is cut makes of what it measures.

    Raises:
        NamesError: one of the names is cut.
    """
    layout = current_layout()
    cut = [n for n in names if n in layout.cut] if layout is not None and layout.cut else []
    if cut and not (summed and layout.sums):
        who, fix = by_part("move it out of the layers", "sum, and only for what the model measures")
        raise NamesError(
            f"{who} must compute each row of '{cut[0]}' on its own, got {what} along '{cut[0]}', of which it sees only "
            f"a microbatch: {fix}"
        )


def refuse_dealt(names, what: str, x: NamedArray | None = None) -> None:
    """Refuses an array's own operation that goes by the order of positions that are dealt out.

    Raises:
        NamesError: one does.
    """
    if dealt := [n for n in names if is_dealt(n)]:
        raise NamesError(
            f"{what} depends on the order of '{dealt[0]}', which is dealt out over devices here, got "
            f"{typeof(x) if x is not None else dealt[0]}: write it as trellis.in_order(f, x), or train with "
            "layout.context exchange, which keeps positions in order"
        )


def slices_dealt(name: str, size: int, what: str) -> int:
    """Over how many slices positions of this name are dealt out here; 0 if they are in their own order.

    Raises:
        NamesError: they are positions of keys, which may differ from the queries', or their number cannot be dealt out.
    """
    if not is_dealt(name):
        return 0
    slices = current_layout().slices_dealt
    if name == KEY_POSITIONS:
        raise NamesError(
            f"positions of keys that are dealt out must be made from those of queries, got '{name}={size}', in "
            f"{what}: make it with '{POSITIONS}' and write .rename({POSITIONS}='{KEY_POSITIONS}')"
        )
    if size % (2 * slices):
        raise NamesError(
            f"positions dealt out over {slices} slices must split into two pieces for each, got '{name}={size}', in "
            f"{what}: use a length that is divisible by {2 * slices}"
        )
    return slices


def types_of(operands: list[NamedArray]) -> str:
    """The types, for messages."""
    return " and ".join(map(typeof, operands))
