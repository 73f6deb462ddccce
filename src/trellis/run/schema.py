"""Configurations as plain data and back: frozen dataclasses, unions told apart by a tag, mappings, tuples, literals.

The dataclasses of a union are told apart by a field whose type in each of them is a literal of one value, as in
`kind: Literal["adamw"] = "adamw"`. The same walk over the types reads YAML, command lines and help texts.
"""

import ast
import dataclasses
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Union

import numpy as np

from trellis.choices import out_of_range
from trellis.errors import UserError, did_you_mean, shortened
from trellis.frozen import FrozenMap

REQUIRED = dataclasses.MISSING
# Says where the value at a dotted path came from; with further paths, those of values that it does not go with.
Origin = Callable[..., str]


class _OutOfRange(UserError):
    """A value has its field's type and is none that a run can hold."""


class Field(NamedTuple):
    """One field of a configuration; `default` is REQUIRED if there is none."""

    name: str
    type: Any
    default: Any
    doc: str


@functools.cache
def fields_of(cls: Any) -> dict[str, Field]:
    """The fields of a dataclass, with types resolved; docs are the strings under them, or in their types."""
    hints, said = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    docs = {name: _said(hint) for name, hint in said.items()} | _docs(cls)
    found = {}
    for field in dataclasses.fields(cls):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        found[field.name] = Field(field.name, hints[field.name], default, docs[field.name])
    return found


def _said(hint: Any) -> str:
    """The doc in a type, as in `Annotated[int, "Tokens in the vocabulary."]`, which several dataclasses can share."""
    return next((said for said in getattr(hint, "__metadata__", ()) if isinstance(said, str)), "")


def _docs(cls: type) -> dict[str, str]:
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # there is no source, as in a REPL or a frozen application
        return {}
    docs, body = {}, written.body if isinstance(written, ast.ClassDef) else []
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                docs[field.target.id] = " ".join(text.value.value.split())
    return docs


def members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type is its own only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


@functools.cache
def tag_of(cls: Any) -> tuple[str, str] | None:
    """The field that tells a variant of a union from the others, and its one value."""
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        for name, field in fields_of(cls).items():
            if typing.get_origin(field.type) is Literal and len(values := typing.get_args(field.type)) == 1:
                return name, values[0]
    return None


def tag_field(tagged: Mapping[str, type]) -> str:
    """The name of the field that tells tagged dataclasses apart."""
    return next(tag[0] for cls in tagged.values() if (tag := tag_of(cls)))


@functools.cache
def variants(kind: Any) -> Mapping[str, type]:
    """The tagged dataclasses in a type, by the value of their tag."""
    tagged = [(tag_of(member), member) for member in members(kind)]
    return {tag[1]: member for tag, member in tagged if tag}


def variant_in(kind: Any, data: Any) -> type | None:
    """The dataclass that plain data is for, if the type has one and the data says which."""
    classes = [m for m in members(kind) if dataclasses.is_dataclass(m) and isinstance(m, type)]
    if len(classes) == 1:
        return classes[0]
    tagged = variants(kind)
    tag = next((tag_of(c) for c in tagged.values()), None)
    return tagged.get(data.get(tag[0])) if tag and isinstance(data, Mapping) else None


def show(kind: Any) -> str:
    """A type as a user reads it.

    >>> show(int | None), show(tuple[str, ...]), show(Literal["none", "full"])
    ('int or null', 'list of str', 'none | full')
    """
    if kind in (None, type(None)):
        return "null"
    if len(members(kind)) > 1:
        tagged = variants(kind)
        others = [show(m) for m in members(kind) if m not in tagged.values()]
        return " or ".join([" | ".join(tagged)] * bool(tagged) + others)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"list of {show(args[0])}"
    if origin and issubclass(origin, Mapping):
        return f"map to {show(args[1])}"
    return "{" + ", ".join(fields_of(kind)) + "}" if dataclasses.is_dataclass(kind) else kind.__name__


