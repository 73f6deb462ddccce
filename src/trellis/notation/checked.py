"""`@checked`: every call is checked against the annotations."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from trellis.notation.annotation import (
    ArrayType,
    StackType,
    alternatives,
    array_types,
    class_of,
    fields_of,
    hint_text,
    hints_of,
    meant,
    written,
)
from trellis.notation.binding import Bindings, TypeMismatch, binding, check_array, same_names, whole_sizes
from trellis.notation.shape import Dim, Shape
from trellis.notation.state import state_of
from trellis.notation.typeof import is_array, is_named, short_dtype, typeof

_on = contextvars.ContextVar("checks", default=os.environ.get("TRELLIS_CHECK", "0") not in ("", "0"))


def checking(on: bool | None = None):
    """Turns checks on or off in this thread; without an argument, says whether they are on.

    They are off unless the environment has TRELLIS_CHECK=1; off, they cost one comparison a call. Manual mode
    (`shard_map`) always checks: it reads its shardings from the annotations.

    >>> with checking(True):
    ...     checking()
    True

    Returns:
        Without an argument, a bool. With one, a context manager that restores the earlier setting at its end.
    """
    if on is None:
        return _on.get()
    before = _on.get()
    _on.set(bool(on))
    return _restore(before)


@contextlib.contextmanager
def _restore(before: bool):
    try:
        yield
    finally:
        _on.set(before)


def checked(fn: Callable) -> Callable:
    """Checks the arguments and the result of every call against the annotations.

    A name has one length in a call: in all arguments, the result, and the fields of dataclasses among them. Dtype, rank
    and literal sizes are checked too, and the sharding if JAX's types carry it and the annotation mentions a mesh axis
    or a state (then a dimension without one says "not sliced"). Under `jit` this happens while tracing, so compiled
    code does not change.

    >>> import jax.numpy as jnp
    >>> from trellis.notation import f32
    >>> @checked
    ... def scale(x: f32["batch embed"], by: f32["embed"]) -> f32["batch embed"]:
    ...     return x * by
    >>> with checking(True):
    ...     scale(jnp.ones((2, 3)), jnp.ones(4))
    Traceback (most recent call last):
        ...
    trellis.notation.binding.TypeMismatch: a name must have one length in a call, got embed=3 from argument `x` of
    `scale` and embed=4 from argument `by` of `scale`, in `scale`: make them agree, or give one of them another name

    Raises:
        TypeMismatch: a value is not what its annotation says; names both places.
    """
    if isinstance(fn, classmethod | staticmethod):  # of which one is no callable, but what a class makes a method of
        return typing.cast(Callable, type(fn)(checked(fn.__func__)))
    if isinstance(fn, functools.partial):
        return functools.partial(checked(fn.func), *fn.args, **fn.keywords)
    signature = inspect.signature(fn)
    name = getattr(written(fn), "__qualname__", repr(fn)).rsplit("<locals>.", 1)[-1]
    given = {word: parameter.default for word, parameter in signature.parameters.items()}
    defaults = {word: default for word, default in given.items() if any(map(is_array, jax.tree.leaves(default)))}

    def begin(args, kwargs) -> Bindings:
        hints = hints_of(fn)
        bindings = Bindings(name)
        bound = signature.bind(*args, **kwargs)
        for word, default in defaults.items():
            bound.arguments.setdefault(word, default)
        for _, hint, value, place in arguments(signature, bound, hints, name):
            check_tree(value, hint, place, bindings)
        return bindings

    def end(result, bindings: Bindings):
        check_tree(result, hints_of(fn).get("return"), f"result of `{name}`", bindings)
        return result

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if not _on.get():
            return fn(*args, **kwargs)
        with binding(begin(args, kwargs)) as bindings:
            result = fn(*args, **kwargs)
        return end(result, bindings)

    @functools.wraps(fn)
    async def awaited(*args, **kwargs):
        if not _on.get():
            return await fn(*args, **kwargs)
        with binding(begin(args, kwargs)) as bindings:
            result = await fn(*args, **kwargs)
        return end(result, bindings)

    return awaited if inspect.iscoroutinefunction(fn) else call


def arguments(signature, bound, hints, name) -> Iterator[tuple[str, typing.Any, typing.Any, str]]:
    """The arguments of one call: name, annotation, value, and the place for messages."""
    for argument, value in bound.arguments.items():
        hint = hints.get(argument)
        kind = signature.parameters[argument].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for i, item in enumerate(value):
                yield argument, hint, item, f"argument `{argument}[{i}]` of `{name}`"
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for word, item in value.items():
                yield argument, hint, item, f"argument `{word}` of `{name}`"
        else:
            yield argument, hint, value, f"argument `{argument}` of `{name}`"


def check_tree(value, hint, place: str, bindings: Bindings) -> None:
    """Checks a pytree against an annotation: arrays, dataclasses, named tuples, stacks, and containers of them."""
    if hint is None or not array_types(hint):
        return
    for leaf in typed_leaves(value, hint, place):
        if leaf.kind is not None:
            check_array(leaf.value, leaf.kind, leaf.place, bindings)
        for name, kind in leaf.fields.items():
            check_tree(getattr(leaf.value, name), kind, _at(leaf.place, f".{name}"), bindings)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a pytree: where it stands, its value and its annotated type (None if it has none).

    Attributes:
        fields: the annotations of what it holds, if it is a dataclass that JAX takes for one leaf.
    """

    place: str
    value: typing.Any
    kind: ArrayType | None
    fields: Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)


