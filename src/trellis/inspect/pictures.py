"""Pictures of shardings: which device holds which part of which axis, as terminal text and as SVG.

A box is a device, placed as in the mesh. In a box each dimension is a bar, filled where the device holds it: a part of
the bar if a mesh axis slices the dimension, the whole bar if every device has a copy. Boxes of one colour hold the same
part.
"""

import colorsys
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from trellis.figures import svg
from trellis.figures.html import Markup
from trellis.notation import TypeMismatch
from trellis.notation.typeof import short_dtype
from trellis.program.sizes import state_at, typed

MOST_ROWS, MOST_COLUMNS = 16, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A dimension in a device's box: its name, and the part held as `index` of `count` equal parts."""

    name: str
    index: int
    count: int
    size: int | None = None

    def words(self) -> str:
        """The part held, in positions if the size is known: `batch 2:4`, `embed whole`."""
        if self.count == 1:
            return f"{self.name} whole"
        if self.size is None:
            return f"{self.name} {self.index + 1}/{self.count}"
        step = self.size // self.count
        return f"{self.name} {self.index * step}:{(self.index + 1) * step}"


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A device: its label, its bars, and the number of the part it holds."""

    label: str
    bars: tuple[Bar, ...]
    part: int


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One grid of devices.

    Attributes:
        title: what is shown.
        rows, columns: places along the first mesh axis, and along the others.
        boxes: by row and column.
        legend: what the mesh axes do.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    boxes: tuple[tuple[Box, ...], ...]
    legend: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Picture:
    """What `show` returns: prints in a terminal, draws itself in a notebook, saves as SVG."""

    panels: tuple[Panel, ...]

    def text(self, color: bool = False) -> str:
        """As text, with ANSI background colours if `color` is true."""
        return "\n\n".join(_panel_text(panel, color) for panel in self.panels)

    def __str__(self) -> str:
        return self.text(color=sys.stdout.isatty())

    __repr__ = __str__

    def svg(self) -> str:
        """As an SVG document."""
        return _svg(self.panels)

    _repr_svg_ = svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG to a file."""
        Path(path).write_text(self.svg(), encoding="utf-8")


def show(x, names: str | Sequence[str] | None = None) -> Picture:
    """Draws where an array is, or what a layout does.

    Args:
        x: an array, a named array, a `jax.ShapeDtypeStruct` with a sharding, or a `Layout`.
        names: names for the dimensions of a plain array.

    Returns:
        A picture: `print` it, or `save` it as SVG.

    Raises:
        TypeMismatch: `x` is neither an array nor a layout, or has another number of dimensions than there are names.
    """
    if hasattr(x, "params") and hasattr(x, "compute") and hasattr(x, "mesh"):
        return Picture(tuple(_layout_panel(x.mesh, dict(getattr(x, which)), which) for which in ("params", "compute")))
    array = getattr(x, "array", x)
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeMismatch(
            f"show can draw only arrays and layouts, got {type(x).__name__}, in show: pass an array, or a Layout"
        )
    names = names.split() if isinstance(names, str) else names
    names = tuple(names or getattr(x, "names", ()) or (f"dim{i}" for i in range(len(array.shape))))
    if len(names) != len(array.shape):
        raise TypeMismatch(
            f"an array must have one name for each dimension, got {len(names)} names for shape {array.shape}, in show: "
            "write as many"
        )
    return Picture((_array_panel(array, names),))


