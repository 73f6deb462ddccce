"""What configurations and options may hold: one of a few words, or a whole number from 1 on."""

import functools
import numbers
import operator
import typing
from collections.abc import Mapping
from typing import Any, Literal

from trellis.errors import UserError, did_you_mean


def check_choices(config: Any) -> None:
    """Refuses fields whose words are none of those in their types, as in `mode: Literal["explicit", "auto"]`, texts in
    fields that hold several words, or true or false, and what is no number, or no whole one, where that is wanted.

    What is read from a file or a command line has been checked; what a program makes has not. Where a dataclass calls
    this first when it is made, a misspelt word is never taken for another one's opposite.

    Raises:
        UserError: a field, or an element of it, has another word; a field of several words, or of true and false, is a
            text; or a field of a number is none.
    """
    for name in _lists(type(config)):
        if isinstance(value := getattr(config, name), str):
            rule = f"`{name}` must be a tuple of words: of a text, each letter would be one."
            raise UserError(rule, seen=f"{name}={value!r}", where=name, fix=f"write ({value!r},)")
    for name, optional in _flags(type(config)).items():
        if (value := getattr(config, name)) not in (True, False) and not (optional and value is None):
            rule = f"`{name}` must be True or False{' or None' * optional}."
            raise UserError(rule, seen=f"{name}={value!r}", where=name, fix="write one of them, not as a text")
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