def is_typed_leaf(value) -> bool:
    """Whether a walk along annotations ends here: at a named array, or at None, which no array type describes."""
    return value is None or is_named(value)


def typed_leaves(value, hint, place: str) -> list[Leaf]:
    """The leaves of a pytree in JAX's order (named arrays whole, None kept), with the types that the hint gives them.

    Raises:
        TypeMismatch: the tree is not of the classes that the hint names.
    """
    leaves = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_typed_leaf)[0]
    if not leaves:
        _resolve(hint, (), value, place)
    return [_walk(path, leaf, value, hint, place) for path, leaf in leaves]


def _walk(path, leaf, value, hint, place: str) -> Leaf:
    prefix: tuple = ()
    text = ""
    for key in (*path, None):
        hint, prefix = _resolve(hint, prefix, value, _at(place, text))
        if isinstance(hint, ArrayType):
            if key is not None and not is_array(value):
                raise TypeMismatch(
                    f"expected an array of type {hint}, got {typeof(value)}, in {_at(place, text)}: pass an array, or "
                    f"annotate the container, as in list[{hint!r}]"
                )
            if leaf is None:
                raise TypeMismatch(
                    f"expected an array of type {hint}, got None, in {_at(place, text)}: pass an array, or annotate "
                    f"`{hint!r} | None`"
                )
            return Leaf(_at(place, text), leaf, _stacked(hint, prefix, leaf, _at(place, text)) if prefix else hint)
        if key is None and dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and hint is not None:
            fields = {name: kind for name, kind in fields_of(hint).items() if hasattr(leaf, name)}
            fields = {name: StackType(Shape(prefix), kind) for name, kind in fields.items()} if prefix else fields
            return Leaf(_at(place, text), leaf, None, fields)
        if key is None or hint is None:
            break
        value, hint, word = _step(value, hint, key)
        text += word
    return Leaf(_at(place, text + jax.tree_util.keystr(path) if hint is None and not text else text), leaf, None)


def _stacked(kind: ArrayType, prefix: tuple, value, place: str) -> ArrayType:
    """The type of an array in a stack: what "..." stands for has the array's own sizes and slices."""
    if not (kind.shape.ellipsis and is_array(value)):
        return kind.under(Shape(prefix))
    array = value.array if is_named(value) else value
    more = len(array.shape) - len(prefix) - len(kind.shape.dims)
    if more < 0:
        raise TypeMismatch(
            f"a stack's arrays must have its leading dimensions and those of their annotation, got {typeof(value)} for "
            f"{kind} under '{Shape(prefix)}', in {place}: pass an array of {len(array.shape) - more} dimensions or more"
        )
    between = slice(len(prefix), len(prefix) + more)
    shape = Shape(value.dims if is_named(value) else tuple(map(Dim, array.shape, state_of(array).axes)))
    dims = zip(shape.dims, whole_sizes(shape, array, place), strict=True)
    return kind.with_leading((*prefix, *(Dim(size, dim.axes) for dim, size in [*dims][between])))


