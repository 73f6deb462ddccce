"""An axis: a name and a size."""

import dataclasses
from collections.abc import Mapping

from trellis.errors import TrellisError


class NamesError(TrellisError, ValueError):
    """A name that is absent, repeated or of the wrong size."""


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """A named length, `Axis("embed", 64)`."""

    name: str
    size: int

    def alias(self, name: str) -> "Axis":
        """The same length under another name (keys have `key_pos` where queries have `pos`)."""
        return Axis(name, self.size)

    def resize(self, size: int) -> "Axis":
        """The same name with another length."""
        return Axis(self.name, size)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


Axes = "Axis | Iterable[Axis] | Mapping[str, int]"


def axes_of(axes) -> tuple[Axis, ...]:
    """Reads axes from an `Axis`, several of them, or a dict from names to sizes."""
    if isinstance(axes, Axis):
        return (axes,)
    if isinstance(axes, Mapping):
        return tuple(Axis(name, size) for name, size in axes.items())
    return tuple(axes)
