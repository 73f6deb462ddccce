"""The structure of a compiled program: each row of the ledger matched with the collectives that do it.

A row is done if the program has a collective of its kind, over exactly the devices along its mesh axes, of as many
elements as its type says, as often. Compilers may do the same in other ways, of which these are understood:

- several collectives combined into one, a collective split into a start and an end;
- another collective with the same result (`trellis.inspect.ways`): a reduce-scatter as an all-reduce and a slice, a
  collective over several mesh axes as one after the other, or over all of them in the order that a permute after it
  would have made;
- several arrays of a type joined into one, such as those that a loop would move in each turn, moved once after it, and
  arrays that are padded;
- a copy that an equal one has moved before, and what is added before it is summed over devices.

What no row asks for is named. Along mesh axes it is the compiler's own affair, and along axes in auto mode so are the
groups. A collective over other groups of devices is a fault. So are a sum over devices that hold the sum already, a
maximum or minimum over devices that no row takes, a result that should be a copy but may differ from device to device
(`trellis.inspect.copies`), and what hosts move between each other that is in their memory, over their own network.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from jax.sharding import AbstractMesh, Mesh

from trellis.frames import in_a_library
from trellis.inspect.collective import Collective, collectives_in
from trellis.inspect.compiled import program_of
from trellis.inspect.copies import Apart, copies_apart
from trellis.inspect.groups import axes_of, cut
from trellis.inspect.hlo import Instruction, Program, item_bits
from trellis.inspect.matching import Match, Part, matched
from trellis.inspect.rows import Ledger, Row
from trellis.inspect.ways import Key
from trellis.program.pairs import axes_met, axes_of_pairs

# Instructions whose results are their operands, or parts of them.
_VIEWS = ("get-tuple-element", "bitcast", "copy", "reshape", "transpose", "opt-barrier", "all-reduce-done")


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A ledger, matched with a compiled program.

    Attributes:
        matches: the rows of the ledger.
        collectives: how many the program has.
        besides: arrays that it moves along mesh axes and that no row asks for, and how often.
        strange: collectives over groups that are the devices along no mesh axes, unless the compiler chooses them.
        twice: sums of what was summed over the same devices before.
        extremes: maxima and minima along mesh axes along which no row takes one, or in the place of a row's sum that
            nothing was found for.
        apart: results that should be copies and may differ.
        by_hosts: arrays that hosts move between each other.
        auto: mesh axes in auto mode, along which a compiler may make copies in ways that are not followed.
    """

    matches: tuple[Match, ...]
    collectives: int
    besides: tuple[tuple[Part, int], ...]
    strange: tuple[Part, ...]
    twice: tuple[Part, ...]
    extremes: tuple[Part, ...]
    apart: tuple[Apart, ...]
    by_hosts: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()

    @property
    def missing(self) -> list[Match]:
        """Rows that the types alone decide and that nothing, or too little, was found for."""
        return [match for match in self.matches if match.missing and match.certain]

    @property
    def open(self) -> list[Match]:
        """Rows that the types alone do not decide and that nothing, or too little, was found for: no faults."""
        return [match for match in self.matches if match.missing and not match.certain]

    @property
    def right(self) -> bool:
        """Whether every row was found and nothing is wrong."""
        return not (self.missing or self.strange or self.twice or self.extremes or self.apart or self.by_hosts)

    @property
    def certain(self) -> bool:
        """Whether something is surely wrong. A compiler may do what a row asks for, take a maximum that none asks for,
        or make copies along axes in auto mode, rightly but in a way that is not understood."""
        apart = any(set(each.axes) - set(self.auto) for each in self.apart)
        return bool(self.strange or self.twice or apart)

    @property
    def faults(self) -> list[str]:
        """What is wrong, each once."""
        faults = [
            *(f"missing: {match.what}" for match in self.missing),
            *(f"not along mesh axes: {part.what}" for part in self.strange),
            *(f"summed twice: {part.what}" for part in self.twice),
            *(f"not asked for: {part.what}" for part in self.extremes),
            *(f"not the same on all devices: {apart}" for apart in self.apart),
            *(f"between hosts, over their network: {what}" for what in self.by_hosts),
        ]
        return list(dict.fromkeys(faults))

    def on_the_way_of(self, parameter: str) -> list[str]:
        """The collectives that gather a parameter or reduce its gradient, in the program's order: `all-gather data`."""
        rows = [match.row for match in self.matches if match.row.parameter == parameter]
        return list(dict.fromkeys(f"{row.kind} {row.axis}" for row in rows))

    @property
    def line(self) -> str:
        """What was found, in short."""
        found = f"{len(self.matches) - len(self.missing) - len(self.open)} of {len(self.matches)} rows of the ledger"
        chosen = f"; the compiler chose otherwise for {len(self.open)}" if self.open else ""
        besides = f"; besides them {_besides(self.besides)}" if self.besides else ""
        faults = f"; {len(self.faults)} {'faults' if len(self.faults) > 1 else 'fault'}" if self.faults else ""
        return f"{found} are in the {self.collectives} collectives of the compiled program{chosen}{besides}{faults}"

    def __str__(self) -> str:
        """What was found, in which other ways compilers did what the types ask for, and what is wrong."""
        ways = Counter(way for match in self.matches for way, runs in match.ways.items() if way and runs)
        otherwise = [f"  {count} of them as {way}" for way, count in ways.most_common()]
        return "\n".join([self.line, *otherwise, *(f"  {fault}" for fault in self.faults)])

    def as_dict(self) -> dict:
        """What was found, as plain data."""
        return {
            "right": self.right,
            "rows": len(self.matches),
            "collectives": self.collectives,
            "ways": dict(Counter(way for m in self.matches for way, runs in m.ways.items() if way and runs)),
            "besides": [{"what": part.what, "times": times} for part, times in self.besides],
            "faults": self.faults,
        }


