"""Annotations: `f32["batch/data pos embed"]` on arguments, results and fields."""

import dataclasses
import functools
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from trellis.notation.shape import Dim, NotationError, Shape, parse


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayType:
    """What an annotation says: a dtype and a shape.

    Attributes:
        dtype: the dtype's name in the notation, or "shaped" for any.
        shape: names, sizes and sharding.
    """

    dtype: str
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}[{self.shape}]"

    def __repr__(self) -> str:
        return f'{self.dtype}["{self.shape}"]'

    def __or__(self, other):
        return typing.Union[self, other]  # noqa: UP007  (`|` is what this defines)

    def __ror__(self, other):
        return typing.Union[other, self]  # noqa: UP007

    def under(self, prefix: Shape) -> "ArrayType":
        """The type of such arrays, stacked under leading dimensions ("..." stands for these, too)."""
        if self.shape.ellipsis:
            return self
        stacked = Shape((*prefix.dims, *self.shape.dims), self.shape.pending, self.shape.copied)
        return ArrayType(self.dtype, parse(str(stacked)))

    def with_leading(self, dims: tuple[Dim, ...]) -> "ArrayType":
        """The type with these dimensions in the place of "..."."""
        return ArrayType(self.dtype, dataclasses.replace(self.shape, ellipsis=False)).under(Shape(dims))


@dataclasses.dataclass(frozen=True, slots=True)
class DType:
    """A dtype in annotations: subscript it with a shape.

    >>> f32["batch/data pos embed"]
    f32["batch/data pos embed"]
    """

    name: str

    def __getitem__(self, text: str | bytes) -> ArrayType:
        if not isinstance(text, str):
            raise NotationError(
                f"an annotation's shape must be a string, got {text!r}, in '{self.name}[...]': write "
                f'{self.name}["batch/data pos embed"]'
            )
        return ArrayType(self.name, parse(text))

    def __repr__(self) -> str:
        return self.name

    @property
    def jax(self):
        """The dtype as JAX knows it."""
        return _jax_dtype(self.name)


f32, bf16, f16, f64 = (DType(name) for name in ("f32", "bf16", "f16", "f64"))
i32, i64, i16, i8 = (DType(name) for name in ("i32", "i64", "i16", "i8"))
u32, u16, u8 = (DType(name) for name in ("u32", "u16", "u8"))
bool_, key = DType("bool_"), DType("key")
# Any dtype: for functions that run in float32 and in bfloat16.
shaped = DType("shaped")

_DTYPES = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f64": np.float64,
    "i32": jnp.int32,
    "i64": np.int64,
    "i16": jnp.int16,
    "i8": jnp.int8,
    "u32": jnp.uint32,
    "u16": jnp.uint16,
    "u8": jnp.uint8,
    "bool_": jnp.bool_,
}


@functools.cache
def _jax_dtype(name: str):
    if name == "key":
        return jax.eval_shape(lambda: jax.random.key(0)).dtype
    if name == "shaped":
        raise NotationError(
            "an abstract tree needs a dtype for each array, got 'shaped', in an annotation: write f32, bf16, ... "
            "instead"
        )
    return np.dtype(_DTYPES[name])


@dataclasses.dataclass(frozen=True, slots=True)
class StackType:
    """The annotation `Stack["layers", Block]`: a Block whose arrays all have more leading dimensions."""

    prefix: Shape
    of: typing.Any

    def __repr__(self) -> str:
        return f'Stack["{self.prefix}", {getattr(self.of, "__name__", self.of)!s}]'

    def __or__(self, other):
        return typing.Union[self, other]  # noqa: UP007

    def __ror__(self, other):
        return typing.Union[other, self]  # noqa: UP007


