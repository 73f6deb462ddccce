"""Dataclasses of annotated arrays that know their abstract tree: dtypes, names and shardings, with no device."""

import dataclasses
import typing
from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding

from trellis.notation.annotation import ArrayType, DType, StackType, alternatives, array_types, class_of, fields_of
from trellis.notation.binding import check_divides, real_axes
from trellis.notation.shape import NotationError, Shape, spec_of


@typing.dataclass_transform(frozen_default=True, kw_only_default=False)
def struct(cls):
    """Makes a class of annotated fields a frozen dataclass and a pytree.

    Fields whose annotation mentions an array (`f32["..."]`, another struct,
    `Stack[...]`, `jax.Array`, a type variable, or a container or `NamedTuple` of these) are children of the
    pytree; the others (`int`, `str`, ...) are static.

    >>> from trellis.notation import Stack, f32
    >>> @struct
    ... class Block:
    ...     up: f32["embed/data mlp/model"]
    ...     down: f32["mlp/model embed/data"]
    >>> @struct
    ... class Weights:
    ...     layers: Stack["layers", Block]
    >>> struct_shapes(Weights, dict(layers=2, embed=8, mlp=16)).layers.up
    ShapeDtypeStruct(shape=(2, 8, 16), dtype=float32)
    >>> struct_specs(Weights).layers.up
    P(None, 'data', 'model')

    Raises:
        NotationError: it is not a class.
    """
    if not isinstance(cls, type):
        raise NotationError(
            f"a struct must be a class, got {type(cls).__name__}, in struct: write @struct above a class"
        )
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    # Texts (`from __future__ import annotations`) may name classes that come later, so they count as children.
    raw = {field.name: field.type for field in dataclasses.fields(cls)}
    data = [name for name in names if isinstance(raw[name], str) or _holds_arrays(raw[name])]
    return jax.tree_util.register_dataclass(cls, data, [name for name in names if name not in data])


def _holds_arrays(hint, seen: tuple = ()) -> bool:
    if isinstance(hint, ArrayType | StackType | DType | typing.TypeVar) or hint is typing.Any or array_types(hint):
        return True
    fields = () if dataclasses.is_dataclass(hint) or hint in seen else fields_of(hint).values()
    if any(_holds_arrays(part, (*seen, hint)) for part in (*typing.get_args(hint), *fields)):
        return True
    return isinstance(hint, type) and (issubclass(hint, jax.Array) or dataclasses.is_dataclass(hint))


def struct_shapes(cls, sizes: Mapping[str, int], mesh=None, **static):
    """The abstract tree of a struct: `jax.ShapeDtypeStruct`s, with shardings if a mesh is given.

    Args:
        cls: a struct, an array type, or a stack of them.
        sizes: the length of each name.
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`; without one there are no shardings.
        **static: values of the outermost struct's static fields.

    Raises:
        NotationError: a name has no length, a mesh axis is not in the mesh or
            does not divide its dimension, or a field's annotation does not say
            what it holds.
    """

    def leaf(kind: ArrayType, place: str):
        shape = tuple(_size(dim.name, sizes, place) for dim in _whole(kind, place).dims)
        if mesh is None:
            return jax.ShapeDtypeStruct(shape, DType(kind.dtype).jax)
        for dim, size in zip(kind.shape.dims, shape, strict=True):
            check_divides(dim.name, size, _known(dim.axes, mesh, place), mesh.shape, place)
        _known((*kind.shape.pending, *kind.shape.copied), mesh, place)
        spec = real_axes(kind.shape, mesh).spec
        return jax.ShapeDtypeStruct(shape, DType(kind.dtype).jax, sharding=NamedSharding(mesh, spec))

    return _build(cls, leaf, (), _name(cls), static)


def struct_specs(cls, mesh=None, **static):
    """The `PartitionSpec`s of a struct, as its annotations say (without axes of size 1 if a mesh is given)."""

    def leaf(kind: ArrayType, place: str):
        shape = _whole(kind, place)
        shape = real_axes(shape, mesh) if mesh is not None else shape
        return spec_of([dim.axes for dim in shape.dims], shape.pending, shape.copied)

    return _build(cls, leaf, (), _name(cls), static)


def struct_types(cls, **static):
    """The same tree with each array's annotated type (`ArrayType`) as its leaf."""
    return _build(cls, lambda kind, place: kind, (), _name(cls), static)


def _build(hint, leaf, prefix: tuple, place: str, static: Mapping):
    options = [option for option in alternatives(hint) if option is not type(None)]
    if len(options) != 1:
        raise NotationError(
            f"an abstract tree needs one type for each field, got {hint}, in {place}: annotate a single type, or "
            "build this field yourself"
        )
    (hint,) = options
    if isinstance(hint, StackType):
        return _build(hint.of, leaf, (*prefix, *hint.prefix.dims), place, static)
    if isinstance(hint, ArrayType):
        return leaf(hint.under(Shape(prefix)) if prefix else hint, f"`{place}`")
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint):
        return tuple(_build(a, leaf, prefix, f"{place}[{i}]", {}) for i, a in enumerate(typing.get_args(hint)))
    fields, cls = fields_of(hint), class_of(hint)
    if not fields and not dataclasses.is_dataclass(cls):
        raise NotationError(
            f"an abstract tree needs to know what a field holds, got {hint}, in `{place}`: "
            f"annotate an array, a struct, a tuple of these or Stack[...], or pass a static field's value by name"
        )
    values, (derived, default) = dict(static), _not_asked(cls)
    for field, kind in fields.items():
        if field in values or field in derived or (field in default and not _holds_arrays(kind)):
            continue
        values[field] = _build(kind, leaf, prefix, f"{place}.{field}", {})
    return cls(**values)


def _not_asked(cls) -> tuple[set[str], set[str]]:
    """The fields of a class that it is not made with, and those that have a default."""
    if not dataclasses.is_dataclass(cls):
        return set(), set(cls._field_defaults)
    missing, fields = dataclasses.MISSING, dataclasses.fields(cls)
    default = {f.name for f in fields if f.default is not missing or f.default_factory is not missing}
    return {f.name for f in fields if not f.init}, default


def _name(hint) -> str:
    return getattr(hint, "__name__", None) or str(hint)


def _whole(kind: ArrayType, place: str) -> Shape:
    if kind.shape.ellipsis:
        raise NotationError(
            f"an abstract array must have all its dimensions named, got '{kind.shape}', in {place}: write them "
            "instead of '...'"
        )
    return kind.shape


def _size(name, sizes: Mapping[str, int], place: str) -> int:
    if isinstance(name, int):
        return name
    if name not in sizes:
        given = ", ".join(sizes) or "none"
        raise NotationError(
            f"an abstract tree needs a length for each name, got {given}, in {place}: add {name}=... to the sizes"
        )
    return sizes[name]


def _known(axes, mesh, place: str):
    for axis in axes:
        if axis not in mesh.shape:
            raise NotationError(
                f"a sharding can only use axes of its mesh, got '{axis}' where the mesh has "
                f"{', '.join(mesh.axis_names)}, in {place}: use one of these, or add '{axis}' to the mesh (size 1 "
                "will do)"
            )
    return axes
