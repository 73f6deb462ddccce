"""The pictures of a plan's page, as SVG text: no script, no font, nothing to load."""

import html
import math
from collections.abc import Sequence

from trellis.inspect.rows import human_bytes
from trellis.plan.quick import Plan
from trellis.plan.roofline import Line
from trellis.plan.show import human_count, human_seconds

KIND_COLORS = {
    "parameters": "#4361a8",
    "optimizer": "#7a94c9",
    "gradients": "#b9605a",
    "activations": "#3d8b72",
    "gathered weights": "#c79a3b",
    "batch": "#8a8a8a",
    "temporaries": "#8d6aa8",
    "fragmentation": "#b8b0a0",
    "other": "#d0d0d0",
}
WORK_COLORS = {"product": "#4361a8", "attention": "#3d8b72", "kernel": "#3d8b72", "elementwise": "#8d6aa8"}
MOVE_COLOR, ALONE_COLOR = "#c79a3b", "#b9605a"


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", extra: str = "") -> str:
    said = html.escape(words)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" {extra}>{said}</text>'


def _box(x: float, y: float, w: float, h: float, fill: str, title: str = "", extra: str = "") -> str:
    tip = f"<title>{html.escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0.3):.2f}" height="{h:.2f}" fill="{fill}" {extra}>{tip}</rect>'
    )


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{html.escape(label)}">{inside}</svg>'


def _shade(position: int, size: int, hue: int) -> str:
    return f"hsl({hue} 45% {35 + 40 * position / max(size - 1, 1):.0f}%)"


def slice_picture(plan: Plan) -> str:
    """The devices, and which mesh axis runs along which links."""
    target = plan.target
    if target.chip.kind == "gpu":
        return _hosts(plan)
    shape = (*target.shape, *[1] * (3 - len(target.shape)))
    columns, rows, layers = shape[1], shape[0], min(shape[2], 4)
    cell = max(8.0, min(26.0, 420 / max(columns, rows)))
    shift = cell * 0.8
    left, top = 130, 40 + shift * (layers - 1)
    parts = []
    hues = dict(zip(plan.mesh, (215, 160, 35, 280, 0, 100)))
    by_side = {}
    for axis, found in plan.links.parts.items():
        for part in found:
            by_side.setdefault(part.where, []).append((axis, part))
    first = by_side.get("side 0", [("", None)])[-1][0]
    for layer in reversed(range(layers)):
        for row in range(rows):
            for column in range(columns):
                x = left + column * cell + layer * shift
                y = top + row * cell - layer * shift
                fill = _shade(row, rows, hues.get(first, 215))
                parts.append(_box(x, y, cell - 2, cell - 2, fill, f"chip {row},{column},{layer}", 'rx="2"'))
    if shape[2] > layers:
        words = f"{shape[2]} layers, {layers} drawn"
        parts.append(_text(left + columns * cell + layers * shift, top - 8, words, size=11, extra='class="quiet"'))
    right, bottom = left + columns * cell, top + rows * cell
    legends = []
    for where, entries in by_side.items():
        names = ", ".join(f"{axis}: {part}" for axis, part in entries)
        legends.append((where, names, entries[-1][1]))
    for where, _names, part in legends:
        ring = part.ring
        if where == "side 0":
            parts.append(_arrow(left - 14, top, left - 14, bottom - 2, ring, rows * cell))
            parts.append(_text(left - 30, (top + bottom) / 2, by_side[where][-1][0], anchor="end"))
        elif where == "side 1":
            parts.append(_arrow(left, bottom + 12, right - 2, bottom + 12, ring, columns * cell))
            parts.append(_text((left + right) / 2, bottom + 40, by_side[where][-1][0], anchor="middle"))
        elif where == "side 2":
            parts.append(
                _arrow(
                    right + 8,
                    bottom,
                    right + 8 + shift * (layers - 1) + 10,
                    bottom - shift * (layers - 1) - 10,
                    ring,
                    40,
                )
            )
            parts.append(_text(right + shift * layers + 14, bottom - shift * layers, by_side[where][-1][0]))
    y = bottom + 66
    for where, names, part in legends:
        words = f"{where}: {names}; a device takes in {part.bandwidth / 1e9:.0f} GB/s over it"
        parts.append(_text(left - 110, y, words, size=12))
        y += 18
    if target.num_slices > 1:
        parts.append(_text(left - 110, y, f"{target.num_slices} such slices, joined by the network", size=12))
        y += 18
    return _svg(max(640, right + shift * layers + 160), y + 4, parts, "the slice and its mesh axes")