def _written(kind: Any) -> str:
    """A type as a user writes it: for entries with fields, only those without a default."""
    if dataclasses.is_dataclass(kind):
        needed = {name: field for name, field in fields_of(kind).items() if field.default is REQUIRED}
        return "{" + ", ".join(f"{name}: {_written(field.type)}" for name, field in needed.items()) + "}"
    if typing.get_origin(kind) is tuple:
        return f"[{_written(typing.get_args(kind)[0])}, ...]"
    if typing.get_origin(kind) is Mapping:
        return f"{{name: {_written(typing.get_args(kind)[1])}}}"
    if len(members(kind)) > 1 and not variants(kind):
        return " or ".join(map(_written, members(kind)))
    return show(kind)


def plain(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars, every field written out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value  # a program may have given a NumPy number


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def build(kind: Any, data: Any, path: str = "", origin: Origin = lambda path, *_: f"`{path}`") -> Any:
    """A value of type `kind` from plain data.

    Args:
        kind: a dataclass, or any type that a field may have.
        data: dictionaries, lists and scalars, as YAML gives them.
        path: the dotted path of the data, for messages.
        origin: says where a value came from.

    Raises:
        UserError: a key is unknown or missing, a value has another type, or a constraint of the dataclass does not
            hold.
    """
    if len(members(kind)) > 1:
        return _build_union(kind, data, path, origin)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), data, path, origin)
    container, args = typing.get_origin(kind), typing.get_args(kind)
    if container is Literal:
        if data in args and type(data) in {type(a) for a in args}:
            return data
        raise _wrong(kind, data, path, origin, did_you_mean(str(data), args))
    if container is tuple and isinstance(data, list | tuple):
        items = tuple(build(args[0], item, _join(path, i), origin) for i, item in enumerate(data))
        words = args[0] is str or typing.get_origin(args[0]) is Literal
        if words and (twice := [item for item in items if items.count(item) > 1]):
            rule, seen, where = f"`{path}` must have each of its words once.", f"{twice[0]} twice", origin(path)
            raise UserError(rule, seen=seen, where=where, fix="leave one of them out")
        return items
    if container and container is not tuple and isinstance(data, Mapping):
        return FrozenMap({str(key): build(args[1], item, _join(path, key), origin) for key, item in data.items()})
    if kind in (None, type(None)) and data is None:
        return None
    if kind is float and isinstance(data, int | str) and not isinstance(data, bool):
        try:  # YAML 1.1 reads 3e-4, which has no point, as text
            data = float(data)
        except ValueError:
            pass
        except OverflowError:
            data = math.inf
    if container is None and kind is not type(None) and type(data) is kind:
        return _within_range(data, path, origin)
    raise _wrong(kind, data, path, origin)


def _within_range(data: Any, path: str, origin: Origin) -> Any:
    if beyond := out_of_range(data):
        rule, fix = beyond
    elif isinstance(data, str) and "\0" in data:
        rule, fix = "Text cannot contain a NUL byte.", "remove it"
    elif isinstance(data, str) and re.search("[\ud800-\udfff]", data):  # what Python makes of bytes that are not UTF-8
        rule, fix = "Text must be valid UTF-8.", "write it in UTF-8"
    else:
        return data
    raise _OutOfRange(rule, seen=shortened(repr(data), 80), where=origin(path), fix=fix)


_EXAMPLES = {
    int: "write a whole number, as in 8",
    float: "write a number, as in 0.001",
    bool: "write true or false",
    str: "write text, in quotes if YAML would read it as something else",
}


