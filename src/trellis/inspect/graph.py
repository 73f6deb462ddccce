"""The compiled step as a picture: what runs, in what order, and what feeds what. An SVG, drawn without graphviz."""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from trellis.frames import in_a_library
from trellis.inspect.hlo import Instruction, Program, parse_program

# Names and views, which compute nothing: an edge goes through them.
_VIEWS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "iota", "broadcast", "after-all",
    "partition-id", "replica-id", "opt-barrier", "reshape", "transpose", "bitcast-convert", "add-dependency",
}  # fmt: skip
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all", "send", "recv")
_PRODUCTS = re.compile(r"^(dot|convolution|ragged-dot|scaled-dot)$")
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _PAD, _MOST_ACROSS = 190, 46, 16, 30, 14, 8

_STYLE = """
svg{background:#fff}text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#1d2125}.small{fill:#62686e;font-size:10px}
rect{stroke-width:1;rx:6}.product{fill:#d7efe9;stroke:#0f766e}.collective{fill:#fde3d3;stroke:#c2410c}
.other{fill:#f1f1ee;stroke:#b9bcb8}.kernel{fill:#e3dcf7;stroke:#7c5cc4}.loop{fill:#2f6fb50d;stroke:#2f6fb5}
path{fill:none;stroke:#62686e;stroke-opacity:.4}
"""


@dataclass(slots=True)
class _Node:
    """An instruction's box: what it says, what feeds it, and, for a loop, the boxes inside."""

    name: str
    kind: str
    lines: tuple[str, ...]
    before: list[str]
    inside: "list[_Node]" = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    width: float = _WIDTH
    height: float = _HEIGHT


def step_svg(hlo: str) -> str:
    """The picture of a compiled program.

    Matrix products, kernels, collectives and loops have colours of their own; a loop's body is drawn inside its box.

    Args:
        hlo: its text, as `compiled.as_text()` gives it.
    """
    program = parse_program(hlo)
    nodes = _nodes(program, program.entry)
    width, height = _arrange(nodes)
    drawn = "".join(_draw(nodes, _PAD, _PAD))
    size = f'width="{width + 2 * _PAD:.0f}" height="{height + 2 * _PAD:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{drawn}</svg>\n'


def _nodes(program: Program, computation: str) -> list[_Node]:
    """The boxes of a computation, in the program's order."""
    made: list[_Node] = []
    through: dict[str, list[str]] = {}  # instruction to the boxes that its value comes from
    for instruction in program.computations[computation]:
        before = list(dict.fromkeys(box for operand in instruction.operands for box in through.get(operand, ())))
        if instruction.op in _VIEWS or instruction.op.endswith(("-done", "-update")):
            through[instruction.name] = before
            continue
        node = _Node(instruction.name, _kind(program, instruction), _lines(program, instruction), before)
        if instruction.op in ("while", "conditional", "call"):
            called = instruction.called()
            bodies = [name for key, names in called.items() if key != "condition" for name in names]
            node.inside = [inner for body in bodies if body in program.computations for inner in _nodes(program, body)]
        made.append(node)
        through[instruction.name] = [instruction.name]
    return made


def _kind(program: Program, instruction: Instruction) -> str:
    if instruction.op.startswith(_COLLECTIVES):
        return "collective"
    if instruction.op in ("while", "conditional", "call"):
        return "loop"
    if instruction.op == "custom-call":
        return "kernel"
    runs = [instruction, *program.inside(instruction)]
    return "product" if any(_PRODUCTS.match(one.op) for one in runs) else "other"


def _lines(program: Program, instruction: Instruction) -> tuple[str, ...]:
    """What a box says: the operation, its result, and the source line."""
    arrays = instruction.results
    result = f"{arrays[0].dtype}[{','.join(map(str, arrays[0].shape))}]" if arrays else ""
    result += f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
    operation = instruction.op.removesuffix("-start")
    if operation == "fusion":
        inner = (instruction.quoted("op_name") or "").rpartition("/")[2]
        operation = f"fusion: {inner}" if inner else operation
    elif operation == "custom-call":
        operation = instruction.quoted("custom_call_target") or operation
    elif operation == "while":
        count = program.trip_count(instruction)
        operation = f"loop, {count} times" if count else "loop"
    return operation, result, program.source(instruction, in_a_library)


def _arrange(nodes: list[_Node]) -> tuple[float, float]:
    """Gives every box its place, inner ones first, and returns the width and height of all."""
    by_name = {node.name: node for node in nodes}
    layer: dict[str, int] = {}
    for node in nodes:  # the program's order has what feeds a box before it
        if node.inside:
            width, height = _arrange(node.inside)
            node.width, node.height = max(_WIDTH, width + 2 * _PAD), height + _HEIGHT + _PAD
        layer[node.name] = 1 + max((layer[name] for name in node.before), default=-1)
    rows: dict[int, list[_Node]] = {}
    for node in nodes:
        rows.setdefault(layer[node.name], []).append(node)
    top, right = 0.0, 0.0
    for number in sorted(rows):
        # A box stands below what feeds it, as far as its neighbours let it.
        centre = lambda node: [by_name[name].x + by_name[name].width / 2 for name in node.before]
        row = sorted(rows[number], key=lambda node: sum(centre(node)) / len(centre(node)) if node.before else 0.0)
        for start in range(0, len(row), _MOST_ACROSS):
            left, tallest = 0.0, 0.0
            for node in row[start : start + _MOST_ACROSS]:
                node.x, node.y = left, top
                left, tallest = left + node.width + _GAP_X, max(tallest, node.height)
            top, right = top + tallest + _GAP_Y, max(right, left - _GAP_X)
    return right, max(0.0, top - _GAP_Y)


def _draw(nodes: list[_Node], left: float, top: float) -> Iterable[str]:
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        for name in node.before:
            source = by_name[name]
            x0, y0 = left + source.x + source.width / 2, top + source.y + source.height
            x1, y1 = left + node.x + node.width / 2, top + node.y
            bend = max(16.0, (y1 - y0) / 2)
            yield f'<path d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"/>'
    for node in nodes:
        x, y = left + node.x, top + node.y
        title = html.escape(f"{node.name}: {'; '.join(filter(None, node.lines))}")
        yield f'<g><title>{title}</title><rect class="{node.kind}" x="{x:.1f}" y="{y:.1f}" '
        yield f'width="{node.width:.1f}" height="{node.height:.1f}"/>'
        for number, line in enumerate(node.lines):
            small = ' class="small"' if number else ""
            yield f'<text{small} x="{x + 8:.1f}" y="{y + 14 + 13 * number:.1f}">{html.escape(_cut(line))}</text>'
        yield "</g>"
        yield from _draw(node.inside, x + _PAD, y + _HEIGHT)


def _cut(line: str) -> str:
    return line if len(line) <= 32 else line[:31] + "…"
