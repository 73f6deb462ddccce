"""What configurations and options may hold: values of their fields' types, words of a few, numbers of a range."""

import dataclasses
import functools
import numbers
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from trellis.errors import UserError, did_you_mean, shortened
from trellis.frozen import FrozenMap

# Devices count in 32 bits and compute in float32: a number that is too large for that, or so small that it would become
# 0, is a mistake.
_MOST_WHOLE = 2**31 - 1
_LEAST_NUMBER, _MOST_NUMBER = 1.2e-38, 3.4e38


def check_choices(config: Any) -> None:
    """Refuses fields whose values are not of their types: words that are none of those in `mode: Literal["explicit",
    "auto"]`, texts where several words, true or false, a number or a configuration are wanted, and numbers that devices
    cannot hold.

    What is read from a file or a command line has been checked; what a program makes has not. Where a dataclass calls
    this first when it is made, a misspelt word is never taken for another one's opposite. Lists become tuples, and
    dictionaries maps that cannot be changed; numbers of NumPy become Python's, and 0 and 1 False and True where one of
    these is wanted.

    Raises:
        UserError: a field, or an element of it, has another word; a field of several words, or of true and false, is a
            text; a field of a number is none, or it is out of range; or a value is of another type.
    """
    for name in _kinds(type(config)):
        if isinstance(value := getattr(config, name), list | dict):
            object.__setattr__(config, name, tuple(value) if isinstance(value, list) else FrozenMap(value))
        elif isinstance(value, np.generic):  # files have no numbers of NumPy
            object.__setattr__(config, name, value.item())
    for name in _lists(type(config)):
        if isinstance(value := getattr(config, name), str):
            rule = f"`{name}` must be a tuple of words: of a text, each letter would be one."
            raise UserError(rule, seen=f"{name}={value!r}", where=name, fix=f"write ({value!r},)")
    for name, optional in _flags(type(config)).items():
        if (value := getattr(config, name)) not in (True, False) and not (optional and value is None):
            rule = f"`{name}` must be True or False{' or None' * optional}."
            raise UserError(rule, seen=f"{name}={value!r}", where=name, fix="write one of them, not as a text")
        if value is not None:  # 1 is one of them, but not in a file
            object.__setattr__(config, name, bool(value))
    for name, (kind, optional) in _numbers(type(config)).items():
        value, known = getattr(config, name), numbers.Integral if kind is int else numbers.Real
        if (isinstance(value, bool) or not isinstance(value, known)) and not (optional and value is None):
            rule = f"`{name}` must be a {'whole ' * (kind is int)}number{' or None' * optional}."
            raise UserError(rule, seen=f"{name}={value!r}", where=name, fix="write one")
    for name, (words, optional) in _choices(type(config)).items():
        value = getattr(config, name)
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
        for item in items:
            if item not in words and not (optional and item is None):
                raise UserError(
                    f"`{name}` must be one of {', '.join(words)}{' or None' * optional}.",
                    seen=f"{name}={item}",
                    where=name,
                    fix=did_you_mean(str(item), words),
                )
    for name, kind in _kinds(type(config)).items():
        if not _fits(value := getattr(config, name), kind):
            made = _made(kind)
            meant = [known for known in made if known.lower() == str(value).lower()] or made
            raise UserError(
                f"`{name}` must be {_told(kind)}.",
                seen=f"{name}={shortened(repr(value), 80)}",
                where=name,
                fix=f"make one, as in {meant[0]}(...)" if made else "write one",
            )
        if beyond := out_of_range(value, whole=int in _members(kind)):
            raise UserError(beyond[0], seen=f"{name}={value!r}", where=name, fix=beyond[1])


def out_of_range(value: Any, *, whole: bool = True) -> tuple[str, str] | None:
    """The rule that a number breaks and how to mend it, if devices cannot hold it; None for anything else.

    Args:
        value: anything.
        whole: whether a whole number stays one.
    """
    if isinstance(value, numbers.Integral) and whole:
        if abs(int(value)) > _MOST_WHOLE:
            most = f"A whole number must fit in 31 bits: its magnitude can be at most {_MOST_WHOLE:,}."
            return most, "use a smaller number"
    elif isinstance(value, numbers.Real) and value and not _LEAST_NUMBER <= abs(float(value)) <= _MOST_NUMBER:
        rule = f"A number must fit in float32: 0, or a magnitude from {_LEAST_NUMBER} to {_MOST_NUMBER}."
        return rule, "use a number in that range; to turn something off, use null where the field allows it"
    return None


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1 on that is known while the program is traced."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        return False