def _arrow(x1: float, y1: float, x2: float, y2: float, ring: bool, bend: float) -> str:
    if not ring:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="axis"/>'
    away = min(18.0, bend / 6)
    if x1 == x2:
        bow = f"C{x2 - away:.1f} {y2 + 8:.1f} {x1 - away:.1f} {y1 - 8:.1f}"
    else:
        bow = f"C{x2 + 8:.1f} {y2 + away:.1f} {x1 - 8:.1f} {y1 + away:.1f}"
    return f'<path d="M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f} {bow} {x1:.1f} {y1:.1f}" class="axis"/>'


def _hosts(plan: Plan) -> str:
    hosts, per_host = plan.target.shape
    shown = min(hosts, 12)
    parts, cell = [], 34.0
    wide = max(1, min(shown, 4))
    for host in range(shown):
        x, y = 20 + (host % wide) * (4 * cell + 36), 34 + (host // wide) * (-(-per_host // 4) * cell + 52)
        height = -(-per_host // 4) * cell + 14
        parts.append(_box(x - 8, y - 8, 4 * cell + 14, height, "none", f"host {host}", 'class="host" rx="6"'))
        parts.append(_text(x, y - 14, f"host {host}", size=11, extra='class="quiet"'))
        for gpu in range(per_host):
            fill = _shade(gpu, per_host, 215)
            parts.append(
                _box(
                    x + gpu % 4 * cell,
                    y + gpu // 4 * cell,
                    cell - 4,
                    cell - 4,
                    fill,
                    f"GPU {host * per_host + gpu}",
                    'rx="3"',
                )
            )
    y = 34 + -(-shown // wide) * (-(-per_host // 4) * cell + 52)
    if hosts > shown:
        parts.append(_text(20, y, f"and {hosts - shown} more hosts", extra='class="quiet"'))
        y += 18
    for axis in plan.mesh:
        words = f"{axis}: {plan.links.describe(axis)}, {plan.links.bandwidth([axis]) / 1e9:.0f} GB/s into a device"
        parts.append(_text(20, y, words))
        y += 18
    return _svg(max(640, 40 + wide * (4 * cell + 36)), y + 4, parts, "the hosts and their GPUs")


def memory_picture(plan: Plan, compiled: int | None) -> str:
    """Memory of a device, predicted and by the compiler, against what there is."""
    capacity = plan.target.chip.hbm_bytes
    most = max(capacity, plan.memory.peak, compiled or 0) * 1.02
    left, width = 110, 620
    parts = [_text(left - 8, 34, "from types", anchor="end")]
    x = float(left)
    for kind, size in plan.memory.per_kind().items():
        w = size / most * width
        if size:
            parts.append(_box(x, 16, w, 28, KIND_COLORS[kind], f"{kind}: {human_bytes(size)}"))
        x += w
    parts.append(_text(x + 6, 35, human_bytes(plan.memory.peak)))
    y = 60
    if compiled:
        parts.append(_text(left - 8, y + 18, "compiler", anchor="end"))
        parts.append(
            _box(left, y, compiled / most * width, 28, "#777", f"the compiler's count: {human_bytes(compiled)}")
        )
        parts.append(_text(left + compiled / most * width + 6, y + 19, human_bytes(compiled)))
        y += 44
    limit = left + capacity / most * width
    parts.append(f'<line x1="{limit:.1f}" y1="8" x2="{limit:.1f}" y2="{y - 6}" class="limit"/>')
    parts.append(_text(limit, y + 8, f"{human_bytes(capacity)} a device", size=11, anchor="end", extra='class="quiet"'))
    x, y = float(left), y + 26
    for kind, size in plan.memory.per_kind().items():
        if size:
            parts.append(_box(x, y - 9, 10, 10, KIND_COLORS[kind]))
            parts.append(_text(x + 14, y, f"{kind} {human_bytes(size)}", size=11))
            x += 170
            if x > left + width - 120:
                x, y = float(left), y + 18
    return _svg(left + width + 90, y + 12, parts, "memory of a device")


def timeline_picture(plan: Plan) -> str:
    """One layer, forward and backward: what is computed, and what moves under it or alone."""
    depth = _depth(plan)
    parts, y = [], 10.0
    passes = {"forward": ("forward",), "backward": ("recomputed", "backward")}
    widest = max((_pass_seconds(plan, where, depth) for where in passes.values()), default=0.0)
    if not depth or not widest:
        return _svg(760, 40, [_text(10, 24, "this step has no repeated layers to draw")], "no layers")
    left, width = 100, 660
    scale = width / widest
    for name, where in passes.items():
        work = sorted(
            (line for line in plan.times.lines if line.where in where and line.times == depth and not line.axes),
            key=lambda line: line.order,
        )
        moves = [
            line
            for line in plan.times.lines
            if line.where in where and line.axes and line.times % depth == 0 and line.times
        ]
        parts.append(_text(left - 10, y + 22, name, anchor="end", size=13))
        parts.append(_text(left - 10, y + 54, "moves", anchor="end", size=11, extra='class="quiet"'))
        x = float(left)
        alone = {}
        for move in moves:
            if move.seconds - move.hidden > 0.02 * move.seconds:
                alone.setdefault(move.source, []).append(move)
        for line in work:
            w = line.seconds / depth * scale
            took = human_seconds(line.seconds / depth)
            said = f"{line.label} ({line.where}, {line.kind}): {took}, waits for {line.bound}"
            again = 'opacity="0.55"' if line.where == "recomputed" else ""
            parts.append(_box(x, y + 4, w, 26, WORK_COLORS[line.kind], said, again))
            if w > 62:
                parts.append(
                    _text(
                        x + w / 2, y + 21, line.label.split(" ")[-1][:16], size=10, anchor="middle", extra='fill="#fff"'
                    )
                )
            x += w
            for move in alone.pop(line.source, []):
                x = _alone(parts, move, x, y, depth, scale)
        for found in alone.values():
            for move in found:
                x = _alone(parts, move, x, y, depth, scale)
        under = float(left)
        for move in moves:
            w = move.hidden / depth * scale
            if w > 0:
                said = (
                    f"{move.kind} over {','.join(move.axes)}, {move.label}: {human_seconds(move.hidden / depth)} hidden"
                )
                parts.append(_box(under, y + 38, w, 20, MOVE_COLOR, said))
                under += w
        parts.append(_text(x + 6, y + 21, human_seconds((x - left) / scale), size=11))
        y += 76
    legend = [
        (WORK_COLORS["product"], "products"),
        (WORK_COLORS["attention"], "attention"),
        (WORK_COLORS["elementwise"], "elementwise"),
        (MOVE_COLOR, "moves under computation"),
        (ALONE_COLOR, "moves that nothing hides"),
    ]
    x = float(left)
    for color, words in legend:
        parts.append(_box(x, y - 2, 10, 10, color))
        parts.append(_text(x + 14, y + 7, words, size=11))
        x += 26 + 6.6 * len(words)
    parts.append(_text(left, y + 26, f"one of {depth} layers; pale: computed again", size=11, extra='class="quiet"'))
    return _svg(left + width + 90, y + 36, parts, "one layer's timeline")


def _alone(parts: list[str], move: Line, x: float, y: float, depth: int, scale: float) -> float:
    seconds = (move.seconds - move.hidden) / depth
    said = f"{move.kind} over {','.join(move.axes)}, {move.label}: {human_seconds(seconds)} that nothing hides"
    parts.append(_box(x, y + 4, seconds * scale, 54, ALONE_COLOR, said))
    return x + seconds * scale


def _depth(plan: Plan) -> int:
    """How often a layer runs: the loop length with most of the products' time."""
    sums: dict[int, float] = {}
    for line in plan.times.lines:
        if line.kind == "product" and line.times > 1:
            sums[line.times] = sums.get(line.times, 0.0) + line.seconds
    return max(sums, key=lambda times: sums[times], default=0)


def _pass_seconds(plan: Plan, where: tuple[str, ...], depth: int) -> float:
    if not depth:
        return 0.0
    lines = [line for line in plan.times.lines if line.where in where and line.times and line.times % depth == 0]
    return sum((line.seconds - line.hidden) / depth for line in lines if line.axes or line.times == depth)


def roofline_picture(plan: Plan) -> str:
    """Products and attention: FLOPs for each byte against the rate they reach, under the device's roofs."""
    chip = plan.target.chip
    points = [line for line in plan.times.lines if line.flops and line.num_bytes]
    if not points:
        return _svg(400, 40, [_text(10, 24, "no products")], "no roofline")
    low, high = 1.0, max(1e4, max(line.flops / line.num_bytes for line in points) * 2)
    floor, roof = chip.bf16_flops / 2000, chip.bf16_flops * 2
    left, top, width, height = 70, 16, 640, 260

    def place(intensity: float, rate: float) -> tuple[float, float]:
        x = left + math.log(max(intensity, low) / low) / math.log(high / low) * width
        y = top + height - math.log(max(rate, floor) / floor) / math.log(roof / floor) * height
        return x, y

    knee = chip.bf16_flops / chip.hbm_bandwidth
    start, bend, end = place(low, low * chip.hbm_bandwidth), place(knee, chip.bf16_flops), place(high, chip.bf16_flops)
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in (start, bend, end))
    parts = [f'<path d="M{path}" class="roof"/>']
    parts.append(_text(end[0], end[1] - 6, f"{human_count(chip.bf16_flops)} FLOP/s", size=11, anchor="end"))
    parts.append(_text(bend[0] - 10, bend[1] + 40, f"{chip.hbm_bandwidth / 1e9:.0f} GB/s", size=11, anchor="end"))
    most = max(line.seconds for line in points)
    for line in reversed(points):
        x, y = place(line.flops / line.num_bytes, line.flops / line.seconds)
        radius = 3 + 9 * math.sqrt(line.seconds / most)
        said = (
            f"{line.label} ({line.where}): {line.flops / line.num_bytes:.0f} FLOP/B, "
            f"{human_count(line.flops / line.seconds)} FLOP/s, {human_seconds(line.seconds)} a step"
        )
        tip = f"<title>{html.escape(said)}</title>"
        color = WORK_COLORS[line.kind]
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color}" fill-opacity="0.6">{tip}</circle>'
        )
    bottom = top + height
    parts.append(f'<path d="M{left} {top} L{left} {bottom} L{left + width} {bottom}" class="axis"/>')
    for power in range(0, int(math.log10(high)) + 1):
        x, _ = place(10.0**power, floor)
        parts.append(_text(x, bottom + 16, human_count(10**power), size=11, anchor="middle"))
    parts.append(
        _text(left + width / 2, bottom + 34, "FLOPs for each byte of memory traffic", size=12, anchor="middle")
    )
    parts.append(_text(8, top + 10, "FLOP/s", size=12))
    return _svg(left + width + 30, bottom + 44, parts, "roofline")


