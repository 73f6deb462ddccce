"""Something that a device holds: a kind, a name, a type, bytes; and what the values of a program are called."""

import dataclasses

from trellis.program import Operation, Program, Value
from trellis.program.flow import MOVES, VIEWS, origin
from trellis.program.reading import ENTER, LEAVE
from trellis.program.scopes import names_of
from trellis.program.sizes import typed

KINDS = ("parameters", "optimizer", "gradients", "activations", "weights in use", "batch", "temporaries",
         "fragmentation", "other")  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Something that one device holds.

    Attributes:
        kind: one of `KINDS`.
        name: what it is called: the path of an argument, a name given by `save`, or the operation that made it.
        what: its type in the notation.
        num_bytes: on one device.
        source: `file.py:line (function)`, if that is known.
    """

    kind: str
    name: str
    what: str
    num_bytes: int
    source: str = ""


def given_name(value: Value) -> str:
    """The name that `save` (`checkpoint_name`) gave to a value, or to what it is a view of; or nothing."""
    seen = value
    while seen is not None:
        if mark := _mark(seen):
            return mark
        maker = seen.maker
        if maker is not None and maker.mark:
            return maker.mark
        seen = maker.operands[0] if maker is not None and maker.name in VIEWS else None
    return ""


def _mark(value: Value) -> str:
    """The name that a value is given where it is read, inside the `shard_map` that made it or outside."""
    for reader in value.readers:
        mark = reader.mark
        if reader.name in (ENTER, LEAVE):
            mark = _mark(reader.results[reader.operands.index(value)])
        if mark:
            return mark
    return ""


def describe(value: Value, reader: Operation, program: Program) -> tuple[str, str, str]:
    """Name, type in the notation, and line of a value; what a loop stacks goes by what makes its slices.

    Args:
        value: the value.
        reader: the operation that makes it, or has it made by reading it.
        program: that it is in.
    """
    slices, name = value, given_name(value)
    while slices.maker is not None and slices.maker.bodies:
        slices = slices.maker.bodies[-1].results[slices.position]
        name = name or given_name(slices)
        while slices.maker is not None and slices.maker.name in VIEWS and slices.maker.operands[0].literal is None:
            slices = slices.maker.operands[0]
    maker = slices.maker or reader
    first = origin(slices)
    if not name and first.maker is None and first in program.inputs and maker.name in MOVES:
        name = program.arguments[program.inputs.index(first)].name
    if not name:
        looped = slices.maker is None and slices.outer is not None
        name = "carry between layers" if looped else f"{maker.name} in {maker.label}".removesuffix(" in ")
    return name, typed(value.aval, _dims(maker.scope, value.shape), value.placed), maker.source or reader.source


def _dims(scope: str, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Names for the dimensions, if the scope has them; a loop stacks a dimension without a name before them."""
    stacked = names_of(scope, len(shape) - 1)
    return names_of(scope, len(shape)) or ((str(shape[0]), *stacked) if stacked else None)
