"""Along which mesh axes the values of a compiled program may differ, and whether its copies stay copies.

A program is read once, for all devices. Arguments differ along the axes that their shardings slice them over, and the
number of a device along all axes. A sum or a gather is the same along the axes that it is over, and anything else
differs where one of its operands may. Small integers are computed for every device, so that an offset from a table
differs along the axis that the table is for, and not along others. Arrays that are laid end to end, such as for one
sum, are told apart again. For others in one array, such as for one product, it is not known which is taken out again:
it counts as the same where one of them is, so that nothing right is taken for wrong.

A number that is summed over some of the axes along which it differs is still part of a sum: it may be added to others,
scaled, and summed over the rest, and nothing else. But if the ledger has a sum of a number over just these axes, and
nothing of it is pending, it is whole: what each stage of a pipeline counts of its own part of a batch.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from trellis.frames import in_a_library
from trellis.inspect.collective import KINDS
from trellis.inspect.groups import axes_of, cut, uncut
from trellis.inspect.hlo import Instruction, Program, replica_groups, source_target_pairs
from trellis.inspect.numbers import LARGEST, constant_of, left_out, numbers_of
from trellis.program.pairs import axes_met

Owed = frozenset[tuple[str, str]]  # mesh axes, each with the name of a sum


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a value, or of all parts of a tuple.

    Attributes:
        axes: the mesh axes along which it may differ.
        numbers: what each device holds, `device dim ...`, for small integers that are known.
        pieces: for arrays that are laid end to end, their lengths and the axes along which each may differ.
        owed: for a number that is part of a sum, the axes over which it is still to be summed, each with the name of
            the sum before.
    """

    axes: frozenset[str]
    numbers: np.ndarray | None = None
    pieces: tuple[tuple[int, frozenset[str]], ...] = ()
    owed: Owed = frozenset()

    def map(self, change: Callable[[frozenset[str]], frozenset[str]]) -> "Known":
        """The same with other axes, piece by piece."""
        return Known(change(self.axes), None, tuple((length, change(axes)) for length, axes in self.pieces))


Value = Known | tuple
NOWHERE: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Apart:
    """A value that should be the same along a mesh axis, and may not be.

    Attributes:
        what: the argument that it replaces, the number that it is, or what it is used for.
        axes: the mesh axes.
        source: `file.py:line (function)`, of what made it.
    """

    what: str
    axes: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return f"{self.what} over {', '.join(self.axes)}" + (f", from {self.source}" if self.source else "")


def copies_apart(program: Program, mesh: Mapping[str, int], whole: Collection[frozenset[str]] = ()) -> list[Apart]:
    """Values that may differ between devices that should hold copies.

    These are results (numbers, and what replaces an argument), and numbers that are used before they are summed over
    all the devices on which they differ.

    Args:
        program: a compiled one.
        mesh: sizes of the mesh axes.
        whole: mesh axes that numbers are summed over which then are no part of a sum.

    Returns:
        Nothing where an argument's sharding is not known, as in programs of JAX 0.12 for CPUs, or where a table is left
        out of the text.
    """
    constants = (i for instructions in program.computations.values() for i in instructions if i.op == "constant")
    if any(left_out(constant) for constant in constants):
        return []
    aliases = program.aliases
    reading = Reading(program, mesh, whole)
    parameters = sorted(
        (i for i in program.computations[program.entry] if i.op == "parameter"), key=lambda i: int(i.literal)
    )
    given = [reading.argument(parameter) for parameter in parameters]
    if None in given:
        return []
    root = next(i for i in program.computations[program.entry] if i.root)
    found = reading.run(program.entry, given)
    parts = found if isinstance(found, tuple) else (found,) * len(root.results)
    names = root.operands if root.op == "tuple" else [root.name] * len(parts)
    apart = []
    for index, (value, array, name) in enumerate(zip(parts, root.results, names)):
        what, may = f"result {index}", NOWHERE
        if index in aliases:
            what = parameters[aliases[index]].quoted("op_name") or what
            may = given[aliases[index]].axes
        elif array.shape:
            continue
        if wrong := uncut(_axes(value) - may, mesh):
            apart.append(Apart(what, wrong, program.source(program.by_name[name], in_a_library)))
    for name, owed in reading.unfinished.items():
        source = program.source(program.by_name[name], in_a_library)
        apart.append(Apart("a number that is used as a sum", uncut(owed, mesh), source))
    return apart