def structure_of(ledger: Ledger, compiled, mesh: Mesh | AbstractMesh) -> Structure:
    """Matches a ledger with a compiled program.

    Args:
        ledger: of the function.
        compiled: what `jax.jit(f).lower(...).compile()` returns, or its text. JAX's `as_text()` leaves out tables of
            more than ten devices, without which copies are not followed.
        mesh: the mesh it was compiled for.
    """
    program = program_of(compiled)
    found = list(collectives_in(program, mesh.size))
    parts = [part for collective in found for part in _parts(program, collective, mesh)]
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    matches, rest = matched(ledger, (part for part in parts if part.axes), sizes)
    decided = tuple(match for match in matches if not (match.missing and _may_go(match.row, ledger.auto)))
    as_a_rule = lambda part: part.cut == 1 and not part.partly  # others have to be asked for
    besides = [(part, runs) for part, runs in rest if as_a_rule(part)]
    strange = [part for part in parts if not part.axes] + [part for part, _ in rest if not as_a_rule(part)]
    chosen = _chosen(matches, ledger.auto)
    strange = [part for part in strange if not {*axes_met(part.collective.groups, mesh.shape)} <= chosen(part)]
    if 1 not in mesh.shape.values():  # a sum over an axis of one device is over groups of one
        strange += [part for collective in found if _alone(collective) for part in _pieces(program, collective, ())]
    asked = {(row.reduction, axis) for row in (*ledger, *ledger.instead) for axis in row.axes}
    sums = {match.key for match in matches if match.missing}
    # In manual mode a number has no type before and after, and nothing of it is pending.
    whole = {frozenset(row.axes) for row in ledger if row.kind == "all-reduce" and row.what.split() == ["->"]}
    extremes = (part for part, _ in besides if not _taken(part) <= asked or _for_a_sum(part) in sums)
    return Structure(
        matches=decided,
        collectives=len(found),
        besides=tuple(besides),
        strange=tuple(strange),
        twice=tuple(_twice(program, parts, mesh.shape)),
        extremes=tuple(part for part in extremes if not set(part.axes) & set(ledger.auto)),
        apart=tuple(copies_apart(program, mesh.shape, whole)),
        by_hosts=tuple(_between_hosts(program)),
        auto=ledger.auto,
    )


def _chosen(matches: Iterable[Match], auto: Iterable[str]) -> Callable[[Part], set[str]]:
    """The mesh axes among whose devices a compiler chooses what a collective is over: those in auto mode, and, for what
    sums nothing, those of the rows of its line that types do not decide; of all lines, if it is said to be of none."""
    open_at: dict[str, set[str]] = {}
    for match in matches:
        if not match.certain:
            for line in (match.row.source, ""):
                open_at.setdefault(line, set()).update(match.row.axes)
    moves = lambda part: part.collective.kind not in ("all-reduce", "reduce-scatter")
    return lambda part: {*auto, *(open_at.get(part.source, ()) if moves(part) else ())}


def _between_hosts(program: Program) -> Iterator[str]:
    """Arrays that hosts move: libtpu does so if what is to be moved is in their memory."""
    for instruction in program.by_name.values():
        if instruction.op != "custom-call" or _target(instruction) != "MegaScaleCollectiveOutputStart":
            continue
        caller = program.callers.get(program.homes[instruction.name])
        if caller is not None and _target(caller) == "HostExecute":
            kind = (instruction.quoted("_xla_host_transfer_rendezvous") or "a collective").split(".")[0]
            made = instruction.results[0]
            yield f"{kind} of {made.dtype}[{' '.join(map(str, made.shape))}]"


