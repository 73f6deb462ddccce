"""A treemap: an area for each item, nested by kind, as SVG (squarified; Bruls, Huizing and van Wijk, 2000)."""

import itertools
from collections.abc import Iterator, Sequence

from trellis.figures import numbers, svg
from trellis.figures.html import Markup

Item = tuple[str, str, str, int]  # kind, name, type, bytes
_COLORS = ("#7fb3d5", "#a9cce3", "#f5b7b1", "#f9e79f", "#fad7a0", "#d2b4de", "#d5dbdb", "#b8b0a0",
           "#e5e7e9")  # fmt: skip
_SMALLEST = 0.002  # share of the whole; smaller items of a kind are drawn as one


def squarified(sizes: Sequence[float], x: float, y: float, width: float, height: float) -> list[tuple[float, ...]]:
    """Rectangles (x, y, width, height) with areas in proportion to the sizes, which are given in falling order.

    >>> squarified([2, 1, 1], 0, 0, 4, 2)
    [(0, 0, 2.0, 2.0), (2.0, 0, 2.0, 1.0), (2.0, 1.0, 2.0, 1.0)]
    """
    scale = width * height / sum(sizes) if sizes and sum(sizes) else 0
    areas, placed = [size * scale for size in sizes], []
    while areas:
        short = min(width, height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], short) <= _worst(areas[:count], short):
            count += 1
        row, areas = areas[:count], areas[count:]
        depth = sum(row) / short if short else 0
        at = y if width >= height else x
        for area in row:
            length = area / depth if depth else 0
            placed.append((x, at, depth, length) if width >= height else (at, y, length, depth))
            at += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
    return placed


def _worst(row: Sequence[float], short: float) -> float:
    """The largest ratio of sides that a row of areas would have along the shorter side."""
    total = sum(row)
    return max(max(short**2 * area / total**2, total**2 / (short**2 * area)) for area in row if area) if total else 1


def treemap(items: Sequence[Item], kinds: Sequence[str]) -> str:
    """The SVG document of a treemap: kinds by color, items by area, both with their bytes."""
    total = sum(size for *_, size in items) or 1
    grouped = {kind: _merged([item for item in items if item[0] == kind], total) for kind in kinds}
    grouped = {kind: group for kind, group in grouped.items() if group}
    order = sorted(grouped, key=lambda kind: -sum(item[3] for item in grouped[kind]))
    sizes = [sum(item[3] for item in grouped[kind]) for kind in order]
    colors = dict(zip(kinds, itertools.cycle(_COLORS)))
    width, height = 960, 540
    parts, legend = _legend(f"one device {numbers.size(total)}", dict(zip(order, sizes)), colors, width)
    for kind, area in zip(order, squarified(sizes, 0, legend, width, height - legend)):
        group = sorted(grouped[kind], key=lambda item: -item[3])
        for (_, name, what, size), rect in zip(group, squarified([item[3] for item in group], *area)):
            parts += _tile(name, what, size, rect, colors[kind])
        parts.append(svg.box(*map(float, area), fill="none", stroke="#222"))
    style = "text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#222}.head{font-size:13px;font-weight:600}"
    return svg.document(width, height, parts, style)


def _legend(title: str, sizes: dict[str, int], colors: dict[str, str], width: int) -> tuple[list[Markup], int]:
    """A title and the meaning of each color, in as many lines as they need, and the height of these lines."""
    begin = at = 20 + 8.5 * len(title)
    y, parts = 17, [svg.text(6, 17, title, class_="head")]
    for kind, size in sizes.items():
        words = f"{kind} {numbers.size(size)}"
        wide = 26 + 6.0 * len(words)
        if at > begin and at + wide > width:
            at, y = begin, y + 18
        parts.append(svg.box(at, y - 9, 10, 10, fill=colors[kind], stroke="#222", stroke_width=0.5))
        parts.append(svg.text(at + 14, y, words))
        at += wide
    return parts, y + 9


def _merged(items: Sequence[Item], total: int) -> list[Item]:
    large = [item for item in items if item[3] >= _SMALLEST * total]
    small = [item for item in items if 0 < item[3] < _SMALLEST * total]
    if small:
        large.append((small[0][0], f"{len(small)} smaller ones", "", sum(item[3] for item in small)))
    return large


def _tile(name: str, what: str, size: int, rect: tuple[float, ...], color: str) -> Iterator[Markup]:
    x, y, w, h = rect
    lines = [line for line in (name, what, numbers.size(size)) if line]
    yield svg.box(x, y, float(w), float(h), title=f"{name} {what} {numbers.size(size)}", fill=color, stroke="#fff")
    room = int((w - 8) / 6)
    for number, line in enumerate(lines[: max(int((h - 4) / 14), 0)] if room >= 4 else ()):
        if len(line) > room:  # a path's end says more than its start
            line = "…" + line[-(room - 1) :] if number == 0 and " " not in line else line[: room - 1] + "…"
        yield svg.text(x + 4, y + 14 + 14 * number, line)