def _array_panel(array, names: tuple[str, ...]) -> Panel:
    sharding = getattr(array, "sharding", None) or jax.typeof(array).sharding
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.shape:
        placed = not isinstance(getattr(sharding, "mesh", None), AbstractMesh)  # a type, or NumPy's, is on no device
        devices = sorted(sharding.device_set if placed else (), key=lambda device: device.id)
        box = Box(f"device {devices[0].id}" if devices else "one device", _bars(names, array.shape, {}, {}, ()), 0)
        return Panel(f"{short_dtype(array.dtype)}[{' '.join(names)}]", ("",), ("",), ((box,),), ("not on a mesh",))
    mesh, aval = sharding.mesh, array if hasattr(array, "sharding") else jax.typeof(array)
    state = state_at(aval, auto=True)
    assigned = dict(enumerate(state.axes))
    states = dict.fromkeys(state.pending, "a partial sum on each device along it")
    states |= dict.fromkeys(state.copied, "a copy on each device along it, whose gradient arrives as a partial sum")
    return _panel(typed(aval, names), mesh, names, array.shape, assigned, states)


def _layout_panel(mesh, mapping: Mapping[str, str | Sequence[str]], which: str) -> Panel:
    names = tuple(mapping)
    axes = [(value,) if isinstance(value, str) else tuple(value) for value in mapping.values()]
    title = {"params": "parameters, at rest", "compute": "in use"}[which]
    if not names:
        title += ": every device holds everything"
    return _panel(title, mesh, names, (None,) * len(names), dict(enumerate(axes)), {})


def _panel(title, mesh, names, sizes, assigned: Mapping[int, tuple[str, ...]], states: Mapping[str, str]) -> Panel:
    axis_names, shape = tuple(mesh.shape), tuple(mesh.shape.values())
    ids = [str(device.id) for device in mesh.devices.flat] if isinstance(mesh, Mesh) else None
    parts: dict[tuple[int, ...], int] = {}
    grid: dict[tuple[int, ...], Box] = {}
    for number, place in enumerate(itertools.product(*map(range, shape))):
        bars = _bars(names, sizes, assigned, dict(zip(axis_names, place)), mesh.shape)
        part = parts.setdefault(tuple(bar.index for bar in bars), len(parts))
        grid[place] = Box(f"device {ids[number] if ids else number}", bars, part)
    # The first mesh axis downwards, the others across; a single one across, as a row of devices.
    down = 0 if len(shape) == 1 and shape[0] <= MOST_COLUMNS else 1
    rows, columns = (
        list(itertools.product(*map(range, shape[:down]))),
        list(itertools.product(*map(range, shape[down:]))),
    )
    boxes = tuple(tuple(grid[(*row, *column)] for column in columns[:MOST_COLUMNS]) for row in rows[:MOST_ROWS])
    legend = [f"{axis} ({size}): {_does(axis, names, assigned, states)}" for axis, size in mesh.shape.items()]
    if len(rows) > MOST_ROWS or len(columns) > MOST_COLUMNS:
        legend.append(f"showing {len(boxes) * len(boxes[0])} of {math.prod(shape)} devices")
    return Panel(
        title,
        tuple(_words(axis_names[:down], row) for row in rows[:MOST_ROWS]),
        tuple(_words(axis_names[down:], column) for column in columns[:MOST_COLUMNS]),
        boxes,
        tuple(legend),
    )


def _words(axes: Sequence[str], place: Sequence[int]) -> str:
    return " ".join(f"{axis} {index}" for axis, index in zip(axes, place))


def _does(axis: str, names, assigned, states: Mapping[str, str]) -> str:
    sliced = [name for index, name in enumerate(names) if axis in assigned.get(index, ())]
    return "slices " + ", ".join(sliced) if sliced else states.get(axis, "the same on each device along it")


def _bars(names, sizes, assigned, at: Mapping[str, int], mesh_shape) -> tuple[Bar, ...]:
    bars = []
    for number, (name, size) in enumerate(zip(names, sizes)):
        index, count = 0, 1
        for axis in assigned.get(number, ()):  # major to minor
            index, count = index * mesh_shape[axis] + at[axis], count * mesh_shape[axis]
        bars.append(Bar(str(name), index, count, size))
    return tuple(bars)


