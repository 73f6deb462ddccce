"""Products in the notation, of plain arrays: `einsum("batch/d in/m, in/m hidden -> batch/d hidden +m", x, w)`."""

import functools
import string

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from trellis.mesh.landing import on_mesh_in_force
from trellis.mesh.manual.ops import mark_pending, vary
from trellis.mesh.manual.refusals import raise_of_call
from trellis.mesh.manual.reshard import check_slice, known_axes, refuse_left
from trellis.notation import Dim, NotationError, Shape, TypeMismatch, parse, spec_of, typeof
from trellis.notation.binding import bind_shape, held_shape, left_axes, live, real_axes
from trellis.notation.state import mesh_of, state_of


def einsum_plain(text: str, *arrays, precision=None, preferred_element_type=None):
    """A sum of products, written with names and shardings.

    In manual mode the product is each device's own, and a sum over a sliced
    name is written `+x` in the result: a partial sum, to be settled by a
    `reshard`. In explicit mode the same text gives the sharding of the result.
    Nothing is moved between devices in either mode.

    Args:
        text: the operands' shapes, `->`, and the result's.
        *arrays: plain arrays, of the types that the text says.
        precision, preferred_element_type: as in `jnp.einsum`.

    Raises:
        NotationError: the text is not a product that each device can do on its own; says which `reshard` is missing.
        TypeMismatch: an array is not what the text says.
    """
    lefts, result = parse_einsum(text)
    where = f"einsum('{text}')"
    if len(lefts) != len(arrays):
        raise NotationError(
            f"an einsum needs one array for each shape on its left, got {len(arrays)} arrays for {len(lefts)} shapes, "
            f"in {where}: add or remove one"
        )
    if other := [x for x in arrays if not hasattr(x, "dtype")]:
        raise TypeMismatch(
            f"an einsum takes arrays, got {type(other[0]).__name__}, in {where}: convert it with jnp.asarray(x)"
        )
    arrays = [on_mesh_in_force(x) for x in arrays]
    mesh = jax.sharding.get_abstract_mesh()
    mesh = None if mesh.empty else mesh
    bindings = live()
    if mesh is not None:
        known_axes((*lefts, result), mesh, where)
    for shape, x in zip(lefts, arrays, strict=True):
        bind_shape(shape, x, where, bindings)
    if mesh is not None:
        lefts, result = [real_axes(shape, mesh) for shape in lefts], real_axes(result, mesh)
        refuse_left((*lefts, result), where)
    pending = check_product(lefts, result, where)
    letters = _letters(tuple(lefts), result)
    product = functools.partial(jnp.einsum, letters, precision=precision, preferred_element_type=preferred_element_type)
    modes = {state_of(x).mode for x in arrays}
    if "manual" in modes:
        manual = tuple(a for a in mesh.axis_names if a in mesh.manual_axes)
        mentioned = {a for s in (*lefts, result) for a in (*s.mesh_axes, *s.pending, *s.copied)}
        sharding = _sharding_left(lefts, arrays, result, where)
        slices = (_local(x, shape, lefts, where, mentioned) for shape, x in zip(lefts, arrays, strict=True))
        out = product(*slices, out_sharding=sharding)
        out = mark_pending(out, tuple(a for a in manual if a in pending and a not in lefts[0].pending), result)
        return out if bindings is None else bindings.made(out, result)
    if "explicit" in modes:
        for shape, x in zip(lefts, arrays, strict=True):
            if (held := held_shape(shape, x)) != shape:
                raise TypeMismatch(
                    f"the left side of an einsum must describe its arrays, got {typeof(x)} for '{shape}', in {where}: "
                    f'write reshard("{held} -> {shape}", ...) first, or correct the text'
                )
        whole = mesh_of(next(x for x in arrays if state_of(x).mode == "explicit"))
        if not _is_jaxs(lefts, result):
            each = functools.partial(einsum_plain, f"{', '.join(map(str, lefts))} -> {result}")
            how = dict(precision=precision, preferred_element_type=preferred_element_type)
            run = jax.shard_map(
                functools.partial(each, **how),
                mesh=whole if mesh is None else None,
                in_specs=tuple(shape.spec for shape in lefts),
                out_specs=result.spec,
            )
            try:
                return run(*arrays)
            except (NotImplementedError, ValueError) as error:
                raise_of_call(error, where, whole)
                raise
        return product(*arrays, out_sharding=NamedSharding(whole, result.spec))
    return product(*arrays)


