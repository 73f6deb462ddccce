"""The parts of a run's page that are not curves: memory, communication, layout, machine, time line."""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from trellis.figures.html import Markup, join, section, table, tag
from trellis.figures.numbers import count, duration, size
from trellis.inspect.buffers import KINDS
from trellis.train.timeline import ENDS

_LAYERS = "layers"


def memory(about: Mapping[str, Any]) -> Markup | None:
    """What each device holds, by kind: every device holds the same amount."""
    held = about.get("memory") or {}
    if not held:
        return None
    total, limit = sum(held.values()), (about.get("machine") or {}).get("device_memory")
    place = lambda kind: KINDS.index(kind) if kind in KINDS else len(KINDS)
    kinds = sorted(held, key=place)
    colour = lambda kind: f"k{min(place(kind), 7)}"  # each keeps its own, whichever kinds there are
    scale = max(limit or 0, total) or 1
    bars = [tag("i", class_=colour(k), style=f"width:{100 * held[k] / scale:.2f}%", title=k) for k in kinds]
    keys = [tag("div", tag("span", tag("i", class_=colour(kind)), kind), tag("b", size(held[kind]))) for kind in kinds]
    devices = math.prod((about.get("mesh") or {}).values())
    note = f"{size(total)} on {'each of ' + str(devices) + ' devices' if devices > 1 else 'the device'}"
    note += f" of {size(limit)}" if limit else ""
    counted = about.get("compiled")
    if counted:
        peak = sum(counted[name] for name in ("arguments", "outputs", "temporaries", "code")) - counted["aliased"]
        said = f"Read off the types. The compiler counts {size(peak)} at the highest point of a step."
    return section(
        "Memory",
        tag("div", *bars, class_="bar"),
        tag("div", *keys, class_="keys"),
        tag("p", said, class_="note") if counted else None,
        note=note,
    )


def communication(about: Mapping[str, Any], ledger: str) -> Markup | None:
    """The ledger of a step, summed by mesh axis and by kind of collective, and the whole ledger to unfold."""
    if not about.get("ledger") and not ledger:
        return None
    nothing: dict[str, Any] = {"per_axis": {}, "per_kind": {}, "total": 0, "count": 0}
    sums = about.get("ledger") or nothing
    along = f"; the compiler chooses along {', '.join(sums['auto'])}" if sums.get("auto") else ""
    if not sums["total"] and along:
        return section("Communication", tag("p", f"What moves is not known{along}.", class_="note"))
    if not sums["total"]:
        return section("Communication", tag("p", "A step moves nothing between devices.", class_="note"))
    return section(
        "Communication",
        _bars(sums["per_axis"], "k1"),
        tag("h3", "by collective"),
        _bars(sums["per_kind"], "k2"),
        tag("details", tag("summary", "the whole ledger"), tag("pre", ledger.strip())) if ledger else None,
        note=f"each device sends {size(sums['total'])} in a step, in {sums['count']} collectives{along}",
    )


def layout(about: Mapping[str, Any]) -> Markup | None:
    """What is sliced over which mesh axis, and a picture of the largest parameters with one device's slice filled."""
    mesh, chosen = about.get("mesh"), about.get("layout")
    if not mesh or not chosen:
        return None
    arrays = about.get("arrays") or []
    there = {dim["name"] for array in arrays for dim in array["dims"]} | {*chosen["compute"]}
    names = [name for name in {**chosen["params"], **chosen["compute"]} if name in there or not arrays]
    said = lambda which, name: tag("code", "/".join(chosen[which].get(name, ())) or "–")
    rows = [(tag("code", name), said("params", name), said("compute", name)) for name in names]
    sliced = table(rows, head=("axis", "at rest", "in use")) if rows else tag("p", "Nothing is sliced.", class_="note")
    shown = _largest(arrays)
    pictures = tag(
        "div",
        tag("h3", "the largest parameters at rest; one device holds the filled part"),
        tag("div", *(_slices(array, mesh) for array in shown), class_="slices"),
    )
    both = tag("div", tag("div", sliced), pictures if shown else None, class_="lay")
    axes = " ".join(f"{axis}={n}" for axis, n in mesh.items())
    return section("Layout", both, note=f"{chosen['preset']} on mesh {axes}", wide=True)