def _color(part: int) -> tuple[int, int, int]:
    """Hues far apart for neighbours (the golden ratio's steps), light enough for black text."""
    r, g, b = colorsys.hls_to_rgb((0.58 + part * 0.381966) % 1, 0.78 - 0.1 * (part // 8 % 2), 0.65)
    return round(r * 255), round(g * 255), round(b * 255)


def _panel_text(panel: Panel, color: bool) -> str:
    cells = [[[box.label, *(bar.words() for bar in box.bars)] for box in row] for row in panel.boxes]
    width = max(len(line) for row in cells for cell in row for line in cell) + 2
    width = max(width, *(len(name) + 2 for name in panel.columns), 4)
    side = max(map(len, panel.rows)) + 2

    def paint(text: str, part: int) -> str:
        if not color:
            return text
        r, g, b = _color(part)
        return f"\x1b[30;48;2;{r};{g};{b}m{text}\x1b[0m"

    edge = " " * side + "+" + "+".join("-" * width for _ in panel.columns) + "+"
    lines = [panel.title]
    if any(panel.columns):
        lines.append(" " * side + " " + " ".join(name.center(width) for name in panel.columns).rstrip())
    for name, row, boxes in zip(panel.rows, cells, panel.boxes):
        lines.append(edge)
        for number in range(max(map(len, row))):
            label = name if number == 0 else ""
            inside = "|".join(paint(f" {cell[number]}".ljust(width), box.part) for cell, box in zip(row, boxes))
            lines.append(f"{label.ljust(side)}|{inside}|")
    return "\n".join([*lines, edge, *(f"  {line}" for line in panel.legend)])


_WIDTH, _LINE, _PAD = 150, 19, 10


def _svg(panels: Sequence[Panel]) -> str:
    parts: list[Markup] = []
    top = right = 0
    for panel in panels:
        drawn, width, height = _panel_svg(panel, top)
        parts += drawn
        top, right = top + height, max(right, width)
    style = (
        "text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#222}"
        ".title{font-weight:600;font-size:14px}.dim{fill:#666}"
    )
    return svg.document(right, top, parts, style)


def _panel_svg(panel: Panel, top: int) -> tuple[list[Markup], int, int]:
    bars = max(len(box.bars) for row in panel.boxes for box in row)
    height = _LINE * (bars + 1) + _PAD
    left = 12 + 8 * max(map(len, panel.rows))
    parts = [svg.text(12, top + 24, panel.title, class_="title")]
    y = top + 40
    if any(panel.columns):
        for number, name in enumerate(panel.columns):
            parts.append(svg.text(left + number * (_WIDTH + _PAD), y + 10, name, class_="dim"))
        y += 18
    for name, row in zip(panel.rows, panel.boxes):
        parts.append(svg.text(12, y + 16, name, class_="dim"))
        for number, box in enumerate(row):
            parts += _box_svg(box, left + number * (_WIDTH + _PAD), y, height)
        y += height + _PAD
    for line in panel.legend:
        parts.append(svg.text(12, y + 12, line))
        y += 18
    width = left + len(panel.columns) * (_WIDTH + _PAD) + 8
    widest = max(len(line) for line in (panel.title, *panel.legend))
    return parts, max(width, 24 + 7 * widest), y + 16 - top


def _box_svg(box: Box, x: int, y: int, height: int) -> Iterator[Markup]:
    fill, full = "#{:02x}{:02x}{:02x}".format(*_color(box.part)), _WIDTH - 16
    yield svg.box(x, y, _WIDTH, height, rx=6, fill=fill, fill_opacity=".35", stroke=fill)
    yield svg.text(x + 8, y + 15, box.label, class_="dim")
    for number, bar in enumerate(box.bars):
        line, part = y + _LINE * (number + 1) + 2, full / bar.count
        yield svg.box(x + 8, line, full, 14, rx=3, fill="#fff", stroke="#999", stroke_width=".7")
        yield svg.box(x + 8 + bar.index * part, line, part, 14, rx=3, fill=fill)
        yield svg.text(x + 13, line + 11, bar.words())
