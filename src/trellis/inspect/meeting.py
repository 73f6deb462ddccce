"""Whether what a compiled program computes orders its collectives, or only what XLA adds to it."""

import re
from dataclasses import dataclass
from typing import Any

from trellis._compat import keep_programs_that
from trellis.mesh.platform import are_cpus

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-~]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-~#]+) = (?:\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*)")
_NAMES = re.compile(r"%([\w.\-~#]+)")
_INDEX = re.compile(r"index=(\d+)")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.\-~#]+)")
_COLLECTIVE = re.compile(r"(all-|ragged-all-|reduce-scatter|collective-)")
_CONTROL = ("while", "conditional", "call")


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One line of HLO: its operands, of a `get-tuple-element` the index, and the computations that it runs."""

    name: str
    op: str
    operands: tuple[str, ...]
    index: int
    called: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Computation:
    """What runs in order: its instructions by name, and the last of them."""

    instructions: dict[str, _Instruction]
    root: _Instruction


def keep_what_loads_right() -> bool:
    """From here on JAX keeps no program on CPUs, and takes none that is kept, which `in_order` says would go wrong.

    Returns whether JAX lets itself be told.
    """
    return keep_programs_that(_loads_right)


def _loads_right(executable: Any) -> bool:
    """Whether a compiled program (JAX's `LoadedExecutable`) computes the same when it was loaded."""
    client = getattr(executable, "client", None)  # what is compiled for a machine that is not at hand has none
    if client is None or client.device_count() == 1 or not are_cpus(client.devices()):
        return True
    return all(in_order(module.to_string(), loaded=True) for module in executable.hlo_modules())


def in_order(hlo: str, *, loaded: bool) -> bool:
    """Whether the collectives of a program for CPUs meet in one order on all devices.

    XLA's CPU backend runs at once what does not wait for each other's values, and all collectives of a kind meet under
    one key. They begin in the program's order by a resource that they share, but a loop, branch or call has begun when
    it is called: what stands behind it and does not read what it makes may meet what is still to come inside
    (docs/published-bugs.md, 21). In a program that was loaded from a cache, what stands inside does not even share the
    resource (38).

    Args:
        hlo: the compiled program's text.
        loaded: whether it was loaded, so that what stands before a loop has to be waited for, too.
    """
    program = _read(hlo)
    meets: dict[str, bool] = {}
    within = [
        name for name, each in program.items() if any(_meets(program, i, meets) for i in each.instructions.values())
    ]
    return all(_is_ordered(program, name, meets, loaded) for name in within)


def _read(hlo: str) -> dict[str, _Computation]:
    program: dict[str, _Computation] = {}
    name, made = "", dict[str, _Instruction]()
    root: _Instruction | None = None
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            inside, _, attributes = found[4].partition(")")
            index = _INDEX.search(attributes) if found[3] == "get-tuple-element" else None
            called = _CALLED.findall(attributes) if found[3] in _CONTROL else ()
            made[found[2]] = instruction = _Instruction(
                found[2],
                found[3],
                tuple(_NAMES.findall(inside)),
                int(index[1]) if index else int(inside) if found[3] == "parameter" else -1,
                tuple(name for names in called for name in _NAMES.findall(names)),
            )
            root = instruction if found[1] else root
        elif line.startswith("}") and root is not None:
            program[name], made, root = _Computation(made, root), {}, None
        elif found := _COMPUTATION.match(line):
            name = found[1]
    return program


def _meets(program: dict[str, _Computation], instruction: _Instruction, found: dict[str, bool]) -> bool:
    """Whether devices meet in an instruction, or in what it runs."""
    if _COLLECTIVE.match(instruction.op) and not instruction.op.endswith("-done"):
        return True
    for name in instruction.called:
        if name not in found:
            found[name] = any(_meets(program, each, found) for each in program[name].instructions.values())
    return any(found[name] for name in instruction.called)


def _is_ordered(program: dict[str, _Computation], name: str, meets: dict[str, bool], loaded: bool) -> bool:
    """Whether the instructions of a computation in which devices meet wait for each other, as far as nothing else makes
    them: collectives that stand beside each other share their resource, loaded or not."""
    here = program[name].instructions
    after: dict[str, int] = {}  # of each value the meetings that it waits for, a bit for each
    last = 0  # what the collective before waits for, and itself
    before, bit = 0, 1  # the meetings that the next one has to wait for, and its own bit
    for instruction in here.values():
        waits = 0
        for operand, element in _read_by(program, here, instruction):
            waits |= _of(program, here, after, operand, element)
        if _meets(program, instruction, meets):
            if not instruction.called:
                waits |= last
            if waits & before != before:
                return False
            waits |= bit
            before |= bit if instruction.called or loaded else 0
            last, bit = last if instruction.called else waits, bit << 1
        after[instruction.name] = waits
    return True


def _read_by(
    program: dict[str, _Computation], here: dict[str, _Instruction], instruction: _Instruction
) -> list[tuple[str, int | None]]:
    """The operands of an instruction that it reads, each whole (None) or an element of a tuple."""
    if instruction.op == "get-tuple-element":
        return [(instruction.operands[0], instruction.index)]
    if not instruction.called:
        return [(operand, None) for operand in instruction.operands]
    read: list[tuple[str, int | None]] = []
    given = instruction.operands
    if instruction.op == "conditional":
        read, given = [(given[0], None)], given[1:]
    for number, name in enumerate(instruction.called):
        # A loop's body and condition have its one operand, a call has all of them, each branch its own.
        mine = given if instruction.op != "conditional" else given[number : number + 1]
        for parameter, operand in enumerate(mine):
            elements = _used(program[name], parameter)
            read += [(operand, element) for element in elements]
    return read


def _used(computation: _Computation, parameter: int) -> list[int | None]:
    """What a computation does not only pass on of a parameter: all of it (None), or elements of the tuple."""
    name = next((i.name for i in computation.instructions.values() if i.op == "parameter" and i.index == parameter), "")
    elements = {i.name: i.index for i in computation.instructions.values()
                if i.op == "get-tuple-element" and i.operands[0] == name}  # fmt: skip
    used: set[int | None] = set()
    for i in computation.instructions.values():
        if i.name in elements:
            continue
        for place, operand in enumerate(i.operands):
            if operand == name:
                return [None]
            if operand in elements and not (i is computation.root and i.op == "tuple" and elements[operand] == place):
                used.add(elements[operand])
    return list(used)


def _of(program, here: dict[str, _Instruction], after: dict[str, int], value: str, element: int | None) -> int:
    """What an element of a value waits for: of one that a loop passes on, what it waited for before."""
    while element is not None:
        made = here[value]
        if made.op == "tuple":
            value, element = made.operands[element], None
        elif made.op == "while" and _passes(program, made, element):
            value = made.operands[0]
        else:
            break
    return after[value]


def _passes(program: dict[str, _Computation], loop: _Instruction, element: int) -> bool:
    """Whether a loop passes an element on as it is."""
    for name in loop.called:
        body = program[name]
        if body.root.op == "tuple":
            result = body.instructions[body.root.operands[element]]
            return result.op == "get-tuple-element" and result.index == element and _is_parameter(body, result)
    return False


def _is_parameter(computation: _Computation, element: _Instruction) -> bool:
    return computation.instructions[element.operands[0]].op == "parameter"
