"""Whole numbers that stand for floats: what products in eight bits are made of.

A float is divided by a scale, rounded, and cast to `s8`. Of floats that differ in the last place, one may be rounded up
and the other down, so two right programs are as far apart as rounding makes them, and a mistake may be no further. A
program can therefore be run without these roundings; what is cast is then held as the float that it was.
"""

from collections import defaultdict

from trellis.inspect.hlo import Instruction, Program, parse_program

_CAST = "s8"
_THROUGH = ("bitcast", "broadcast", "clamp", "copy", "maximum", "minimum", "reshape", "select", "transpose")
_INTO = ("call", "fusion")


def unrounded(program: Program) -> frozenset[str]:
    """The names of roundings whose results all become whole numbers of eight bits, and of the casts to these."""
    readers, callers = defaultdict(list), defaultdict(list)
    for instruction in program.by_name.values():
        for name in instruction.operands:
            readers[name].append(instruction)
        for computations in instruction.called().values():
            for computation in computations:
                callers[computation].append(instruction)
    found: set[str] = set()
    for instruction in program.by_name.values():
        if instruction.op == "round-nearest-even":
            casts = _casts(instruction, program, readers, callers)
            found |= {instruction.name, *casts} if casts else set()
    return frozenset(found)


def rounds(text: str) -> bool:
    """Whether a program, by its text, rounds to whole numbers of eight bits."""
    return bool(unrounded(parse_program(text)))


def _casts(rounding: Instruction, program: Program, readers: dict, callers: dict) -> set[str]:
    """The casts that a rounding's result ends in, or nothing if something else reads it."""
    casts, seen, ways = set(), set(), [rounding]
    while ways:
        at = ways.pop()
        if at.name in seen:
            continue
        seen.add(at.name)
        if at.root:
            calls = callers[program.homes[at.name]]
            if not calls or any(call.op not in _INTO for call in calls):
                return set()
            ways += calls
        for reader in readers[at.name]:
            if reader.op == "convert" and reader.type.startswith(_CAST + "["):
                casts.add(reader.name)
            elif reader.op in _THROUGH:
                ways.append(reader)
            elif reader.op in _INTO:
                (inside,) = next(iter(reader.called().values()))
                places = {str(i) for i, name in enumerate(reader.operands) if name == at.name}
                ways += [i for i in program.computations[inside] if i.op == "parameter" and i.literal in places]
            else:
                return set()
    return casts
