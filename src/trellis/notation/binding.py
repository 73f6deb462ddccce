"""A name has one length in a call: what `@checked` and the typed `shard_map` bind, and how mismatches are reported."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping

import jax

from trellis.notation.annotation import ArrayType
from trellis.notation.shape import Dim, NotationError, Shape
from trellis.notation.state import State, mesh_of, state_of
from trellis.notation.typeof import is_array, is_named, short_dtype, typeof


class TypeMismatch(NotationError, TypeError):
    """A value is not of the type that its annotation says. The message names both places."""


class PendingSumError(TypeMismatch):
    """A value is used while partial sums of it are pending. The message says which `reshard` was forgotten."""


@dataclasses.dataclass
class Bindings:
    """The lengths of the names in one call of one function.

    Attributes:
        function: the function's name, for messages.
        sizes: for each name its whole length and the place that bound it.
        pending: the pending sums that products left in this call (manual mode), for messages.
        slices: the slices that texts made in this call (manual mode): JAX's types do not say which dimension a mesh
            axis slices, nor which of two axes is the major one.
        single: whether types have the mesh axes of one device (manual mode).
    """

    function: str
    sizes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    pending: list[Shape] = dataclasses.field(default_factory=list)
    slices: dict[int, tuple[object, Shape]] = dataclasses.field(default_factory=dict)
    single: bool = False

    def made(self, array, shape: Shape):
        """Notes which shape a text gave an array, and returns it."""
        self.slices[id(array)] = (array, shape)
        return array

    def held(self, array, shape: Shape) -> Shape | None:
        """The shape that a text gave an array, if this one says that its dimensions are sliced otherwise."""
        known = self.slices.get(id(array), (None, shape))[1]
        axes = [[dim.axes for dim in s.dims] for s in (known, shape)]
        alike = sorted(known.mesh_axes) == sorted(shape.mesh_axes)  # others are refused by JAX's types
        return known if alike and axes[0] != axes[1] and len(axes[0]) == len(axes[1]) else None

    def bind(self, name: str, size: int, place: str) -> None:
        """Gives a name its length, or checks it against the length it has.

        Raises:
            TypeMismatch: the name has another length, with both places.
        """
        bound, first = self.sizes.setdefault(name, (size, place))
        if bound != size:
            raise TypeMismatch(
                f"a name must have one length in a call, got {name}={bound} from {first} and {name}={size} from "
                f"{place}, in `{self.function}`: make them agree, or give one of them another name"
            )


_live: contextvars.ContextVar[Bindings | None] = contextvars.ContextVar("bindings", default=None)


def live() -> Bindings | None:
    """The bindings of the innermost checked call, or None."""
    return _live.get()


@contextlib.contextmanager
def binding(bindings: Bindings):
    """Makes these the live bindings: every text read inside is checked against them."""
    token = _live.set(bindings)
    try:
        yield bindings
    finally:
        _live.reset(token)


def manual_axes() -> frozenset[str]:
    """The mesh axes that are manual here (inside `shard_map`)."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def real_axes(shape: Shape, mesh) -> Shape:
    """The shape without the mesh axes of size 1, which no type mentions.

    Args:
        mesh: a mesh or abstract mesh, or None: then no axis is real. Axes it does not have count as size 1.
    """
    sizes = dict(mesh.shape) if mesh is not None else {}
    return _only(shape, lambda axis: sizes.get(axis, 1) > 1)


def check_divides(name, size: int, axes, mesh_shape: Mapping[str, int], place: str) -> None:
    """Refuses a dimension that its mesh axes do not divide.

    Raises:
        NotationError: with both sizes, and the nearest sizes that work.
    """
    parts = math.prod(mesh_shape[axis] for axis in axes)
    if size % parts:
        below, above = size // parts * parts, -(-size // parts) * parts
        near = f"{below} or {above}" if below else f"{above}"
        raise NotationError(
            f"a dimension must be divisible by the mesh axes that slice it, got {name}={size} over "
            f"{'/'.join(axes)}={parts}, in {place}: make {name} {near}, or slice it over other axes"
        )


def whole_sizes(shape: Shape, array, place: str) -> tuple[int, ...]:
    """The sizes of the whole array, of which `array` may be one device's slice.

    Raises:
        TypeMismatch: the array has another rank.
    """
    rank = len(shape.dims)
    if len(array.shape) != rank and not (shape.ellipsis and len(array.shape) > rank):
        raise TypeMismatch(
            f"a type must name every dimension, got {rank}{' or more' if shape.ellipsis else ''} in '{shape}' and "
            f"{len(array.shape)} in {typeof(array)}, in {place}: write all dimensions, or '...' for leading ones"
        )
    manual = manual_axes()
    sizes = dict(jax.sharding.get_abstract_mesh().shape) if manual else {}
    local = array.shape[len(array.shape) - rank :]
    return tuple(
        size * math.prod(sizes[a] for a in dim.axes if a in manual) for dim, size in zip(shape.dims, local, strict=True)
    )


def bind_shape(shape: Shape, array, place: str, bindings: Bindings | None) -> None:
    """Checks rank, literal sizes and the lengths of names against a plain array.

    Raises:
        TypeMismatch: with both places where two lengths of one name meet.
    """
    for dim, size in zip(shape.dims, whole_sizes(shape, array, place), strict=True):
        if isinstance(dim.name, int):
            if dim.name != size:
                raise TypeMismatch(
                    f"a literal dimension must match the array's size, got {size} where '{shape}' says {dim.name}, in "
                    f"{place}: pass an array of {dim.name}, or write a name"
                )
        elif bindings is not None:
            bindings.bind(dim.name, size, place)


