"""A treemap: an area for each item, nested by kind, as SVG (squarified; Bruls, Huizing and van Wijk, 2000)."""

import html
from collections.abc import Sequence

from trellis.inspect.rows import human_bytes

Item = tuple[str, str, str, int]  # kind, name, type, bytes
_COLORS = ("#7fb3d5", "#a9cce3", "#f5b7b1", "#f9e79f", "#fad7a0", "#d2b4de", "#d5dbdb", "#e5e7e9")
_SMALLEST = 0.002  # of the whole: smaller items of a kind are drawn as one


def squarified(sizes: Sequence[float], x: float, y: float, width: float, height: float) -> list[tuple[float, ...]]:
    """Rectangles (x, y, width, height) with areas in proportion to sizes, which are given in falling order.

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


def treemap(items: Sequence[Item], kinds: Sequence[str], width: int = 960, height: int = 540) -> str:
    """The SVG document of a treemap: kinds by color, items by area, both with their bytes."""
    total = sum(size for *_, size in items) or 1
    grouped = {kind: _merged([item for item in items if item[0] == kind], total) for kind in kinds}
    grouped = {kind: group for kind, group in grouped.items() if group}
    order = sorted(grouped, key=lambda kind: -sum(item[3] for item in grouped[kind]))
    legend = 26
    out = []
    sizes = [sum(item[3] for item in grouped[kind]) for kind in order]
    for kind, box in zip(order, squarified(sizes, 0, legend, width, height - legend)):
        color = _COLORS[kinds.index(kind) % len(_COLORS)]
        group = sorted(grouped[kind], key=lambda item: -item[3])
        for (_, name, what, item_size), rect in zip(group, squarified([item[3] for item in group], *box)):
            out.append(_tile(name, what, item_size, rect, color))
        x, y, w, h = box
        out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="none" stroke="#222"/>')
    out.append(f'<text class="head" x="6" y="17">one device {human_bytes(total)}</text>')
    at = 150.0
    for kind, size in zip(order, sizes):
        words = f"{kind} {human_bytes(size)}"
        color = _COLORS[kinds.index(kind) % len(_COLORS)]
        out.append(f'<rect x="{at:.0f}" y="8" width="10" height="10" fill="{color}" stroke="#222" stroke-width=".5"/>')
        out.append(f'<text x="{at + 14:.0f}" y="17">{html.escape(words)}</text>')
        at += 26 + 5.7 * len(words)
    style = "text{font:11px ui-sans-serif,system-ui,sans-serif;fill:#222}.head{font-size:13px;font-weight:600}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><style>{style}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(out)}</svg>"
    )


def _merged(items: Sequence[Item], total: int) -> list[Item]:
    large = [item for item in items if item[3] >= _SMALLEST * total]
    small = [item for item in items if 0 < item[3] < _SMALLEST * total]
    if small:
        large.append((small[0][0], f"{len(small)} smaller ones", "", sum(item[3] for item in small)))
    return large


def _tile(name: str, what: str, size: int, rect: tuple[float, ...], color: str) -> str:
    x, y, w, h = rect
    words = html.escape(f"{name} {what} {human_bytes(size)}")
    out = f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{color}" stroke="#fff"><title>{words}'
    out += "</title></rect>"
    room = int((w - 8) / 6)
    lines = [line for line in (name, what, human_bytes(size)) if line] if room >= 4 else []
    for number, line in enumerate(lines[: max(int((h - 4) / 14), 0)]):
        shown = line
        if len(line) > room:  # a path's end tells more than its start
            shown = "…" + line[-(room - 1) :] if number == 0 and " " not in line else line[: room - 1] + "…"
        out += f'<text x="{x + 4:.1f}" y="{y + 14 + 14 * number:.1f}">{html.escape(shown)}</text>'
    return out