def _is_jaxs(lefts: list[Shape], result: Shape) -> bool:
    """Whether JAX's own rules for whole arrays (0.10.2 to 0.12) give a product, and its gradients, as the text says.

    With more than two factors, JAX settles sums between two of them, and counts the result once for each device. A
    partial sum must be over names of both factors, and a copy along the mesh axes that its gradient is summed over.
    """
    if any(shape.ellipsis for shape in lefts) or not any((*s.mesh_axes, *s.copied, *s.pending) for s in lefts):
        return True
    if len(lefts) > 2 or lefts[0].pending:
        return False
    axes = {dim.name: dim.axes for shape in lefts for dim in shape.dims}
    summed = [name for name in axes if name not in result.names and axes[name]]
    if any(name not in shape.names for name in summed for shape in lefts) or (summed and len(lefts) < 2):
        return False
    missing = lambda shape: {a for name in axes if name not in shape.names for a in axes[name]}
    return all(not shape.copied or missing(shape) == set(shape.copied) for shape in lefts)


@functools.lru_cache(maxsize=4096)
def parse_einsum(text: str, verb: str = "einsum") -> tuple[list[Shape], Shape]:
    """The operands' shapes and the result's. NotationError: not one operation of named dimensions."""
    an = "an" if verb == "einsum" else "a"
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise NotationError(
            f"{an} {verb} must have exactly one '->', got {text.count('->')}, in {verb}('{text}'): write 'batch in, "
            "in out -> batch out'"
        )
    lefts, result = [parse(part.strip()) for part in left.split(",")], parse(right.strip())
    for shape in (*lefts, result):
        if any(isinstance(dim.name, int) for dim in shape.dims):
            raise NotationError(
                f"{an} {verb} needs a name for each dimension, got '{shape}', in {verb}('{text}'): give each "
                "dimension a name"
            )
    known = {dim.name for shape in lefts for dim in shape.dims}
    if absent := [dim.name for dim in result.dims if dim.name not in known]:
        raise NotationError(
            f"a result can only have names of its operands, got '{absent[0]}', in {verb}('{text}'): correct the name"
        )
    return lefts, result


def check_product(lefts: list[Shape], result: Shape, where: str, written: list[Shape] | None = None) -> tuple[str, ...]:
    """Checks that devices can do the product on their own; gives the axes along which its result is pending.

    Args:
        written: the operands and the result as errors are to show them, if the text has mesh axes that are not checked.
    """
    *operands, shown = written or (*lefts, result)
    slices: dict[str | int, tuple[tuple[str, ...], Shape]] = {}
    for shape, said in zip(lefts, operands, strict=True):
        if shape.pending and len(lefts) > 1:
            settled = Shape(shape.dims, (), shape.copied, shape.ellipsis)
            raise NotationError(
                f"a pending sum must be settled before it is multiplied, got '{shape}', in {where}: write "
                f'reshard("{shape} -> {settled}", ...) first'
            )
        for dim in shape.dims:
            axes, first = slices.setdefault(dim.name, (dim.axes, said))
            if axes != dim.axes:
                raise NotationError(
                    f"a name must be sliced the same way in all operands, got '{Dim(dim.name, axes)}' and '{dim}', in "
                    f"{where}: {_align(first, said, dim.name)}"
                )
    owner = one_axis_one_name(lefts, where, operands)
    for shape in lefts:
        for axis in shape.copied:
            if axis not in owner:
                raise NotationError(
                    f"a copy ~{axis} needs another operand that '{axis}' slices, got none, in {where}: use the value "
                    f"from before the cast to ~{axis}"
                )
    kept = {dim.name: dim.axes for dim in result.dims}
    for name, axes in kept.items():
        if axes != slices[name][0]:
            raise NotationError(
                f"a product cannot change how a name is sliced, got '{Dim(name, slices[name][0])}' on the left and "
                f"'{Dim(name, axes)}' on the right, in {where}: write '{Dim(name, slices[name][0])}' on the right and "
                "reshard the result"
            )
    left = left_axes()
    partial = [a for name, (axes, _) in slices.items() if name not in kept for a in axes if a not in left]
    pending = tuple(sorted({*partial, *(a for shape in lefts for a in shape.pending)}))
    if result.copied:
        raise NotationError(
            f"the result of a product cannot be a copy, got '~{result.copied[0]}' on the right, in {where}: remove it"
        )
    if result.pending != pending:
        right = Shape(shown.dims, pending, (), result.ellipsis)
        settled = Shape(shown.dims, (), (), result.ellipsis)
        if set(result.pending) - set(pending):
            extra = sorted(set(result.pending) - set(pending))[0]
            raise NotationError(
                f"a sum can only be pending over axes that slice a summed name, got '+{extra}' and no such name, in "
                f"{where}: write '-> {right}'"
            )
        missing = sorted(set(pending) - set(result.pending))
        if missing[0] not in partial:
            raise NotationError(
                f"the result of a pending sum must be pending too, got '{lefts[0]}' and no '+{missing[0]}' on the "
                f"right, in {where}: write '-> {right}'"
            )
        summed = next(str(Dim(n, a)) for n, (a, _) in slices.items() if n not in kept and missing[0] in a)
        raise NotationError(
            f"a sum over a sliced name must be marked as pending, got '{summed}' summed and no '+{missing[0]}' in the "
            f"result, in {where}: write '-> {right}', and settle it with "
            f'reshard("{right} -> {settled}", ...)'
        )
    return pending


