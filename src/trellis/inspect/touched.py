"""Bytes of memory that an instruction of a compiled program reads and writes."""

from trellis.inspect.hlo import Instruction, Program

# Names and views of what is there, loops and branches.
NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "while", "conditional", "call", "iota",
}  # fmt: skip
_PARTS = ("dynamic-slice", "slice", "gather")


def touched_bytes(program: Program, instruction: Instruction) -> int:
    """Bytes that one run of an instruction reads and writes, each operand and result once.

    If a fusion only slices an operand, or gathers rows of it, the slices count. If a result replaces a part of an
    operand, in its memory, the part counts, once read and once written.

    Args:
        program: the program.
        instruction: any of its instructions that is not in a fusion; of collectives and of loops there are none.
    """
    if instruction.op in NOTHING or instruction.op.endswith(("-start", "-done", "-update")):
        return 0
    if instruction.op != "fusion":
        return _touched(program, [instruction], {name: name for name in instruction.operands}, instruction)
    inside = [i for name in instruction.called().get("calls", ()) for i in program.computations.get(name, ())]
    given = {i.name: instruction.operands[int(i.literal)] for i in inside if i.op == "parameter"}
    root = next((i for i in inside if i.root), None)
    return _touched(program, inside, given, root) if root else 0


def _touched(program: Program, inside: list[Instruction], given: dict[str, str], root: Instruction) -> int:
    made = {i.name: i for i in inside}
    views = dict(given)  # from everything that is only another name of an operand to that operand
    total = 0
    whole: set[str] = set()
    for i in inside:
        if i.op in ("bitcast", "get-tuple-element") and i.operands and i.operands[0] in views:
            views[i.name] = views[i.operands[0]]
        elif i.op in _PARTS and i.operands[0] in views:
            total += _size(i)
            whole |= {views[name] for name in i.operands[1:] if name in views}
        elif i.op == "dynamic-update-slice" and i.operands[0] in views:
            whole |= {views[name] for name in i.operands[1:] if name in views}
        elif i.op != "parameter":
            whole |= {views[name] for name in i.operands if name in views}
    total += sum(_size(program.by_name[name]) for name in whole if name in program.by_name)
    for name in root.operands if root.op == "tuple" else [root.name]:
        result = made.get(name, root)
        while result.op == "bitcast" and result.operands and result.operands[0] in made:
            result = made[result.operands[0]]
        if result.op == "dynamic-update-slice" and len(result.operands) > 1:
            part = made.get(result.operands[1]) or program.by_name.get(result.operands[1])
            total += _size(part) if part else 0
        elif result.op not in NOTHING:
            total += _size(result)
    return total


def _size(instruction: Instruction) -> int:
    return sum(array.num_bytes for array in instruction.results)