def frontier_picture(found) -> str:
    """The variants that were searched: memory against time."""
    able = [c for c in found.candidates if c.plan is not None]
    if not able:
        return ""
    capacity = found.target.chip.hbm_bytes
    most_bytes = max(*(c.peak for c in able), capacity) * 1.08
    most_seconds, least = max(c.seconds for c in able) * 1.05, min(c.seconds for c in able) * 0.9
    left, top, width, height = 80, 16, 620, 280

    def place(peak: float, seconds: float) -> tuple[float, float]:
        return left + peak / most_bytes * width, top + height - (seconds - least) / (most_seconds - least) * height

    x, _ = place(capacity, least)
    parts = [f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}" class="limit"/>']
    parts.append(_text(x - 4, top + 12, "fits", size=11, anchor="end", extra='class="quiet"'))
    path = " L".join(
        "{:.1f} {:.1f}".format(*place(c.peak, c.seconds)) for c in sorted(found.frontier, key=lambda c: c.peak)
    )
    parts.append(f'<path d="M{path}" class="axis"/>')
    for c in able:
        x, y = place(c.peak, c.seconds)
        color = "#3d8b72" if c is found.winner else "#4361a8" if c.fits else "#b9605a"
        said = f"{c.words() or 'as it is'}: {human_seconds(c.seconds)}, {human_bytes(c.peak)}"
        tip = f"<title>{html.escape(said)}</title>"
        radius = 8 if c is found.winner else 5
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}" fill-opacity="0.8">{tip}</circle>')
        if c is found.winner:
            parts.append(_text(x + 12, y + 4, "winner", size=12))
    bottom = top + height
    parts.append(f'<path d="M{left} {top} L{left} {bottom} L{left + width} {bottom}" class="axis"/>')
    for step in range(5):
        seconds = least + (most_seconds - least) * step / 4
        parts.append(_text(left - 8, place(0, seconds)[1] + 4, human_seconds(seconds), size=11, anchor="end"))
        peak = most_bytes * step / 4
        parts.append(_text(place(peak, least)[0], bottom + 16, human_bytes(peak), size=11, anchor="middle"))
    parts.append(_text(left + width / 2, bottom + 34, "memory of a device", size=12, anchor="middle"))
    return _svg(left + width + 40, bottom + 42, parts, "time against memory")