def _at(place: str, text: str) -> str:
    """From `argument `w` of `f`` and `.w1`: `argument `w.w1` of `f``."""
    head, tick, rest = place.partition("`")
    if not text:
        return place
    if head.startswith("result"):
        return f"`{text.lstrip('.')}` in {place}"
    name, _, rest = rest.partition("`")
    return f"{head}{tick}{name}{text}`{rest}"


def _resolve(hint, prefix: tuple, value, place: str):
    """Follows stacks and unions down to an array type, a class, a container, or nothing."""
    while True:
        hint = meant(hint)
        if isinstance(hint, StackType):
            hint, prefix = hint.of, (*prefix, *hint.prefix.dims)
            continue
        options = alternatives(hint)
        if len(options) == 1:
            break
        fitting = [option for option in options if _fits(option, value)]
        hint = next((option for option in fitting if _suits(option, value, prefix)), next(iter(fitting), None))
        if hint is None:
            shown = " | ".join(map(hint_text, options))
            raise TypeMismatch(
                f"a value must match one of its annotation's alternatives, got {typeof(value)} for {shown}, in "
                f"{place}: pass a value of one of these types"
            )
    if fields_of(hint) and array_types(hint):
        cls = class_of(hint)
        if not isinstance(value, cls):
            raise TypeMismatch(
                f"a value must be of its annotated class, got {typeof(value)} for {cls.__name__}, in {place}: pass a "
                f"{cls.__name__}"
            )
        hint = hint if type(value) is cls else type(value)
    _check_container(hint, value, place)
    return hint, prefix


def _check_container(hint, value, place: str) -> None:
    """Refuses an array, or a mapping, where a sequence of arrays is annotated, a sequence for a mapping, and a tuple of
    another length."""
    cls, args = class_of(hint), typing.get_args(hint)
    if not (isinstance(cls, type) and issubclass(cls, Sequence | Mapping) and array_types(hint)):
        return
    if is_array(value) or isinstance(value, Mapping if issubclass(cls, Sequence) else Sequence):
        raise TypeMismatch(
            f"a value must be the container of its annotation, got {typeof(value)} for {hint_text(hint)}, in {place}: "
            f"make it a {cls.__name__.lower()}, or correct the annotation"
        )
    if cls is tuple and args and args[-1] is not Ellipsis and isinstance(value, Sequence) and len(value) != len(args):
        raise TypeMismatch(
            f"a tuple must have the length of its annotation, got {len(value)} for {len(args)}, in {place}: pass "
            f"{len(args)}"
        )


def _fits(option, value) -> bool:
    if isinstance(option, StackType):
        return _fits(option.of, value)
    if isinstance(option, ArrayType):
        return is_array(value) and (not is_named(value) or len(option.shape.dims) <= len(value.names))
    origin = typing.get_origin(option) or option
    return isinstance(value, origin) if isinstance(origin, type) else option is typing.Any


def _suits(option, value, prefix: tuple) -> bool:
    """Whether an alternative that fits has an array's dtype, rank and names: of several, that one is meant."""
    if isinstance(option, StackType):
        return _suits(option.of, value, (*prefix, *option.prefix.dims))
    if not isinstance(option, ArrayType):
        return True
    kind, array = option.under(Shape(prefix)), value.array if is_named(value) else value
    more = len(array.shape) - len(kind.shape.dims)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype) if isinstance(array, np.ndarray | np.generic) else array.dtype
    if kind.dtype not in (short_dtype(dtype), "shaped") or more < 0 or (more and not kind.shape.ellipsis):
        return False
    return not is_named(value) or same_names(kind.shape, tuple(value.names))


def _step(value, hint, key):
    """One key of a path: the child, its hint, and how it is written."""
    tree = jax.tree_util
    args = typing.get_args(hint)
    if isinstance(key, tree.GetAttrKey):
        fields = fields_of(hint) or (fields_of(type(value)) if isinstance(value, tuple) else {})
        return getattr(value, key.name), fields.get(key.name), f".{key.name}"
    if isinstance(key, tree.SequenceKey):
        child, word = value[key.idx], f"[{key.idx}]"
        if typing.get_origin(hint) is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            return child, args[key.idx], word
        return child, args[0] if args else None, word
    if isinstance(key, tree.DictKey):
        return value[key.key], args[1] if len(args) == 2 else None, f"[{key.key!r}]"
    return None, None, str(key)
