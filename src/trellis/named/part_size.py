"""The size of a name of which a program sees a part: good for making arrays of it, and for nothing else."""

import functools
import operator
import os
import sys
from typing import Any, NoReturn

from trellis.mesh.layout import current_layout
from trellis.named.axis import NamesError

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def as_seen(sizes: dict[str, int]) -> "dict[str, Any]":
    """The sizes of names as the caller's caller sees them: in a user's layer of a pipeline, a name that is cut has a
    `PartSize`; Trellis itself sees plain numbers."""
    layout = current_layout()
    if layout is None or not layout.cut or sys._getframe(2).f_code.co_filename.startswith(_HERE):
        return sizes
    return {name: PartSize(name, size) if name in layout.cut else size for name, size in sizes.items()}


def by_part(of_layer: str, of_model: str) -> tuple[str, str]:
    """What sees only a part of the rows, a layer of a pipeline or a whole model, and what to do about it."""
    if (layout := current_layout()) is not None and layout.sums:
        return "a model whose batch is cut into parts", f"{of_model}, or train with one microbatch and no stages"
    return "a layer in a pipeline", f"{of_layer}, or remove the layers from the layout's compute"


@functools.total_ordering
class PartSize:
    """How many positions of a name a layer of a pipeline sees: a size, but not a number to compute with.

    On one device the same program sees all of them, so anything computed from their number would differ.

    Args:
        name: the name.
        size: how many positions there are here.
    """

    __slots__ = ("_name", "_size")

    def __init__(self, name: str, size: int):
        self._name, self._size = name, size

    def __index__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return self._size == (other._size if isinstance(other, PartSize) else other)

    def __lt__(self, other: Any) -> bool:
        return self._size < operator.index(other)

    def __hash__(self) -> int:
        return hash(self._size)

    def __repr__(self) -> str:
        return str(self._size)

    def refuse(self, *_: object) -> NoReturn:
        """Says that it is not a number.

        Raises:
            NamesError: always.
        """
        who, fix = by_part("pass the number to the layers as an argument", "write the number out")
        raise NamesError(
            f"{who} must compute each row of '{self._name}' on its own, got a number made from the count of rows, of "
            f"which it sees {self._size}: {fix}"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = refuse
    __neg__ = __pos__ = __abs__ = __float__ = __int__ = __array__ = __jax_array__ = refuse