def _target(call: Instruction) -> str | None:
    return call.quoted("custom_call_target")


def _may_go(row: Row, auto: tuple[str, ...]) -> bool:
    """Whether a compiler may do something other than a row says, or know what becomes of what it moves."""
    return row.constant or bool(set(row.axes) & set(auto))


def _taken(part: Part) -> set[tuple[str, str]]:
    """What a maximum or minimum over devices takes along which axes: one axis after another does as well."""
    reduction = part.collective.reduction
    return set() if reduction == "sum" else {(reduction, axis) for axis in part.axes}


def _for_a_sum(part: Part) -> Key | None:
    """The sum that a maximum or minimum over devices is in the place of, if nothing else is found for that."""
    return None if part.collective.reduction == "sum" else part.key._replace(kind="all-reduce")


def _alone(collective: Collective) -> bool:
    """Whether it is a sum of numbers in which each device is alone."""
    numbers = any(math.prod(array.shape) == 1 for array in collective.arrays)
    return collective.kind == "all-reduce" and collective.size == 1 and numbers


def _parts(program: Program, collective: Collective, mesh: Mesh | AbstractMesh) -> list[Part]:
    """The arrays of a collective; none if each device is alone in it, since nothing moves."""
    kind, groups = collective.kind, collective.groups
    if all(len(set(group)) == 1 for group in groups):
        return []
    if kind == "permute":
        axes = axes_of_pairs(groups, mesh.shape)
        partly = () if axes else axes_of_pairs(groups, mesh.shape, some=True)
        return _pieces(program, collective, axes or partly, partly=bool(partly))
    axes = axes_of(groups, mesh.shape, ordered=kind != "all-reduce")
    return _pieces(program, collective, axes, math.prod(mesh.shape[axis] for axis in axes) // collective.size)


def _pieces(
    program: Program, collective: Collective, axes: tuple[str, ...], cut: int = 1, partly: bool = False
) -> list[Part]:
    kind = collective.kind
    lengths = [(collective.payload(array) * 8 // item_bits(array.dtype), array.dtype) for array in collective.arrays]
    if kind == "all-to-all":  # the pieces of one array
        lengths = [(sum(length for length, _ in lengths), lengths[0][1])]
    source = program.source(collective.origin, in_a_library)
    filled = _filled(program, collective)
    return [Part(collective, axes, *each, source, cut, partly, own) for each, own in zip(lengths, filled)]


def _filled(program: Program, collective: Collective) -> list[int]:
    """How many elements each array of a sum has without the padding that the program has just added; 0 if none."""
    operands = program.by_name[collective.name].operands
    if collective.kind not in ("all-reduce", "reduce-scatter") or len(operands) != len(collective.arrays):
        return [0] * len(collective.arrays)
    return [_unpadded(program, operand) for operand in operands]


def _unpadded(program: Program, operand: str) -> int:
    made = _behind(program, operand)
    if made is not None and made.op == "fusion":
        made = program.root(made.called()["calls"][0])
    if made is None or made.op != "pad":
        return 0
    return sum(math.prod(array.shape) for array in program.by_name[made.operands[0]].results)


def _twice(program: Program, parts: Iterable[Part], mesh: Mapping[str, int]) -> Iterator[Part]:
    """Sums over devices whose operand is such a sum already, over some of the same devices."""
    sums = {part.collective.name: part for part in parts if part.collective.kind in ("all-reduce", "reduce-scatter")}
    over = {name: set(axes_of(part.collective.groups, cut(mesh))) for name, part in sums.items()}
    for name, part in sums.items():
        for operand in program.by_name[name].operands:
            before = _behind(program, operand)
            adds = before and before.op.startswith("all-reduce") and program.combined_by(before) == "add"
            if adds and over.get(before.name, set()) & over[name]:
                yield part
                break


def _behind(program: Program, name: str) -> Instruction | None:
    """The instruction that a value is a view of."""
    instruction = program.by_name.get(name)
    while instruction is not None and instruction.op in _VIEWS and instruction.operands:
        instruction = program.by_name.get(instruction.operands[0])
    return instruction


def _besides(rest: Iterable[tuple[Part, int]]) -> str:
    """What no row asks for, in short."""
    counts = Counter[str]()
    for part, runs in rest:
        of = "a number" if part.elements == 1 else f"{part.elements} elements"
        counts[f"{part.collective.kind} of {of} over {', '.join(part.axes)}"] += runs
    most = [f"{count} x {what}" for what, count in counts.most_common(3)]
    return ", ".join([*most, f"{len(counts) - 3} more"] if len(counts) > 3 else most)
