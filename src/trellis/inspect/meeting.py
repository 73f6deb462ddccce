"""Whether a compiled program's collectives are ordered by what it computes, or only by what XLA adds to it."""

from typing import Any

from trellis._compat import keep_programs_that
from trellis.inspect.collective import KINDS
from trellis.inspect.hlo import Instruction, Program, parse_program
from trellis.mesh.platform import are_cpus

_CONTROL = ("while", "conditional", "call")


def keep_what_loads_right() -> bool:
    """From here on, JAX neither stores in its cache nor loads programs for CPUs that `in_order` says would go wrong.

    Returns whether JAX can be told so.
    """
    return keep_programs_that(_loads_right)


def _loads_right(executable: Any) -> bool:
    """Whether a compiled program (JAX's `LoadedExecutable`) computes the same once it is loaded."""
    client = getattr(executable, "client", None)  # what is compiled for a machine that is not at hand has none
    if client is None or client.device_count() == 1 or not are_cpus(client.devices()):
        return True
    return all(in_order(module.to_string(), loaded=True) for module in executable.hlo_modules())


def in_order(hlo: str, *, loaded: bool) -> bool:
    """Whether the collectives of a program for CPUs meet in one order on all devices.

    XLA's CPU backend runs operations at once that do not wait for each other's values, and all collectives of a kind
    meet under one key. A resource that they share makes them begin in the program's order. But a loop, branch or call
    has begun when it is called: what comes after it and does not read what it makes may meet what is still to come
    inside (docs/published-bugs.md, 21). In a program that was loaded from a cache, what is inside does not even share
    the resource (38).

    Args:
        hlo: the compiled program's text.
        loaded: whether it was loaded, so that what stands before a loop has to be waited for, too.
    """
    if not any(f" {name}(" in hlo for name in KINDS) or not any(f" {name}(" in hlo for name in _CONTROL):
        return True
    meetings = _Meetings(parse_program(hlo))
    return all(meetings.ordered(name, loaded) for name in meetings.program.computations)


class _Meetings:
    """Where the devices of a program meet."""

    def __init__(self, program: Program):
        self.program = program
        self.found: dict[str, bool] = {}

    def inside(self, computation: str) -> bool:
        """Whether devices meet in a computation."""
        if computation not in self.found:
            self.found[computation] = any(map(self.at, self.program.computations[computation]))
        return self.found[computation]

    def at(self, instruction: Instruction) -> bool:
        """Whether devices meet in an instruction, or in what it runs."""
        return instruction.op in KINDS or any(map(self.inside, _runs(instruction)))

    def ordered(self, computation: str, loaded: bool) -> bool:
        """Whether the meetings of a computation wait for each other, unless something else makes them: collectives
        that stand beside each other share their resource, loaded or not."""
        if not self.inside(computation):
            return True
        after: dict[str, int] = {}  # for each value, the meetings that it waits for, a bit for each
        last = 0  # what the collective before waits for, and itself
        before, bit = 0, 1  # the meetings that the next one has to wait for, and its own bit
        for instruction in self.program.computations[computation]:
            waits = 0
            for operand, element in self.read_by(instruction):
                waits |= after[self.source(operand, element)]
            if self.at(instruction):
                direct = instruction.op in KINDS
                waits |= last if direct else 0
                if waits & before != before:
                    return False
                waits |= bit
                before |= 0 if direct and not loaded else bit
                last, bit = waits if direct else last, bit << 1
            after[instruction.name] = waits
        return True

    def read_by(self, instruction: Instruction) -> list[tuple[str, int | None]]:
        """The operands of an instruction that it reads, each whole (None) or an element of a tuple."""
        given, computations = instruction.operands, _runs(instruction)
        if instruction.op == "get-tuple-element":
            return [(given[0], _index(instruction))]
        if not computations:
            return [(operand, None) for operand in given]
        if instruction.op == "conditional":  # each branch has its own operand
            inner = [(name, given[1 + number : 2 + number]) for number, name in enumerate(computations)]
            read: list[tuple[str, int | None]] = [(given[0], None)]
        else:  # a loop's body and condition have its one operand, a call has all of them
            inner, read = [(name, given) for name in computations], []
        for name, operands in inner:
            for number, operand in enumerate(operands):
                read += [(operand, element) for element in _used(self.program.computations[name], number)]
        return read

    def source(self, value: str, element: int | None) -> str:
        """What makes an element of a value; if a loop passes it on as it is, what made it before the loop."""
        while element is not None:
            made = self.program.by_name[value]
            if made.op == "tuple":
                value, element = made.operands[element], None
            elif made.op == "while" and self.passes(made, element):
                value = made.operands[0]
            else:
                break
        return value

    def passes(self, loop: Instruction, element: int) -> bool:
        """Whether a loop passes an element on as it is."""
        end = self.program.root(loop.called()["body"][0])
        if end is None or end.op != "tuple":
            return False
        result = self.program.by_name[end.operands[element]]
        return (
            result.op == "get-tuple-element"
            and _index(result) == element
            and self.program.by_name[result.operands[0]].op == "parameter"
        )


def _runs(instruction: Instruction) -> list[str]:
    """The computations of a loop, a branch or a call, in the order of their operands."""
    if instruction.op not in _CONTROL:
        return []
    return [name for names in instruction.called().values() for name in names]


def _index(element: Instruction) -> int:
    return int(element.attribute("index") or 0)


def _used(computation: list[Instruction], number: int) -> set[int | None]:
    """What a computation uses of a parameter, beyond passing it on: all of it (None), or elements of the tuple."""
    name = next((i.name for i in computation if i.op == "parameter" and int(i.literal) == number), "")
    elements = {i.name: _index(i) for i in computation if i.op == "get-tuple-element" and i.operands[0] == name}
    used: set[int | None] = set()
    for i in computation:
        for place, operand in enumerate(i.operands if i.name not in elements else ()):
            if operand == name:
                return {None}
            if operand in elements and not (i.root and i.op == "tuple" and elements[operand] == place):
                used.add(elements[operand])
    return used