class Reading:
    """One reading of a program.

    Args:
        program: a compiled one.
        mesh: sizes of the mesh axes.
        whole: as in `copies_apart`.

    Attributes:
        unfinished: by name, sums of numbers that were used although they are still owed sums over these axes.
    """

    def __init__(self, program: Program, mesh: Mapping[str, int], whole: Collection[frozenset[str]] = ()):
        self.program = program
        self.whole = {frozenset(cut({axis: mesh[axis] for axis in axes})) for axes in whole}
        self.mesh = cut(mesh)  # a compiler may gather, or sum, over a part of an axis, and over the rest of it later
        self.everywhere = frozenset(self.mesh)
        self.devices = math.prod(self.mesh.values())
        self.unfinished: dict[str, set[str]] = {}

    def argument(self, parameter: Instruction) -> Known | None:
        """An argument, by its sharding; None if that is not known."""
        groups = _alike(parameter.attribute("sharding") or "", self.devices)
        if groups is None:
            return None
        same = axes_of(groups, self.mesh) if len(groups[0]) > 1 else ()
        if math.prod(self.mesh[axis] for axis in same) != len(groups[0]):
            return None
        return Known(self.everywhere - set(same))

    def run(self, computation: str, arguments: Sequence[Value]) -> Value:
        """A computation's result."""
        values: dict[str, Value] = {}
        result: Value = Known(NOWHERE)
        for instruction in self.program.computations[computation]:
            if instruction.op == "parameter":
                made = arguments[int(instruction.literal)]
            else:
                made = self._made(instruction, [values[name] for name in instruction.operands], values)
            values[instruction.name] = made
            if instruction.root:
                result = made
        return result

    def _made(self, instruction: Instruction, operands: list[Value], values: Mapping[str, Value]) -> Value:
        op, called = instruction.op, instruction.called()
        if op.endswith(("-done", "-update")) or op == "copy-start":
            return operands[0]
        op = op.removesuffix("-start")
        if op in KINDS:
            return self._collective(instruction, op, operands)
        if op == "tuple":
            return tuple(operands)
        if op == "get-tuple-element":
            return _part(operands[0], int(instruction.attribute("index") or 0))
        if op in ("fusion", "call", "async"):
            (name,) = called.get("calls") or called["to_apply"]
            return self.run(name, operands)
        if op == "while":
            return self._loop(called["condition"][0], called["body"][0], operands[0])
        if op == "conditional":
            branches = called.get("branch_computations") or called["true_computation"] + called["false_computation"]
            found = [self.run(name, [value]) for name, value in zip(branches, operands[1:])]
            return _more(_joined(found), _axes(operands[0]))
        return self._plain(instruction, operands, values)

    def _plain(self, instruction: Instruction, operands: list[Value], values: Mapping[str, Value]) -> Value:
        if instruction.op in ("partition-id", "replica-id"):
            one = instruction.op == "replica-id"
            numbers = np.zeros(self.devices, np.uint32) if one else np.arange(self.devices, dtype=np.uint32)
            return self._of(numbers)
        if instruction.op == "constant":
            return Known(NOWHERE, constant_of(instruction))
        if instruction.op in ("recv", "infeed"):
            return Known(self.everywhere)
        if operands and isinstance(operands[0], tuple) and instruction.op in ("copy", "opt-barrier"):
            return operands[0]
        if instruction.op == "custom-call" and "AsyncCollectiveStart" in instruction.attributes:
            # It passes on what the collective was given, which fusions after it gather once more.
            behind = self.program.by_name[instruction.operands[0]].operands
            operands = [*operands, *(values[name] for name in behind)]
        elif instruction.op == "custom-call" and "AsyncCollectiveDone" in instruction.attributes:
            return operands[2]
        axes = NOWHERE.union(*map(_axes, operands))
        if pieces := _pieces(instruction, operands, [self.program.by_name[name] for name in instruction.operands]):
            return Known(frozenset.intersection(*(own for _, own in pieces)), None, pieces)
        if instruction.op == "concatenate":
            return Known(frozenset.intersection(*map(_axes, operands)))
        known = [value.numbers for value in operands if isinstance(value, Known) and value.numbers is not None]
        if len(known) == len(operands) > 0:
            numbers = numbers_of(instruction, known)
            if numbers is not None and numbers.size <= LARGEST * len(numbers):
                return self._of(numbers)
        return Known(axes, owed=self._owed(instruction.op, [v for v in operands if isinstance(v, Known)]))

    def _owed(self, op: str, operands: list[Known]) -> Owed:
        """What a value that is made of others is owed; if it is not linear in what is owed, that is noted."""
        owed = Owed().union(*(value.owed for value in operands))
        if not owed or op in _LINEAR:
            return owed
        wrong = owed
        if op == "select":
            wrong = operands[0].owed
        elif op == "multiply":
            wrong = {
                each for own, other in itertools.permutations(operands) for each in own.owed if each[0] in other.axes
            }
        elif op == "divide":
            wrong = {each for each in owed if each[0] in operands[1].axes}
        for axis, name in wrong:
            self.unfinished.setdefault(name, set()).add(axis)
        return owed - wrong

    def _of(self, numbers: np.ndarray) -> Known:
        """Numbers that are known, `device dim ...`, or one row of them for all devices."""
        if len(numbers) == 1:
            return Known(NOWHERE, numbers)
        grid = numbers.reshape(*self.mesh.values(), -1)
        differ = [axis for i, axis in enumerate(self.mesh) if (grid != grid.take([0], axis=i)).any()]
        return Known(frozenset(differ), numbers)

    def _collective(self, instruction: Instruction, op: str, operands: list[Value]) -> Value:
        if op == "collective-permute":
            sources = np.full(self.devices, -1)
            for source, target in source_target_pairs(instruction.attribute("source_target_pairs") or ""):
                sources[target] = source
            return _each(operands, lambda axes: self._brought(sources, axes))
        groups = instruction.groups() or [tuple(range(self.devices))]
        over = frozenset(axes_of(groups, self.mesh)) if len(groups[0]) > 1 else NOWHERE
        if op in ("all-reduce", "all-gather", "collective-broadcast"):
            found = _each(operands, lambda axes: axes - over)
            adds = op == "all-reduce" and self.program.combined_by(instruction) == "add"
            return self._summed(instruction, found) if adds and over not in self.whole else found
        met = frozenset(axes_met(groups, self.mesh))
        if op == "ragged-all-to-all":
            return Known(met.union(*map(_axes, operands)))
        return _each(operands, lambda axes: axes | met)

    def _brought(self, sources: np.ndarray, axes: frozenset[str]) -> frozenset[str]:
        """The axes along which devices differ in what they get from a permute, if what is sent differs along others.

        Args:
            sources: for each device the one whose value it gets; -1 for none, which makes zeros.
            axes: those of the value that was sent.
        """
        value = np.zeros(self.devices, int)  # devices that hold the same have the same number
        for axis, place in zip(self.mesh, np.indices([*self.mesh.values()]).reshape(-1, self.devices)):
            value = value * self.mesh[axis] + place if axis in axes else value
        return self._of(np.where(sources < 0, -1, value[sources])).axes

    def _summed(self, instruction: Instruction, found: Value) -> Value:
        """The numbers among what was summed are owed sums over the axes along which they still differ.

        An array of one element is no number: it may be each device's own slice, of one row.
        """
        parts = found if isinstance(found, tuple) else (found,)
        numbers = [not array.shape for array in instruction.results]
        owed = [
            Owed((axis, instruction.name) for axis in part.axes) if one else Owed() for part, one in zip(parts, numbers)
        ]
        made = [dataclasses.replace(part, owed=own) for part, own in zip(parts, owed)]
        return tuple(made) if isinstance(found, tuple) else made[0]

    def _loop(self, condition: str, body: str, state: Value) -> Value:
        """What a loop carries, whichever turn is its last."""
        while True:
            going = _axes(self.run(condition, [state]))
            new = _more(_joined([state, self.run(body, [state])]), going)
            if _same(new, state):
                return new
            state = new


