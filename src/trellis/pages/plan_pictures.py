"""The pictures of a plan's page: the devices, memory, one layer in time, the roofline, what a search found."""

import functools
import math
from collections.abc import Iterable

from trellis.figures import numbers, svg
from trellis.figures.html import Markup
from trellis.plan.quick import Plan
from trellis.plan.roofline import Line
from trellis.plan.search import Found

KIND_COLORS = {
    "parameters": "#4361a8",
    "optimizer": "#7a94c9",
    "gradients": "#b9605a",
    "activations": "#3d8b72",
    "weights in use": "#c79a3b",
    "batch": "#8a8a8a",
    "temporaries": "#8d6aa8",
    "fragmentation": "#b8b0a0",
    "other": "#d0d0d0",
}
WORK_COLORS = {"product": "#4361a8", "grouped": "#4361a8", "attention": "#3d8b72", "kernel": "#3d8b72",
               "elementwise": "#8d6aa8"}  # fmt: skip
MOVE_COLOR, ALONE_COLOR = "#c79a3b", "#b9605a"
# The hues of the mesh axes, in turn.
_HUES = (215, 160, 35, 280, 0, 100)


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", **attributes: object) -> Markup:
    return svg.text(x, y, words, font_size=size, text_anchor=anchor, **attributes)


_quiet = functools.partial(_text, class_="quiet")


def _shade(position: int, count: int, hue: int) -> str:
    return f"hsl({hue} 45% {35 + 40 * position / max(count - 1, 1):.0f}%)"


def slice_picture(plan: Plan) -> Markup:
    """The devices, and the links that each mesh axis runs along."""
    if not plan.target.chip.torus:
        return _hosts(plan)
    shape = (*plan.target.shape, *[1] * (3 - len(plan.target.shape)))
    rows, columns, layers = shape[0], shape[1], min(shape[2], 4)
    cell = max(8.0, min(26.0, 420 / max(columns, rows)))
    shift = cell * 0.8
    left, top = 130.0, 40 + shift * (layers - 1)
    right, bottom = left + columns * cell, top + rows * cell
    by_side: dict[str, list] = {}
    for axis, found in plan.links.parts.items():
        for part in found:
            where = part.where if part.side is None else f"side {part.side}"
            by_side.setdefault(where, []).append((axis, part))
    hue = dict(zip(plan.mesh, _HUES)).get(by_side.get("side 0", [("", None)])[-1][0], 215)
    parts = [
        svg.box(
            left + column * cell + layer * shift, top + row * cell - layer * shift, cell - 2, cell - 2,
            title=f"chip {row},{column},{layer}", fill=_shade(row, rows, hue), rx=2,
        )
        for layer in reversed(range(layers))
        for row in range(rows)
        for column in range(columns)
    ]  # fmt: skip
    if shape[2] > layers:
        parts.append(_quiet(right + layers * shift, top - 8, f"{shape[2]} layers, {layers} drawn", size=11))
    behind = shift * (layers - 1) + 10
    arrows = {  # from, to, how far it bends; its name's place
        "side 0": ((left - 14, top), (left - 14, bottom - 2), rows * cell, (left - 30, (top + bottom) / 2), "end"),
        "side 1": ((left, bottom + 12), (right - 2, bottom + 12), columns * cell,
                   ((left + right) / 2, bottom + 40), "middle"),
        "side 2": ((right + 8, bottom), (right + 8 + behind, bottom - behind), 40.0,
                   (right + shift * layers + 14, bottom - shift * layers), "start"),
    }  # fmt: skip
    y = bottom + 66
    for where, entries in by_side.items():
        axis, part = entries[-1]
        if where in arrows:
            start, end, bend, place, anchor = arrows[where]
            parts += [_arrow(start, end, part.ring, bend), _text(*place, axis, anchor=anchor)]
        for axis, part in entries:
            parts.append(_text(left - 110, y, f"{axis}: {part}, {part.bandwidth / 1e9:.0f} GB/s into a device"))
            y += 18
    if plan.target.num_slices > 1:
        parts.append(_text(left - 110, y, f"{plan.target.num_slices} such slices, joined by the network"))
        y += 18
    return svg.picture(max(640, right + shift * layers + 160), y + 4, parts, "the slice and its mesh axes")