def machine(about: Mapping[str, Any]) -> Markup | None:
    """The machine that the run ran on."""
    host = about.get("machine")
    if not host:
        return None
    devices = f"{host['devices']} × {host['device_kind']}"
    rows = [
        ("devices", devices + (f", {size(host['device_memory'])} each" if host.get("device_memory") else "")),
        ("processes", host["processes"]),
        ("host", f"{host['host']}, {host['system']}"),
        ("processor", f"{host['cpu'] or 'unknown'}, {host['cores']} cores"),
        ("versions", f"Trellis {host['trellis']}, JAX {host['jax']}, Python {host['python']}"),
    ]
    return section("Machine", table([(tag("span", name, class_="note"), value) for name, value in rows]))


def samples(found: list[dict[str, Any]]) -> Markup | None:
    """What the model wrote."""
    if not found:
        return None
    last = found[-1]
    older = [
        tag("details", tag("summary", f"after step {s['step']:,}"), tag("pre", s["text"], class_="text"))
        for s in reversed(found[:-1])
    ]
    return section(
        "Sample", tag("pre", last["text"], class_="text"), *older, note=f"after step {last['step']:,}", wide=True
    )


def resolved_run(text: str) -> Markup | None:
    """`run.yaml`, with coloured keys."""
    if not text:
        return None
    lines = []
    for line in text.rstrip().splitlines():
        found = re.match(r"(\s*(?:- )?)([\w.]+)(:.*)", line)
        lines.append(join(found[1], tag("span", found[2], class_="key"), found[3]) if found else join(line))
    return section("The resolved run", tag("pre", Markup("\n".join(lines))), note="run.yaml alone reproduces it")


def time_line(events: list[dict[str, Any]]) -> Markup | None:
    """Each start of the run as a bar: compiling, training, and marks for checkpoints and evaluations."""
    starts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] in ("started", "resumed") or not starts:
            starts.append([])
        starts[-1].append(event)
    if not starts:
        return None
    longest = max(run[-1]["time"] - run[0]["time"] for run in starts) or 1.0
    keys = tag(
        "div",
        *(
            tag("span", tag("i", class_=colour), name)
            for name, colour in (("compiling", "k3"), ("training", "k0"), ("evaluation", "k4"), ("checkpoint", "k1"))
        ),
        class_="legend",
    )
    shown = starts[-12:]
    note = f"{len(starts)} starts, the last {len(shown)} shown" if len(starts) > len(shown) else None
    total = sum(run[-1]["time"] - run[0]["time"] for run in starts)
    note = note or f"{duration(total)} in {len(starts)} start{'s' if len(starts) > 1 else ''}"
    return section("Time line", *(_start(run, longest) for run in shown), keys, note=note)


def _start(run: list[dict[str, Any]], longest: float) -> Markup:
    begin, end = run[0]["time"], run[-1]["time"]
    at = lambda moment: 100 * (moment - begin) / longest
    pieces = [tag("i", class_="k0", style=f"left:0;width:{max(0.4, at(end)):.2f}%")]
    for event in run:
        where, hint = at(event["time"]), f"{event['event']}, step {event.get('step')}"
        if event["event"] == "compiled":
            wide = 100 * event["seconds"] / longest
            style = f"left:{max(0.0, where - wide):.2f}%;width:{wide:.2f}%"
            pieces.append(tag("i", class_="k3", style=style, title=f"compiled in {duration(event['seconds'])}"))
        elif event["event"] in ("evaluation", "checkpoint"):
            colour = "k4" if event["event"] == "evaluation" else "k1"
            pieces.append(tag("u", class_=colour, style=f"left:{where:.2f}%", title=hint))
    steps = [event["step"] for event in run if event.get("step") is not None]
    word = run[-1]["event"] if run[-1]["event"] in ENDS else "ended without a word"
    reached = f"steps {min(steps):,} to {max(steps):,}, " if steps else ""
    words = f"{reached}{word}, {duration(end - begin)}"
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin))
    why = run[-1].get("why")
    told = tag("small", f"{words}: {why}" if why else words)
    return tag("div", tag("span", clock), tag("div", *pieces, class_="track"), tag("span"), told, class_="start")