@functools.cache
def _choices(cls: type) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """The words of fields that have some, and whether None is a value, too."""
    kinds = typing.get_type_hints(cls)
    words = {name: _words(kind) for name, kind in kinds.items()}
    return {name: (known, type(None) in typing.get_args(kinds[name])) for name, known in words.items() if known}


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """The fields of a dataclass, with their types."""
    kinds = typing.get_type_hints(cls)
    return {field.name: kinds[field.name] for field in dataclasses.fields(cls)}


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other type is its own only member."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _made(kind: Any) -> list[str]:
    """The names of the configurations in a type, and in its tuples."""
    of_tuples = [typing.get_args(member)[0] for member in _members(kind) if typing.get_origin(member) is tuple]
    return [member.__name__ for member in (*_members(kind), *of_tuples) if dataclasses.is_dataclass(member)]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type that a field may have: a union, literal, tuple, map, configuration or scalar."""
    if len(members := _members(kind)) > 1:
        # Where families are told apart, a program may bring one of its own (examples/own_family.py).
        own_family = dataclasses.is_dataclass(value) and hasattr(value, "family")
        return any(_fits(value, member) or own_family and hasattr(member, "family") for member in members)
    container, args = typing.get_origin(kind), typing.get_args(kind)
    if container is Literal:
        return value in args
    if container is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if isinstance(container, type) and issubclass(container, Mapping):
        return (
            isinstance(value, Mapping)
            and all(_fits(each, args[0]) for each in value)
            and all(_fits(each, args[1]) for each in value.values())
        )
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if kind is bool:
        return value in (True, False)
    return value is None if kind in (None, type(None)) else not isinstance(kind, type) or isinstance(value, kind)


def _told(kind: Any) -> str:
    """Words for a type, as a program writes it.

    >>> _told(int | None), _told(tuple[str, ...])
    ('a whole number or None', 'a tuple, each of it a text')
    """
    if len(members := _members(kind)) > 1:
        *first, last = map(_told, members)
        return f"{', '.join(first)} or {last}"
    container, args = typing.get_origin(kind), typing.get_args(kind)
    if container is Literal:
        return f"one of {', '.join(map(str, args))}"
    if container is tuple:
        return f"a tuple, each of it {_told(args[0])}"
    if isinstance(container, type) and issubclass(container, Mapping):
        return f"a map from texts, each to {_told(args[1])}"
    scalars = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
    name = getattr(kind, "__name__", str(kind))
    return scalars.get(kind) or f"a{'n' * (name[0] in 'AEIO')} {name}"


@functools.cache
def _lists(cls: type) -> list[str]:
    """The fields that hold several values."""
    return [name for name, kind in typing.get_type_hints(cls).items() if typing.get_origin(kind) is tuple]


@functools.cache
def _flags(cls: type) -> dict[str, bool]:
    """The fields that are true or false, and whether None is a value, too."""
    kinds = typing.get_type_hints(cls)
    return {name: kind is not bool for name, kind in kinds.items() if kind is bool or kind == bool | None}


@functools.cache
def _numbers(cls: type) -> dict[str, tuple[type, bool]]:
    """The fields that are one number: whether whole ones or any, and whether None is a value, too."""
    kinds = typing.get_type_hints(cls)
    each = [(name, number, kind) for name, kind in kinds.items() for number in (int, float)]
    return {name: (number, kind is not number) for name, number, kind in each if kind in (number, number | None)}


def _words(kind: Any) -> tuple[Any, ...]:
    """The words of a type: a literal, or that of a map's values, of a tuple's elements, or of a union with None."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    found = [words for part in typing.get_args(kind) if (words := _words(part))]
    return found[0] if len(found) == 1 else ()