def check_array(x, kind: ArrayType, place: str, bindings: Bindings, *, strict: bool = False) -> None:
    """Checks one plain or named array against its annotation.

    Names, sizes and dtype are always checked; the sharding, if the JAX type carries it and the annotation mentions a
    mesh axis or a state. Then it is the whole sharding: a dimension without a mesh axis says "not sliced".

    Args:
        strict: the sharding even if the annotation mentions no mesh axis.

    Raises:
        TypeMismatch: in one of these.
    """
    if not is_array(x):
        raise TypeMismatch(f"expected an array of type {kind}, got {typeof(x)}, in {place}: pass an array")
    array = x.array if is_named(x) else x
    if is_named(x) and not same_names(kind.shape, tuple(x.names)):
        raise TypeMismatch(
            f"a named array must have the names of its annotation in the same order, got {typeof(x)} for {kind}, in "
            f"{place}: rename or rearrange it to '{kind.shape.bare()}', or correct the annotation"
        )
    seen = short_dtype(array.dtype)
    if kind.dtype not in (seen, "shaped"):
        raise TypeMismatch(
            f"an array must have the dtype of its annotation, got {typeof(x)} for {kind}, in {place}: cast it to "
            f"{kind.dtype}, or annotate {seen}"
        )
    bind_shape(kind.shape, array, place, bindings)
    if strict or kind.shape.mesh_axes or kind.shape.pending or kind.shape.copied:
        held = held_shape(kind.shape, x)
        if held is not None and not _agrees(wanted := real_axes(kind.shape, mesh_of(array)), held, array):
            _check_even(wanted, array, place)
            _mismatch(x, kind, wanted, held, place)


def same_names(shape: Shape, names: tuple[str, ...]) -> bool:
    """Whether a named array's names are those of a shape, in its order."""
    mine = names[len(names) - len(shape.dims) :] if shape.ellipsis else names
    return len(mine) == len(shape.dims) and all(
        isinstance(dim.name, int) or dim.name == name for dim, name in zip(shape.dims, mine, strict=True)
    )


def held_shape(shape: Shape, x) -> Shape | None:
    """What the JAX type of `x` says, in the names of `shape`; None if it says nothing (no mesh, auto mode).

    In manual mode the type says which mesh axes slice an array but not which dimension: dimensions are taken from
    `shape` (or from a named array's own record) as far as the type agrees.
    """
    state = state_of(x.array if is_named(x) else x)
    if state.mode not in ("explicit", "manual"):
        return None
    mesh = mesh_of(x.array if is_named(x) else x)
    rank = len(shape.dims)
    lead = len(state.axes) - rank
    own = getattr(x, "dims", None)
    dims = []
    for i, dim in enumerate(shape.dims):
        sliced = state.axes[lead + i]
        if state.mode == "manual":
            said = own[lead + i].axes if own is not None else dim.axes
            sliced = sliced + tuple(a for a in said if a in state.varying and a not in sliced)
        dims.append(Dim(dim.name, sliced))
    held = Shape(tuple(dims), tuple(sorted(state.pending)), tuple(sorted(state.copied)), shape.ellipsis)
    return real_axes(held, mesh)


def left_axes() -> frozenset[str]:
    """The mesh axes that a manual function leaves to the surrounding program; none outside of manual mode."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(mesh.manual_axes)
    return frozenset(axis for axis, size in mesh.shape.items() if manual and size > 1 and axis not in manual)


def partly_manual() -> bool:
    """Whether some mesh axes are left to the surrounding program. JAX types carry no `+x` and `~x` there."""
    return bool(left_axes())


def _agrees(wanted: Shape, held: Shape, array) -> bool:
    state: State = state_of(array)
    mesh = mesh_of(array)
    if state.mode == "explicit":
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        typed = lambda axis: kinds[axis] == jax.sharding.AxisType.Explicit
        return _only(wanted, typed) == _only(held, typed)
    states = (*wanted.pending, *wanted.copied)
    varying = frozenset(a for a in state.varying if mesh.shape[a] > 1)
    if partly_manual():
        # The type says the same of a slice, a partial sum and a copy that is summed later: "varying".
        return not varying - {*wanted.mesh_axes, *states}
    if varying - set(wanted.mesh_axes):
        return False
    # A value that is the same on all devices is a legal slice (of equal slices).
    return (wanted.pending, wanted.copied) == (held.pending, held.copied)


def _only(shape: Shape, kept: Callable[[str], bool]) -> Shape:
    """The shape with these mesh axes alone."""
    keep = lambda axes: tuple(filter(kept, axes))
    dims = tuple(Dim(dim.name, keep(dim.axes)) for dim in shape.dims)
    return Shape(dims, keep(shape.pending), keep(shape.copied), shape.ellipsis)


def _check_even(wanted: Shape, array, place: str) -> None:
    """Refuses an annotation that no move makes true.

    Raises:
        NotationError: a mesh axis does not divide its dimension.
    """
    if state_of(array).mode == "explicit" and wanted.dims:
        for dim, size in zip(wanted.dims, array.shape[-len(wanted.dims) :], strict=True):
            check_divides(dim.name, size, dim.axes, mesh_of(array).shape, place)


def _mismatch(x, kind: ArrayType, wanted: Shape, held: Shape, place: str):
    raise TypeMismatch(
        f"an annotation that mentions a mesh axis must match the whole sharding, got {typeof(x)} for {kind}, in "
        f"{place}: "
        + (
            f'write reshard("{held} -> {wanted}", ...) first, or correct the annotation'
            if held != wanted
            else "reshard it first, or correct the annotation"
        )
    )