# Operations that are linear in their operands.
_LINEAR = ("add", "bitcast", "broadcast", "concatenate", "convert", "copy", "dynamic-slice", "dynamic-update-slice",
           "negate", "opt-barrier", "pad", "reduce", "reduce-precision", "reshape", "slice", "subtract",
           "transpose")  # fmt: skip


def _axes(value: Value) -> frozenset[str]:
    """The mesh axes along which a value, or a part of it, may differ."""
    return NOWHERE.union(*map(_axes, value)) if isinstance(value, tuple) else value.axes


def _part(value: Value, index: int) -> Value:
    return value[index] if isinstance(value, tuple) and index < len(value) else Known(_axes(value))


def _each(operands: list[Value], change: Callable[[frozenset[str]], frozenset[str]]) -> Value:
    """For one operand, the result; for several, a tuple of results."""
    found = [value.map(change) if isinstance(value, Known) else Known(change(_axes(value))) for value in operands]
    return tuple(found) if len(found) > 1 else found[0]


Pieces = tuple[tuple[int, frozenset[str]], ...]


def _pieces(instruction: Instruction, operands: list[Value], made: list[Instruction]) -> Pieces:
    """The pieces of a long array: laid end to end here, passed on, or cut out of it."""
    if instruction.op == "concatenate" and len(made[0].results[0].shape) == 1:
        own = [(value.pieces or ((m.results[0].shape[0], value.axes),)) for value, m in zip(operands, made)]
        return tuple(piece for several in own for piece in several)
    pieces = operands[0].pieces if operands and isinstance(operands[0], Known) else ()
    if pieces and instruction.op == "slice":
        begin, end = re.findall(r"\d+", instruction.attribute("slice") or "")[:2]
        return _cut(pieces, int(begin), int(end))
    same = pieces and made[0].results[0].shape == instruction.results[0].shape
    return pieces if same and instruction.op in ("bitcast", "copy", "convert") else ()