def one_axis_one_name(lefts: list[Shape], where: str, written: list[Shape] | None = None) -> dict[str, str | int]:
    """The one name that each mesh axis slices in an operation. NotationError: an axis slices two."""
    owner: dict[str, str | int] = {}
    for shape, said in zip(lefts, written or lefts, strict=True):
        for dim in shape.dims:
            for axis in dim.axes:
                name = owner.setdefault(axis, dim.name)
                if name != dim.name:
                    raise NotationError(
                        f"a mesh axis can slice only one name in a product, got '{axis}' on '{name}' and on "
                        f"'{dim.name}', where each device would multiply blocks that do not match, in {where}: gather "
                        f'one, as in reshard("{said} -> {_without(said, axis)} ~{axis}", ...)'
                    )
    return owner


def _align(first: Shape, second: Shape, name: str) -> str:
    a, b = (next(dim.axes for dim in shape.dims if dim.name == name) for shape in (first, second))
    # Taking a slice moves nothing, so bring the less sliced operand to the other.
    source, axes = (first, b) if len(a) < len(b) else (second, a)
    target = Shape(
        tuple(Dim(d.name, axes if d.name == name else d.axes) for d in source.dims),
        source.pending,
        tuple(c for c in source.copied if c not in axes),
        source.ellipsis,
    )
    return f'write reshard("{source} -> {target}", ...) first'


def _without(shape: Shape, axis: str) -> Shape:
    dims = tuple(Dim(d.name, tuple(a for a in d.axes if a != axis)) for d in shape.dims)
    return Shape(dims, shape.pending, shape.copied, shape.ellipsis)


def _sharding_left(lefts: list[Shape], arrays, result: Shape, where: str) -> NamedSharding | None:
    """How a product lies over the mesh axes that are left to the surrounding program, where it is to sum over one."""
    parts = {d.name: axes for s, x in zip(lefts, arrays) for d, axes in zip(s.dims[::-1], state_of(x).axes[::-1])}
    summed = [name for name, axes in parts.items() if axes and name not in result.names]
    if not summed or len(arrays) == 1:
        return None
    if len(arrays) > 2:
        raise NotationError(
            f"a sum over a mesh axis that is left to the surrounding program must have two factors, got "
            f"'{Dim(summed[0], parts[summed[0]])}' summed of {len(arrays)}, in {where}: multiply two of them first"
        )
    lead = max((state_of(x).axes[: x.ndim - len(s.dims)] for s, x in zip(lefts, arrays)), key=len)
    return NamedSharding(mesh_of(arrays[0]), spec_of([*lead, *(parts[name] for name in result.names)], (), ()))


def _local(x, shape: Shape, lefts: list[Shape], where: str, mentioned: set[str]):
    x = check_slice(x, shape, where, mentioned=mentioned)
    # A copy meets slices: from here on it differs along that axis, and its gradient is summed there.
    return vary(x, tuple(a for a in shape.copied if any(a in other.mesh_axes for other in lefts)))


@functools.lru_cache(maxsize=4096)
def _letters(lefts: tuple[Shape, ...], result: Shape) -> str:
    names = list(dict.fromkeys(dim.name for shape in lefts for dim in shape.dims))
    letter = dict(zip(names, string.ascii_letters, strict=False))

    def side(shape: Shape) -> str:
        return ("..." if shape.ellipsis else "") + "".join(letter[dim.name] for dim in shape.dims)

    return ",".join(map(side, lefts)) + "->" + side(result)
