"""An axis: a name and a size. Wherever an operation takes a name it takes an axis too, and checks its size."""

import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping

from trellis.errors import TrellisError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class NamesError(TrellisError, ValueError):
    """A name that is absent, repeated or of the wrong size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """A named length, `Axis("embed", 64)`.

    Raises:
        NamesError: the name is not one word, or the size is not a whole number from 0 on.
    """

    name: str
    size: int

    def __post_init__(self):
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            raise NamesError(
                f"an axis needs a name of letters, digits and '_', got {self.name!r}, in Axis({self.name!r}, "
                f"{self.size!r}): write Axis('embed', 64)"
            )
        try:
            size = operator.index(self.size)
        except TypeError:
            size = -1
        if size < 0:
            raise NamesError(
                f"an axis needs a size of 0 or more, got {self.size!r}, in Axis({self.name!r}, {self.size!r}): pass a "
                "whole number"
            )

    def alias(self, name: str) -> "Axis":
        """The same length under another name (keys have `key_pos` where queries have `pos`)."""
        return Axis(name, self.size)

    def resize(self, size: int) -> "Axis":
        """The same name with another length."""
        return Axis(self.name, size)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


# What functions that take one name, several names, or several new axes accept.
Name = str | Axis
Names = str | Axis | Iterable[str | Axis]
Axes = Axis | Iterable[Axis] | Mapping[str, int]


def axes_of(axes: Axes, what: str = "an operation") -> tuple[Axis, ...]:
    """Reads new axes: an `Axis`, several of them, or a dict from names to sizes.

    Args:
        axes: the axes.
        what: the function that makes them, for messages.

    Raises:
        NamesError: something else, or a name twice.
    """
    if isinstance(axes, Axis):
        axes = (axes,)
    if isinstance(axes, Mapping):
        return tuple(Axis(name, _plain(size)) for name, size in axes.items())
    found = () if isinstance(axes, str) or not isinstance(axes, Iterable) else tuple(axes)
    if (not found and not isinstance(axes, tuple | list)) or not all(isinstance(a, Axis) for a in found):
        raise NamesError(
            f"new axes must have names and sizes, got {axes!r}, in {what}: write {{'batch': 4, 'embed': 8}} or "
            "(Axis('batch', 4), Axis('embed', 8))"
        )
    once(tuple(a.name for a in found), what)
    return tuple(a if type(a.size) is int else Axis(a.name, _plain(a.size)) for a in found)


def _plain(size):
    """A size as a plain int, if it is a part's or a scalar of NumPy's; others are checked where they are used."""
    return operator.index(size) if hasattr(size, "__index__") else size


def name_of(name: Name, what: str) -> str:
    """The text of a name or an axis, for a dimension that is new or looked for in several arrays.

    Raises:
        NamesError: it is neither, or not one word.
    """
    if isinstance(name, Axis):
        return name.name
    if not isinstance(name, str):
        raise NamesError(f"a dimension must be given by its name, got {name!r}, in {what}: pass the name as a string")
    if not _NAME.match(name):
        raise NamesError(f"a name must be one word, got {name!r}, in {what}: pass one name, or several in a tuple")
    return name


def once(names: tuple[str, ...], what: str) -> None:
    """Refuses a name that stands twice.

    Raises:
        NamesError: with all the names.
    """
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise NamesError(
            f"a name must stand for one dimension only, got '{' '.join(names)}', in {what}: give the second '{twice}' "
            "another name"
        )