def _cut(pieces: Pieces, begin: int, end: int) -> Pieces:
    """The pieces between two places.

    >>> _cut(((4, frozenset()), (6, frozenset({"data"}))), 2, 5)
    ((2, frozenset()), (1, frozenset({'data'})))
    """
    found, at = [], 0
    for length, axes in pieces:
        if begin < at + length and at < end:
            found.append((min(end, at + length) - max(begin, at), axes))
        at += length
    return tuple(found)


def _more(value: Value, axes: frozenset[str]) -> Value:
    """The value, which may differ along more axes."""
    if isinstance(value, tuple):
        return tuple(_more(part, axes) for part in value)
    return Known(value.axes | axes, owed=value.owed) if axes - value.axes else value


def _joined(values: Sequence[Value]) -> Value:
    """What is known of a value that is one of these."""
    if all(isinstance(value, tuple) and len(value) == len(values[0]) for value in values):
        return tuple(_joined(parts) for parts in zip(*values))
    if any(isinstance(value, tuple) for value in values):
        return Known(NOWHERE.union(*map(_axes, values)))
    first = values[0].numbers
    agreed = first is not None and all(v.numbers is not None and np.array_equal(v.numbers, first) for v in values)
    if agreed:
        return values[0]
    return Known(NOWHERE.union(*(value.axes for value in values)), owed=Owed().union(*(value.owed for value in values)))


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, tuple) or isinstance(b, tuple):
        return False
    return (a.axes, a.owed) == (b.axes, b.owed) and (a.numbers is None) == (b.numbers is None)


def _alike(sharding: str, devices: int) -> list[tuple[int, ...]] | None:
    """Devices that hold the same part of an argument, by its sharding as XLA writes it; None for another form.

    >>> _alike("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 4)
    [(0, 1), (2, 3)]
    >>> _alike("{mesh['data'=2,'model'=2], [{'data'}, {}]}", 4)
    [(0, 1), (2, 3)]
    >>> _alike("{replicated}", 2)
    [(0, 1)]
    """
    text = sharding.strip()
    if text in ("{replicated}", "{mesh[], replicated}"):
        return [tuple(range(devices))]
    if found := re.fullmatch(r"\{devices=\[([\d,]+)\](<=\S+?)( last_tile_dim_replicate)?\}", text):
        sizes = [int(size) for size in found[1].split(",")]
        copies = sizes[-1] if found[3] else 1
        return replica_groups(f"[{math.prod(sizes) // copies},{copies}]{found[2]}")
    if found := re.fullmatch(r"\{(mesh\[[^\]]*\](?:, device_ids=\(.*?\)\)?)?), \[(.*)\]\}", text):
        sliced = set(re.findall(r"'([^']+)'", found[2]))
        others = [axis for axis in re.findall(r"'([^']+)'=", found[1]) if axis not in sliced]
        if ":(" in found[2]:  # a part of an axis
            return None
        if not others:
            return [(device,) for device in range(devices)]
        return replica_groups(f"{found[1]} {{{', '.join(map(repr, others))}}}")
    return None
