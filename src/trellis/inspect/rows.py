"""A communication, and a table of them: what the ledger and the reader of compiled programs share."""

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping

from trellis.errors import did_you_mean
from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.program.moves import KINDS, wire_bytes

# An optimizer's rows, like those of a program that nobody differentiates, are forward.
DIRECTIONS = ("forward", "recomputed", "backward", "")
EACH_TURN = "once a turn of a while loop"  # the note of a row that runs as often as nobody knows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One communication.

    Attributes:
        kind: one of `KINDS`.
        axes: the mesh axes it runs over, jointly.
        what: the value, as `before -> after` in the notation if its names are known.
        dtype: as JAX writes it.
        payload: bytes on one device, see `trellis.program.moves`.
        wire: bytes one device sends, once.
        times: how often it runs in a call of the function.
        direction: "forward", "recomputed" or "backward", or empty if it is not known.
        source: `file.py:line (function)`.
        note: what is uncertain about it, or how it runs; usually empty.
        role: what it moves: "weights" (gathered before use), "gradients" (of weights) or "activations"; empty if that
            is not known.
        ring: whether it is a step of a ring, which runs beside the kernels or products of the same line.
        parts: into how many parts a batch is cut, of which it moves one while the others compute.
        down: whether it is a permute in which most devices send to earlier ones. One down and one up use links at once.
        parameter: the path of the parameter that is gathered, or whose gradient is reduced; empty for anything else.
        reduction: what an all-reduce or a reduce-scatter takes of what devices hold: "sum", "maximum" or "minimum".
        same: in how many of its runs it moves the same array, which a compiler may move once for all of them: turns of
            loops that do not change it.
        twin: whether, in manual mode, an earlier one moves the same array in the same way: a compiler may do only one.
        tiles: in how many tiles of a TPU, of 8 rows of 128 numbers, what one device has of it lies.
        turns: in how many turns of loops that are written out it has its like, each a row.
        constant: whether no argument has a part in what it moves: a compiler may know what becomes of it.
        added: the number of the operation that adds what it brings to others, if nothing else reads it; else -1.
        gathered: whether what it sums is gathered along its mesh axes, too: a compiler may sum what that brings.
        number, made, read: the numbers of its operation, of that which makes what it moves, and of the first that reads
            what comes.
        awaited: whether layers read what comes, or wait for it: a fence has it beside what they read.
        payloads: of a collective that moves several arrays at once, the payload of each.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    dtype: str
    payload: int
    wire: int
    times: int = 1
    direction: str = ""
    source: str = ""
    note: str = ""
    role: str = ""
    ring: bool = False
    parts: int = 1
    down: bool = False
    parameter: str = ""
    reduction: str = "sum"
    same: int = 1
    twin: bool = False
    constant: bool = False
    tiles: int = dataclasses.field(default=0, compare=False, repr=False)
    turns: int = dataclasses.field(default=1, compare=False, repr=False)
    added: int = dataclasses.field(default=-1, compare=False, repr=False)
    gathered: bool = dataclasses.field(default=False, compare=False, repr=False)
    number: int = dataclasses.field(default=-1, compare=False, repr=False)
    made: int = dataclasses.field(default=-1, compare=False, repr=False)
    read: int = dataclasses.field(default=-1, compare=False, repr=False)
    awaited: bool = dataclasses.field(default=False, compare=False, repr=False)
    payloads: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def axis(self) -> str:
        """The mesh axes as one word: `data`, or `data,model` for a joint collective."""
        return ",".join(self.axes)

    @property
    def total(self) -> int:
        """Bytes one device sends in a call of the function."""
        return self.wire * self.times


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every communication of a function, as rows and as sums.

    Attributes:
        rows: in program order.
        mesh: the sizes of the mesh axes that were met.
        auto: mesh axes in auto mode, along which the compiler moves what it likes: rows are what it is told.
        instead: rows of a conditional's other branches than the largest, which may run instead of its rows.
    """

    rows: tuple[Row, ...]
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    auto: tuple[str, ...] = ()
    instead: tuple[Row, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, *, kind: str | None = None, axis: str | None = None, direction: str | None = None) -> "Ledger":
        """The rows of one kind, over one mesh axis (alone or jointly with others) or jointly over several (`"x,y"`),
        in one direction.

        Raises:
            ValueError: there is no such kind, mesh axis or direction.
        """
        over = axis.split(",") if axis is not None else []
        axes = sorted({*self.mesh, *(name for row in self.rows for name in row.axes)} or over)
        asked = [(kind, KINDS, "kind"), (direction, DIRECTIONS, "direction"), *((each, axes, "axis") for each in over)]
        for word, known, what in asked:
            if word is not None and word not in known:
                raise ValueError(
                    f"a ledger's rows can only be of {what} {' or '.join(filter(None, known))}, got {word!r}: "
                    f"{did_you_mean(word, known)}"
                )
        rows = (
            row
            for row in self.rows
            if (kind is None or row.kind == kind)
            and (axis is None or axis in row.axes or set(over) == {*row.axes})
            and (direction is None or row.direction == direction)
        )
        return dataclasses.replace(self, rows=tuple(rows))

    def total(self, *, kind: str | None = None, axis: str | None = None, direction: str | None = None) -> int:
        """Bytes one device sends, over the rows that `select` picks."""
        return sum(row.total for row in self.select(kind=kind, axis=axis, direction=direction).rows)

    def count(self, *, kind: str | None = None, axis: str | None = None, direction: str | None = None) -> int:
        """How many collectives run, over the rows that `select` picks."""
        return sum(row.times for row in self.select(kind=kind, axis=axis, direction=direction).rows)

    def per_axis(self) -> dict[str, int]:
        """Bytes one device sends over each mesh axis.

        A joint gather or reduction over `data,model` moves as many bytes as one over each axis after the other, and
        is split that way; a joint all-to-all or permute is not, and has an entry of its own, `data,model`, in the
        mesh's order.
        """
        sums: collections.Counter[str] = collections.Counter()
        for row in self.rows:
            for axis, wire in self.split(row):
                sums[axis] += wire * row.times
        return dict(sorted(sums.items()))

    def split(self, row: Row) -> list[tuple[str, int]]:
        """The bytes of one row for each of its mesh axes: an all-gather goes over the last of the mesh's axes first,
        when the array is smallest, and a reduce-scatter over it last, which is as many bytes.

        >>> row = Row(kind="all-gather", axes=("x", "y"), what="", dtype="f32", payload=800, wire=700)
        >>> Ledger((row,), {"x": 4, "y": 2}).split(row)
        [('y', 100), ('x', 600)]
        """
        if len(row.axes) == 1 or not set(row.axes) <= set(self.mesh):
            return [(row.axis, row.wire)]
        order = list(self.mesh)
        if row.kind in ("all-to-all", "permute"):
            return [(",".join(sorted(row.axes, key=order.index)), row.wire)]
        size = math.prod(self.mesh[axis] for axis in row.axes)
        held, parts = 1, []
        for axis in sorted(row.axes, key=order.index, reverse=True):
            held *= self.mesh[axis]
            parts.append((axis, wire_bytes(row.kind, self.mesh[axis], held * row.payload) // size))
        return parts

    def per_kind(self) -> dict[str, int]:
        """Bytes one device sends with each kind of collective."""
        sums: collections.Counter[str] = collections.Counter()
        for row in self.rows:
            sums[row.kind] += row.total
        return {kind: sums[kind] for kind in KINDS if sums[kind]}

    @property
    def chosen(self) -> str:
        """That the compiler chooses along axes in auto mode, in words; empty without any."""
        chosen = f"the compiler chooses what moves along {', '.join(self.auto)} (auto mode)" if self.auto else ""
        return f"{chosen}; rows are what the program tells it" if chosen and self.rows else chosen

    def as_dict(self) -> dict:
        """Everything as plain data."""
        rows = [dataclasses.asdict(row) | {"axes": list(row.axes), "total": row.total} for row in self.rows]
        return {"mesh": dict(self.mesh), "rows": rows, "per_axis": self.per_axis(), "total": self.total()}

    def to_json(self) -> str:
        """`as_dict`, as JSON."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        if not self.rows:
            return self.chosen or "no communication"
        merged: dict[Row, int] = {}
        for row in self.rows:  # the same thing at the same place is one line, counted
            key = dataclasses.replace(row, times=1, parameter="", down=False, same=1)
            merged[key] = merged.get(key, 0) + row.times
        lines = [
            (
                row.kind,
                row.axis,
                f"{row.dtype}[{row.what.removeprefix(' -> ')}]",
                numbers.size(row.wire),
                str(times),
                numbers.size(row.wire * times),
                row.direction,
                row.source + (f"  ({row.note})" if row.note else ""),
            )
            for row, times in merged.items()
        ]
        header = ("collective", "axis", "of", "bytes", "times", "total", "in", "at")
        sums = ", ".join(f"{axis} {numbers.size(total)}" for axis, total in self.per_axis().items())
        foot = f"each device sends {numbers.size(self.total())} in {self.count()} collectives: {sums}"
        return "\n".join(filter(None, (aligned(header, lines, right=(3, 4, 5)), foot, self.chosen)))
