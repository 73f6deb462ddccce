"""What is given to this folder's functions and classes: a value of another type is refused where it is given."""

import operator
import os
from typing import Any

import numpy as np

from trellis.errors import UserError, shortened


def whole(value: Any, name: str, where: str, *, least: int = 0) -> int:
    """A whole number of any kind as Python's, which has no size.

    >>> whole(np.uint8(200), "keep", "open_store") + 200
    400

    Raises:
        UserError: it is none, or below `least`.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise _wrong(f"a whole number, {least} or more", value, name, where, f"use {max(least, 1)}, for example")
    return number


def flag(value: Any, name: str, where: str) -> bool:
    """True or False, also as 1 or 0.

    Raises:
        UserError: it is something else, such as the text "no", which Python takes for true.
    """
    if not (isinstance(value, bool | int | np.bool_) and value in (True, False)):
        raise _wrong("True or False", value, name, where, "write one of them")
    return bool(value)


def path(value: Any, name: str, where: str) -> str:
    """A path or a URL as a text.

    Raises:
        UserError: it is neither a text nor a path.
    """
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str):
        raise _wrong("a path or a URL", value, name, where, "write it as a text, or as a pathlib.Path")
    return found


def _wrong(what: str, value: Any, name: str, where: str, fix: str) -> UserError:
    return UserError(f"`{name}` must be {what}.", seen=f"{name}={shortened(repr(value), 80)}", where=where, fix=fix)
