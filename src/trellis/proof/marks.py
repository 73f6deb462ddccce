"""The values of a program while it runs, as a few numbers each, and where those of two programs part ways."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trellis.frames import in_a_library
from trellis.inspect.hlo import Instruction, Program
from trellis.program.scopes import names_of
from trellis.proof.interpreter import Interpreter, Team, Value

# How far apart two values of one meaning may be, as a share of their size.
_APART = 1e-3


@dataclasses.dataclass(frozen=True)
class Mark:
    """A value, in short.

    Attributes:
        order: its place among all values of the run.
        instruction: what made it.
        shape: on one device.
        sums: for each device its sum, its sum of squares, and a sum with weights that tell places apart: `device 3`.
    """

    order: int
    instruction: Instruction
    shape: tuple[int, ...]
    sums: np.ndarray


class Recorder:
    """Marks every value of a run that is floats; give its `observe` to an `Interpreter`.

    Attributes:
        marks: by the instruction's name, one for each time that it ran.
    """

    def __init__(self) -> None:
        self.marks: dict[str, list[Mark]] = {}
        self._count = 0

    def observe(self, instruction: Instruction, value: Value, team: Team) -> None:
        """Marks one value."""
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or instruction.op in _SILENT:
            return
        rows = value.reshape(len(value), -1)
        sums = np.zeros((len(rows), 3))
        for block, start in enumerate(range(0, rows.shape[1], _BLOCK)):
            sums += _sums(rows[:, start : start + _BLOCK], block)
        self._count += 1
        mark = Mark(self._count, instruction, value.shape[1:], sums)
        self.marks.setdefault(instruction.name, []).append(mark)


# Operations that only pass on a value that was marked before.
_SILENT = ("bitcast", "constant", "copy", "get-tuple-element", "opt-barrier", "parameter", "reshape", "transpose")


# How many entries of a device are summed at a time, so that large values are not copied.
_BLOCK = 1 << 16


def _sums(rows: np.ndarray, block: int) -> np.ndarray:
    rows, first = rows.astype(np.float64), block * 7919 % _BLOCK  # other weights in each block
    return np.stack([rows.sum(1), (rows * rows).sum(1), rows @ _weights()[first : first + rows.shape[1]]], -1)


@functools.cache
def _weights() -> np.ndarray:
    return np.random.default_rng(0).choice([-1.0, 1.0], 2 * _BLOCK)


def recorded(program: str, arguments: Sequence[np.ndarray], devices: int) -> dict[str, list[Mark]]:
    """The marks of a run."""
    recorder = Recorder()
    Interpreter(program, devices, observe=recorder.observe)(arguments)
    return recorder.marks


def first_apart(before: Mapping[str, list[Mark]], after: Mapping[str, list[Mark]]) -> tuple[Mark, int] | None:
    """The first value of a run that differs from that of the same name in another run, and in which turn it was.

    Arrays come before numbers: counts and sums of the loss are moved about more often than they are wrong.
    """
    apart = [
        (not mine.shape, mine.order, mine, turn)
        for name, marks in after.items()
        for turn, (mine, other) in enumerate(zip(marks, before.get(name, ())))
        if mine.shape == other.shape and not _same(mine.sums, other.sums)
    ]
    return min(apart, key=lambda entry: entry[:2])[2:] if apart else None


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    if not np.isfinite(a).all():
        return not np.isfinite(b).all()
    sizes = np.sqrt(np.maximum(a[:, 1], b[:, 1])) + 1e-30
    return bool((np.abs(a[:, 2] - b[:, 2]) <= _APART * sizes).all())


def first_unlike(before: Mapping[str, list[Mark]], after: Mapping[str, list[Mark]], devices: int) -> Mark | None:
    """The first value of a partitioned run that the whole one does not have under the same operation's name.

    What the devices hold together is the whole, once or several times; for a pending sum, only the sum is.

    Args:
        before: marks of the program on whole arrays.
        after: of the same program on each device's parts.
        devices: how many there are.
    """
    known: dict[str, list[Mark]] = {}
    for mark in _all(before):
        known.setdefault(_meaning(mark.instruction), []).append(mark)
    for mine in sorted(_all(after), key=lambda mark: mark.order):
        others = known.get(_meaning(mine.instruction))
        if others and not any(_covers(mine.sums, other.sums, devices) for other in others):
            return mine
    return None


def _all(marks: Mapping[str, list[Mark]]) -> Iterable[Mark]:
    return (mark for several in marks.values() for mark in several)


def _meaning(instruction: Instruction) -> str:
    """The operation in the user's program that an instruction is of, if it says so, and the instruction's kind."""
    return f"{instruction.quoted('op_name') or ''} {instruction.op}"


def _covers(parts: np.ndarray, whole: np.ndarray, devices: int) -> bool:
    """Whether the devices' parts are a whole, held a number of times that divides the number of devices."""
    times = devices // len(parts)
    total, squares = parts[:, 0].sum() * times, parts[:, 1].sum() * times
    size = np.sqrt(whole[0, 1]) + 1e-30
    counts = (n for n in range(1, devices + 1) if devices % n == 0)
    return any(
        abs(total - n * whole[0, 0]) <= _APART * n * size and abs(squares - n * whole[0, 1]) <= _APART * n * whole[0, 1]
        for n in counts
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is in the user's program.

    Attributes:
        what: the operation that made it, as the compiler names it.
        type: its type on one device, with the names of its dimensions if the program's scopes have them.
        source: `file.py:line (function)`, or empty.
        scope: the scopes around it.
    """

    what: str
    type: str
    source: str
    scope: str

    def __str__(self) -> str:
        return f"{self.what}, {self.type}" + (f", at {self.source}" if self.source else "")


def place_of(instruction: Instruction, program: Program) -> Place:
    """Where an instruction comes from, by its metadata, or by that of what is inside or around it."""
    own = instruction
    if not own.quoted("op_name"):
        inside = [program.computations.get(name, []) for names in instruction.called().values() for name in names]
        named = [i for several in inside for i in several if i.quoted("op_name")]
        own = named[-1] if named else instruction
    scope = own.quoted("op_name") or ""
    dtype, _, rest = instruction.type.partition("[")
    sizes = [size for size in rest.partition("]")[0].split(",") if size]
    names = names_of(scope, len(sizes))
    shape = " ".join(f"{name}={size}" for name, size in zip(names, sizes)) if names else " ".join(sizes)
    text = f"{re.sub('^s(?=[0-9])', 'i', dtype)}[{shape}]"
    return Place(f"{instruction.op} {instruction.name}", text, program.source(own, in_a_library), scope)
