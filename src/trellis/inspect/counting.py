"""How often a `while` of HLO runs, read from how it counts: from where, by how much, and up to where."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trellis.inspect.hlo import Instruction, Program

_SAME = ("copy", "bitcast", "convert", "reshape", "broadcast")
_UNREAD = ("unread",)  # a value that the text does not say, or that is not followed
_DEEPEST = 12  # how far back a value is followed


def counted(program: "Program", loop: "Instruction") -> int | None:
    """How often a loop runs that counts in integers up to a constant; None for any other, and for one that starts or
    steps by what is computed.

    >>> from trellis.inspect.hlo import parse_program
    >>> program = parse_program('''
    ... body (s: (s32[])) -> (s32[]) {
    ...   s = (s32[]) parameter(0)
    ...   i = s32[] get-tuple-element(%s), index=0
    ...   three = s32[] constant(3)
    ...   next = s32[] add(%i, %three)
    ...   ROOT t = (s32[]) tuple(%next)
    ... }
    ... more (u: (s32[])) -> pred[] {
    ...   u = (s32[]) parameter(0)
    ...   j = s32[] get-tuple-element(%u), index=0
    ...   ten = s32[] constant(10)
    ...   ROOT less = pred[] compare(%j, %ten), direction=LT
    ... }
    ... ENTRY main () -> (s32[]) {
    ...   zero = s32[] constant(0)
    ...   start = (s32[]) tuple(%zero)
    ...   ROOT loop = (s32[]) while(%start), condition=%more, body=%body
    ... }''')
    >>> counted(program, program.by_name["loop"])
    4

    Args:
        program: the whole text.
        loop: a `while` of it.
    """
    called = loop.called()
    condition, body = (program.root(called.get(key, [""])[0]) for key in ("condition", "body"))
    if condition is None or body is None:
        return None
    match _read(program, condition, ()):
        case ("LT", ("element", int(place)), int(bound)) | ("GT", int(bound), ("element", int(place))):
            pass
        case ("LE", ("element", int(place)), int(last)) | ("GE", int(last), ("element", int(place))):
            bound = last + 1
        case _:
            return None
    terms = _terms(_element(program, body, place))
    if len(terms) < 2 or ("element", place) not in terms:
        return None
    terms.remove(("element", place))
    first = program.by_name[loop.operands[0]]
    for number, term in enumerate(terms):
        if isinstance(term, tuple) and term[0] == "element":  # a number that the loop carries along, or makes anew
            carried = _element(program, body, term[1]) == term
            terms[number] = _element(program, first, term[1]) if carried else _UNREAD
    start = _element(program, first, place)
    if not all(isinstance(each, int) for each in (start, *terms)) or sum(terms) < 1:
        return None
    return max(0, -(-(bound - start) // sum(terms)))


def _terms(value: Any) -> list[Any]:
    """What a sum adds up."""
    if isinstance(value, tuple) and value[0] == "sum":
        return [term for part in value[1:] for term in _terms(part)]
    return [value]


def _element(program: "Program", instruction: "Instruction", place: int) -> Any:
    """What an element of a tuple is."""
    if instruction.op == "tuple":
        return _read(program, program.by_name[instruction.operands[place]], ())
    if instruction.op in ("copy", "fusion"):
        whole = _read(program, instruction, ())
        return whole[place + 1] if isinstance(whole, tuple) and whole[0] == "tuple" else _UNREAD
    return _UNREAD


def _read(program: "Program", instruction: "Instruction", given: tuple, deep: int = 0) -> Any:
    """A number; ("element", its place in the state of a loop); a sum; a comparison; or `_UNREAD`. Numbers are integers.

    Args:
        program: the whole text.
        instruction: whose result.
        given: what the computation's parameters are, of a fusion; else a loop's state is its parameter.
        deep: how many instructions it was followed through.
    """
    if deep > _DEEPEST:
        return _UNREAD
    integer = re.match(r"[su]\d", instruction.type) is not None  # a float's constant may look like one
    operands = [program.by_name[name] for name in instruction.operands if name in program.by_name]
    within = lambda each: _read(program, each, given, deep + 1)
    if instruction.op == "constant":
        return int(instruction.literal) if integer and re.fullmatch(r"-?\d+", instruction.literal) else _UNREAD
    if instruction.op == "parameter":
        if given:
            return given[int(instruction.literal)]
        entry = program.homes[instruction.name] == program.entry
        return _UNREAD if entry else ("state",)
    if instruction.op in _SAME and len(operands) == 1:
        return within(operands[0])
    if instruction.op == "get-tuple-element":
        index, whole = int(instruction.attribute("index") or 0), within(operands[0])
        if isinstance(whole, tuple) and whole[0] == "tuple":
            return whole[index + 1]
        return ("element", index) if whole == ("state",) and integer else _UNREAD
    if instruction.op == "tuple":
        return ("tuple", *map(within, operands))
    if instruction.op == "add":
        return ("sum", *map(within, operands))
    if instruction.op == "compare":
        return (instruction.attribute("direction"), *map(within, operands))
    if instruction.op == "fusion":
        inner = program.root(instruction.called().get("calls", [""])[0])
        return _read(program, inner, tuple(map(within, operands)), deep + 1) if inner and operands else _UNREAD
    return _UNREAD