def _arrow(start: tuple[float, float], end: tuple[float, float], ring: bool, bend: float) -> Markup:
    """A line, closed by a bow if links wrap around."""
    (x1, y1), (x2, y2) = start, end
    if not ring:
        return svg.line(x1, y1, x2, y2, class_="axis")
    away = min(18.0, bend / 6)
    first, second = ((-away, 8.0), (-away, -8.0)) if x1 == x2 else ((8.0, away), (-8.0, away))
    bow = " ".join(f"{x:.1f} {y:.1f}" for x, y in ((x2 + first[0], y2 + first[1]), (x1 + second[0], y1 + second[1])))
    return svg.shape("path", d=f"M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f} C{bow} {x1:.1f} {y1:.1f}", class_="axis")


def _hosts(plan: Plan) -> Markup:
    hosts, per_host = plan.target.shape
    shown, cell, parts = min(hosts, 12), 34.0, []
    wide, deep = max(1, min(shown, 4)), -(-per_host // 4) * cell
    for host in range(shown):
        x, y = 20 + (host % wide) * (4 * cell + 36), 34 + (host // wide) * (deep + 52)
        frame = svg.box(x - 8, y - 8, 4 * cell + 14, deep + 14, title=f"host {host}", fill="none", class_="host", rx=6)
        parts += [frame, _quiet(x, y - 14, f"host {host}", size=11)]
        for gpu in range(per_host):
            title, fill = f"GPU {host * per_host + gpu}", _shade(gpu, per_host, _HUES[0])
            at = x + gpu % 4 * cell, y + gpu // 4 * cell
            parts.append(svg.box(*at, cell - 4, cell - 4, title=title, fill=fill, rx=3))
    y = 34 + -(-shown // wide) * (deep + 52)
    if hosts > shown:
        parts.append(_quiet(20, y, f"and {hosts - shown} more hosts"))
        y += 18
    for axis in plan.mesh:
        words = f"{axis}: {plan.links.describe(axis)}, {plan.links.bandwidth([axis]) / 1e9:.0f} GB/s into a device"
        parts.append(_text(20, y, words))
        y += 18
    return svg.picture(max(640, 40 + wide * (4 * cell + 36)), y + 4, parts, "the hosts and their GPUs")


def memory_picture(plan: Plan, compiled: int | None) -> Markup:
    """The memory of a device, predicted and by the compiler, against what is available."""
    capacity = plan.target.chip.hbm_bytes
    left, width = 110.0, 620
    scale = width / (max(capacity, plan.memory.peak, compiled or 0) * 1.02)
    kinds = plan.memory.per_kind()
    parts, x, y = [_text(left - 8, 34, "from types", anchor="end")], left, 60.0
    for kind, held in kinds.items():
        title = f"{kind}: {numbers.size(held)}"
        parts.append(svg.box(x, 16.0, held * scale, 28.0, title=title, fill=KIND_COLORS[kind]))
        x += held * scale
    parts.append(_text(x + 6, 35, numbers.size(plan.memory.peak)))
    if compiled:
        title = f"the compiler's count: {numbers.size(compiled)}"
        parts += [
            _text(left - 8, y + 18, "compiler", anchor="end"),
            svg.box(left, y, compiled * scale, 28.0, title=title, fill="#777"),
            _text(left + compiled * scale + 6, y + 19, numbers.size(compiled)),
        ]
        y += 44
    limit = left + capacity * scale
    parts.append(svg.line(limit, 8, limit, y - 6, class_="limit"))
    parts.append(_quiet(limit, y + 8, f"{numbers.size(capacity)} a device", size=11, anchor="end"))
    x, y = left, y + 26
    for kind, held in kinds.items():
        words = f"{kind} {numbers.size(held)}"
        parts += [svg.box(x, y - 9, 10, 10, fill=KIND_COLORS[kind]), _text(x + 14, y, words, size=11)]
        x += 170
        if x > left + width - 120:
            x, y = left, y + 18
    return svg.picture(left + width + 90, y + 12, parts, "memory of a device")


def timeline_picture(plan: Plan) -> Markup:
    """One layer, forward and backward: what is computed, and what moves beside it or alone."""
    depth, layer = _layer_lines(plan)
    of_pass = lambda *where: [line for line in layer if line.where in where]
    passes = {"forward": of_pass("forward"), "backward": of_pass("recomputed", "backward")}
    widest = max(sum(line.seconds - line.hidden for line in lines) for lines in passes.values()) / max(depth, 1)
    if not widest:
        words = "this step has no repeated layers to draw"
        return svg.picture(760, 40, [_text(10, 24, words)], "no layers")
    parts, y, left, width = [], 10.0, 100.0, 660
    scale = width / widest / depth
    for name, lines in passes.items():
        parts.append(_text(left - 10, y + 22, name, anchor="end", size=13))
        parts.append(_quiet(left - 10, y + 54, "moves", anchor="end", size=11))
        moves = [line for line in lines if line.moves]
        work = sorted((line for line in lines if not line.moves), key=lambda line: line.order)
        alone: dict[str, list[Line]] = {}
        for move in moves:
            if move.seconds - move.hidden > 0.02 * move.seconds:
                alone.setdefault(move.source, []).append(move)
        x = left
        for line in work:
            parts += _work_boxes(line, x, y, line.seconds * scale, depth)
            x += line.seconds * scale
            x, boxes = _alone(alone.pop(line.source, []), x, y, scale, depth)
            parts += boxes
        x, boxes = _alone([move for moves in alone.values() for move in moves], x, y, scale, depth)
        parts += boxes
        under = left
        for move in moves:
            if move.hidden > 0:
                title = f"{_moved(move)}: {numbers.seconds(move.hidden / depth)} hidden"
                parts.append(svg.box(under, y + 38, move.hidden * scale, 20.0, title=title, fill=MOVE_COLOR))
                under += move.hidden * scale
        parts.append(_text(x + 6, y + 21, numbers.seconds((x - left) / scale / depth), size=11))
        y += 76
    legend = {
        "products": WORK_COLORS["product"],
        "attention": WORK_COLORS["attention"],
        "elementwise": WORK_COLORS["elementwise"],
        "moves under computation": MOVE_COLOR,
        "moves that nothing hides": ALONE_COLOR,
    }
    x = left
    for words, color in legend.items():
        parts += [svg.box(x, y - 2, 10, 10, fill=color), _text(x + 14, y + 7, words, size=11)]
        x += 26 + 6.6 * len(words)
    parts.append(_quiet(left, y + 26, f"one layer, of which a step runs {depth}; pale: computed again", size=11))
    return svg.picture(left + width + 90, y + 36, parts, "one layer's timeline")


def _work_boxes(line: Line, x: float, y: float, width: float, depth: int) -> Iterable[Markup]:
    """A piece of work, and its name if there is room for it."""
    title = f"{line.label} ({line.where}, {line.kind}): {numbers.seconds(line.seconds / depth)}, waits for {line.bound}"
    pale = 0.55 if line.where == "recomputed" else None
    yield svg.box(x, y + 4, width, 26.0, title=title, fill=WORK_COLORS[line.kind], opacity=pale)
    if width > 62:
        yield _text(x + width / 2, y + 21, line.label.split(" ")[-1][:16], size=10, anchor="middle", fill="#fff")


def _alone(moves: list[Line], x: float, y: float, scale: float, depth: int) -> tuple[float, list[Markup]]:
    """The moves that nothing hides, one after the other: where the last one ends, and the boxes."""
    boxes = []
    for move in moves:
        seconds = move.seconds - move.hidden
        title = f"{_moved(move)}: {numbers.seconds(seconds / depth)} that nothing hides"
        boxes.append(svg.box(x, y + 4, seconds * scale, 54.0, title=title, fill=ALONE_COLOR))
        x += seconds * scale
    return x, boxes


def _moved(move: Line) -> str:
    over = f" over {','.join(move.axes)}" if move.axes else ""
    return f"{move.kind}{over}, {move.label}"


def _layer_lines(plan: Plan) -> tuple[int, list[Line]]:
    """How often a layer runs, and the lines of one: of the loop with most of the products' time."""
    sums: dict[tuple[int, bool], float] = {}
    for line in plan.times.lines:
        if line.kind in ("product", "grouped") and line.times > 1:
            loop = line.times, line.turns > 1
            sums[loop] = sums.get(loop, 0.0) + line.seconds
    depth, written_out = max(sums, key=lambda loop: sums[loop], default=(0, False))
    of_layer = lambda line: line.times % depth == 0 if line.moves else line.times == depth
    lines = [line for line in plan.times.lines if line.times and (line.turns > 1) == written_out]
    return depth, [line for line in lines if of_layer(line)] if depth else []


def _frame(left: float, top: float, width: float, height: float) -> Markup:
    """The two axes of a chart."""
    return svg.path([(left, top), (left, top + height), (left + width, top + height)], class_="axis")


def roofline_picture(plan: Plan) -> Markup:
    """Products and attention: FLOPs for each byte against the rate they reach, under the device's roofs."""
    chip = plan.target.chip
    points = [line for line in plan.times.lines if line.flops and line.num_bytes]
    if not points:
        return svg.picture(400, 40, [_text(10, 24, "no products")], "no roofline")
    low, high = 1.0, max(1e4, max(line.flops / line.num_bytes for line in points) * 2)
    floor, roof = chip.bf16_flops / 2000, chip.bf16_flops * 2
    left, top, width, height = 70.0, 16.0, 640, 260

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = left + math.log(max(intensity, low) / low) / math.log(high / low) * width
        return x, top + height - math.log(max(rate, floor) / floor) / math.log(roof / floor) * height

    knee = chip.bf16_flops / chip.hbm_bandwidth
    start, bend, end = at(low, low * chip.hbm_bandwidth), at(knee, chip.bf16_flops), at(high, chip.bf16_flops)
    parts = [
        svg.path([start, bend, end], class_="roof"),
        _text(end[0], end[1] - 6, f"{numbers.count(chip.bf16_flops)} FLOP/s", size=11, anchor="end"),
        _text(bend[0] - 10, bend[1] + 40, f"{chip.hbm_bandwidth / 1e9:.0f} GB/s", size=11, anchor="end"),
    ]
    most = max(line.seconds for line in points)
    for line in reversed(points):
        intensity, rate = line.flops / line.num_bytes, line.flops / line.seconds
        title = (
            f"{line.label} ({line.where}): {intensity:.0f} FLOP/B, {numbers.count(rate)} FLOP/s, "
            f"{numbers.seconds(line.seconds)} a step"
        )
        radius = 3 + 9 * math.sqrt(line.seconds / most)
        parts.append(svg.dot(*at(intensity, rate), radius, title=title, fill=WORK_COLORS[line.kind], fill_opacity=0.6))
    bottom = top + height
    parts.append(_frame(left, top, width, height))
    for power in range(int(math.log10(high)) + 1):
        parts.append(_text(at(10.0**power, floor)[0], bottom + 16, numbers.count(10**power), size=11, anchor="middle"))
    parts.append(_text(left + width / 2, bottom + 34, "FLOPs for each byte of memory traffic", anchor="middle"))
    parts.append(_text(8, top + 10, "FLOP/s"))
    return svg.picture(left + width + 30, bottom + 44, parts, "roofline")


def frontier_picture(found: Found) -> Markup | None:
    """The variants that were searched: memory against time."""
    able = [c for c in found.candidates if c.plan is not None]
    if not able:
        return None
    capacity = found.target.chip.hbm_bytes
    most_bytes = max(*(c.peak for c in able), capacity) * 1.08
    most_seconds, least = max(c.seconds for c in able) * 1.05, min(c.seconds for c in able) * 0.9
    left, top, width, height = 80.0, 16.0, 620, 280
    bottom = top + height

    def at(peak: float, seconds: float) -> tuple[float, float]:
        return left + peak / most_bytes * width, bottom - (seconds - least) / (most_seconds - least) * height

    x, _ = at(capacity, least)
    parts = [
        svg.line(x, top, x, bottom, class_="limit"),
        _quiet(x - 4, top + 12, "fits", size=11, anchor="end"),
        svg.path((at(c.peak, c.seconds) for c in sorted(found.frontier, key=lambda c: c.peak)), class_="axis"),
    ]
    for c in able:
        x, y = at(c.peak, c.seconds)
        color, radius = ("#3d8b72", 8) if c is found.winner else ("#4361a8" if c.fits else "#b9605a", 5)
        title = f"{c.words() or 'as it is'}: {numbers.seconds(c.seconds)}, {numbers.size(c.peak)}"
        parts.append(svg.dot(x, y, radius, title=title, fill=color, fill_opacity=0.8))
        if c is found.winner:
            parts.append(_text(x + 12, y + 4, "winner"))
    parts.append(_frame(left, top, width, height))
    for step in range(5):
        seconds, peak = least + (most_seconds - least) * step / 4, most_bytes * step / 4
        parts.append(_text(left - 8, at(0, seconds)[1] + 4, numbers.seconds(seconds), size=11, anchor="end"))
        parts.append(_text(at(peak, least)[0], bottom + 16, numbers.size(peak), size=11, anchor="middle"))
    parts.append(_text(left + width / 2, bottom + 34, "memory of a device", anchor="middle"))
    return svg.picture(left + width + 40, bottom + 42, parts, "time against memory")