def _bars(sums: Mapping[str, int], colour: str) -> Markup:
    most = max(sums.values(), default=1) or 1
    rows = [
        join(
            tag("code", name),
            tag("div", tag("i", class_=colour, style=f"width:{100 * total / most:.1f}%")),
            tag("b", size(total)),
        )
        for name, total in sums.items()
    ]
    return tag("div", *rows, class_="hbar")


def _largest(arrays: list[dict[str, Any]], most: int = 6) -> list[dict[str, Any]]:
    """The largest matrices; of similar ones only the first."""
    seen, found = set(), []
    for array in sorted(arrays, key=lambda a: -a["bytes"]):
        shape = tuple((d["name"], d["size"], *d["mesh"]) for d in array["dims"])
        matrix = len([d for d in array["dims"] if d["name"] != _LAYERS]) > 1
        if matrix and shape not in seen:
            seen.add(shape)
            found.append(array)
    return found[:most]


def _slices(array: dict[str, Any], mesh: Mapping[str, int]) -> Markup:
    dims = array["dims"]
    drawn = [dim for dim in dims if dim["name"] != _LAYERS]
    slices = lambda dim: math.prod(mesh.get(axis, 1) for axis in dim["mesh"])
    parts = [slices(dim) for dim in drawn]
    # The picture has two directions: the two most sliced dimensions, in their order, else the outer ones.
    order = sorted(sorted(range(len(drawn)), key=lambda i: -parts[i])[:2])
    counts = [parts[i] for i in order] or [1]
    rows, columns = (1, counts[0]) if len(counts) == 1 else (counts[0], counts[1])
    whole = math.prod(map(slices, dims))
    shown_rows, shown_columns = min(rows, 16), min(columns, 32)
    width, height = 100 / shown_columns, 86 / shown_rows
    cells = [
        tag(
            "rect",
            x=f"{c * width:.2f}",
            y=f"{r * height:.2f}",
            width=f"{width:.2f}",
            height=f"{height:.2f}",
            class_="cell mine" if r == c == 0 else "cell",
            vector_effect="non-scaling-stroke",
        )
        for r in range(shown_rows)
        for c in range(shown_columns)
    ]
    words = " ".join("/".join([dim["name"], *dim["mesh"]]) + f"={dim['size']}" for dim in dims)
    share = f"1/{whole} of {size(array['bytes'])}" if whole > 1 else size(array["bytes"])
    return tag(
        "div",
        tag("svg", *cells, viewBox="0 0 100 86", preserveAspectRatio="none"),
        tag("code", tag("b", array["name"]), tag("br"), f"{array['dtype']}[{words}]"),
        tag("small", f"each device holds {share}" if whole > 1 else f"each device holds all, {share}"),
    )


def headline(about: Mapping[str, Any]) -> str:
    """The run in one line."""
    model, tokens, host, mesh = (about.get(name) or {} for name in ("model", "tokens", "machine", "mesh"))
    parts = []
    if model:
        parts.append(f"{model['family']}, {count(model['parameters'])} parameters")
    if tokens:
        parts.append(f"{count(tokens['run'])} tokens")
    if host:
        parts.append(f"{math.prod(mesh.values())} × {host['device_kind']}")
    if mesh and math.prod(mesh.values()) > 1:
        parts.append("mesh " + " ".join(f"{axis}={n}" for axis, n in mesh.items()))
    return " · ".join(parts)