class Stack:
    """`Stack["layers", Block]`: the fields of `Block` with a leading `layers` dimension.

    The value is a `Block` whose arrays hold all layers. The leading dimension
    may be sliced too: `Stack["layers/stage", Block]`.
    """

    def __class_getitem__(cls, item) -> StackType:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise NotationError(
                f"Stack takes a leading dimension and a type, got {item!r}, in 'Stack[...]': write "
                'Stack["layers", Block]'
            )
        prefix = parse(item[0])
        if prefix.pending or prefix.copied or prefix.ellipsis or not prefix.dims:
            raise NotationError(
                f"a stack's first part must consist of dimensions only, got '{item[0]}', in 'Stack[...]': write "
                'states in the annotations of the fields, as in Stack["layers", Block]'
            )
        return StackType(prefix, item[1])


_ALIASES = (typing.NewType, *([typing.TypeAliasType] if hasattr(typing, "TypeAliasType") else []))


def hints_of(obj) -> dict[str, typing.Any]:
    """The annotations of a function or class, with texts evaluated.

    Raises:
        NotationError: an annotation written as a text names something that is not there.
    """
    obj = written(obj)
    try:
        return _hints(obj)
    except NameError as error:
        raise NotationError(
            f"annotations must use names that can be looked up from the module, got {error}, in "
            f"`{getattr(obj, '__qualname__', obj)}`: define that name at the module's top level, or drop `from "
            "__future__ import annotations`"
        ) from error


def written(obj):
    """The function, or the class, whose annotations a callable's are: beneath `functools.partial`, a method's object,
    `jax.jit`; of an object that is called, its class's `__call__`."""
    if isinstance(obj, type | types.FunctionType):
        return obj
    for beneath in ("func", "__func__", "__wrapped__"):
        if (beneath != "func" or isinstance(obj, functools.partial)) and callable(found := getattr(obj, beneath, None)):
            return written(found)
    call = type(obj).__call__ if callable(obj) else None
    return call if isinstance(call, types.FunctionType) else obj


def _hints(obj) -> dict[str, typing.Any]:
    if (hints := _READ.get(obj)) is None:
        hints = _READ[obj] = typing.get_type_hints(obj)
    return hints


# A function that was made in a loop, with all that it closes over, is not kept by what was read of it.
_READ: weakref.WeakKeyDictionary[typing.Any, dict[str, typing.Any]] = weakref.WeakKeyDictionary()


def hint_text(hint) -> str:
    """A hint as it is written, for messages."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else repr(hint)


def meant(hint):
    """What a `typing.NewType`, or a `type` statement, stands for; any other hint as it is."""
    while type(hint) in _ALIASES:
        hint = hint.__supertype__ if isinstance(hint, typing.NewType) else hint.__value__
    return hint


def alternatives(hint) -> tuple:
    """The members of a union, or the hint alone."""
    hint = meant(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def fields_of(hint) -> dict[str, typing.Any]:
    """The fields of a dataclass or a `NamedTuple`, as it is or of given types (`Block[int]`), with their annotations;
    none of anything else."""
    cls = class_of(hint)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif isinstance(cls, type) and issubclass(cls, tuple):
        names = getattr(cls, "_fields", ())
    else:
        return {}
    hints = hints_of(cls)
    given = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(hint), strict=False))
    return {name: _given(hints.get(name), given) for name in names}


def class_of(hint):
    """The class that a hint names, without the types it is given."""
    return typing.get_origin(hint) or hint


def _given(hint, types: dict):
    """A hint with the types that its class was given in the place of variables."""
    if isinstance(hint, typing.TypeVar):
        return types.get(hint, hint)
    if types and (variables := getattr(hint, "__parameters__", ())) and class_of(hint) is not hint:
        return hint[tuple(types.get(v, v) for v in variables)]
    return hint


def array_types(hint, prefix: Shape | None = None, seen: tuple = ()) -> list[ArrayType]:
    """All array types that a hint mentions, in order, including those in the fields of its classes."""
    hint = meant(hint)
    if isinstance(hint, ArrayType):
        return [hint.under(prefix) if prefix else hint]
    if isinstance(hint, StackType):
        lead = Shape((*(prefix.dims if prefix else ()), *hint.prefix.dims))
        return array_types(hint.of, lead, seen)
    if hint in seen:
        return []
    parts = tuple(fields_of(hint).values()) or typing.get_args(hint)
    return [t for part in parts for t in array_types(part, prefix, (*seen, hint))]