def _wrong(kind: Any, data: Any, path: str, origin: Origin, fix: str = "") -> UserError:
    seen = "null" if data is None else f"{shortened(repr(data), 80)} ({type(data).__name__})"
    rule = f"`{path}` must be {'one of' if typing.get_origin(kind) is Literal else 'of type'} {show(kind)}."
    if isinstance(data, str) and variants(kind):
        fix = did_you_mean(data, variants(kind))
    if data is None and ":" in path.rpartition(".")[2]:
        fix = "write a space after the colon"
    choices = [example for member in members(kind) if (example := _EXAMPLES.get(member))]
    return UserError(rule, seen=seen, where=origin(path), fix=fix or " or ".join(choices) or f"write {_written(kind)}")


def _build_union(kind: Any, data: Any, path: str, origin: Origin) -> Any:
    tagged = variants(kind)
    if isinstance(data, Mapping) and tagged:
        if cls := variant_in(kind, data):
            return _build_dataclass(cls, data, path, origin)
        name = tag_field(tagged)
        seen = f"{name}: {shortened(repr(data[name]), 80)}" if name in data else f"no `{name}`"
        fix = did_you_mean(str(data.get(name)), tagged) if name in data else f"write {name}: {' | '.join(tagged)}"
        raise UserError(f"`{path}` must have a known `{name}`.", seen=seen, where=origin(_join(path, name)), fix=fix)
    fitting = [m for m in members(kind) if m not in tagged.values() and _shape(m) is _shape(type(data))]
    for member in fitting:
        try:
            return build(member, data, path, origin)
        except _OutOfRange:
            raise
        except UserError:
            if len(fitting) == 1 and _shape(member) is not str:
                raise  # it is the union's only list, or map: what is wrong is inside
    raise _wrong(kind, data, path, origin)


def _shape(kind: Any) -> type:
    """The kind of YAML that a type is written in: dictionary, list or scalar."""
    base = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(base) or (isinstance(base, type) and issubclass(base, Mapping)):
        return dict
    return list if base in (list, tuple) else type(None) if base in (None, type(None)) else str


def _build_dataclass(cls: type, data: Any, path: str, origin: Origin) -> Any:
    if type(data) is cls:
        return data
    if not isinstance(data, Mapping):
        raise UserError(
            f"`{path}` must be written as its fields: {', '.join(fields_of(cls))}.",
            seen=shortened(repr(data), 80),
            where=origin(path),
            fix=f"set a field by its name, as in {_join(path, next(iter(fields_of(cls))))}",
        )
    fields = fields_of(cls)
    for key in data:
        if key not in fields:
            rule = f"`{path or cls.__name__}` has no field of this name."
            raise UserError(rule, seen=f"`{key}`", where=origin(_join(path, key)), fix=did_you_mean(str(key), fields))
    missing = [name for name, field in fields.items() if field.default is REQUIRED and name not in data]
    if missing:
        where = origin(path) if path else cls.__name__
        added = "--{} ({})" if where.startswith("--") else "{}: {}"  # as it is written there
        raise UserError(
            "A field without a default must be set.",
            seen=f"no {', '.join(f'`{_join(path, name)}`' for name in missing)}",
            where=where,
            fix=f"add {', '.join(added.format(_join(path, n), _written(fields[n].type)) for n in missing)}",
        )
    values = {name: build(fields[name].type, item, _join(path, name), origin) for name, item in data.items()}
    try:
        return cls(**values)
    except UserError as error:  # a constraint of the dataclass, which does not know its own path
        first = error.where if error.where.startswith(f"{path}.") else _join(path, error.where)
        others = [_join(path, name) for name in re.findall(r"([\w.]+)=", error.seen)]
        raise UserError(error.rule, seen=error.seen, where=origin(first, *others), fix=error.fix) from None


def at_least(bound: int, **values: float | None) -> None:
    """Refuses fields, given by name, whose values are below a bound. None is not a value."""
    for name, value in values.items():
        if value is not None and not value >= bound:  # so that NaN is refused, too
            raise UserError(
                f"`{name}` must be {bound} or more.", seen=f"{name}={value}", where=name, fix=f"use {bound} or more"
            )
