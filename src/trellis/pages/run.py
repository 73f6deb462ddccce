"""The page of a run: one self-contained HTML file."""

import contextlib
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from trellis.errors import UserError
from trellis.figures.html import Markup, join, section, tag
from trellis.figures.numbers import count, size
from trellis.files import write_whole
from trellis.pages import parts
from trellis.pages.charts import Chart, Series, draw, script_data, thin
from trellis.pages.read import RunFolder, read_folder
from trellis.pages.script import JS
from trellis.pages.style import CSS
from trellis.train.timeline import ENDS


def write_report(folder: str | Path) -> Path:
    """Writes `report.html` into a run's folder, from what is there. This can be repeated at any time, also in training.

    Returns:
        The file.

    Raises:
        UserError: the folder holds no metrics.
    """
    path = Path(folder) / "report.html"
    write_whole(path, page(read_folder(Path(folder))))
    return path


def page(run: RunFolder) -> str:
    """The page as text."""
    shown = charts(run.lines)
    marks = longer(run)
    along = "tokens" if marks else "step"  # a step of longer sequences may differ in tokens and in time
    steps = _thin_steps([line[along] for line in run.lines])
    drawn = [draw(chart, steps, number, marks) for number, chart in enumerate(shown)]
    notes = ["over tokens", *marks.values()] if marks else []
    if len(steps) < len(run.lines):
        notes.append(f"each point is the mean of {-(-len(run.lines) // len(steps))} lines")
    note = "; ".join(notes) or None
    with _as_written(run.name):
        headline, layout = parts.headline(run.about), parts.layout(run.about)
        memory, communication = parts.memory(run.about), parts.communication(run.about, run.ledger)
        machine = parts.machine(run.about)
    body = join(
        tag(
            "header",
            tag("h1", run.name),
            tag("span", state(run), class_=f"chip {state(run)}"),
            tag("button", "light / dark", id="theme", hidden="", type="button"),
            tag("p", headline),
        ),
        tag(
            "div",
            *(tag("div", tag("b", value), tag("span", name), class_="tile") for name, value in tiles(run)),
            class_="tiles",
        ),
        tag(
            "div",
            section("Curves", tag("div", *drawn, class_="curves"), note=note, wide=True) if drawn else None,
            parts.samples(run.samples),
            memory,
            communication,
            layout,
            parts.resolved_run(run.run),
            tag("div", parts.time_line(run.events), machine, class_="stack"),
            class_="grid2",
        ),
        tag("footer", f"written {time.strftime('%Y-%m-%d %H:%M:%S')} by Trellis; `trellis report` writes it anew"),
        tag("div", id="tip"),
    )
    data = json.dumps(script_data(shown, steps, along)).replace("</", "<\\/")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{tag('title', f'{run.name} · Trellis')}<style>{CSS}</style></head>\n<body><main>{body}</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n<script>{JS}</script></body></html>\n'
    )


@contextlib.contextmanager
def _as_written(name: str) -> Generator[None]:
    """Within it, an error means that the `about.json` of a run holds values of other types than a run writes."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            "The file about a run must hold what `trellis train` wrote.",
            seen=f"{type(error).__name__}: {error}",
            where=f"{name}/about.json",
            fix="remove the file: the page leaves it out, and a resumed run writes it again",
        ) from error


def charts(lines: list[dict[str, Any]]) -> list[Chart]:
    """The curves of a run for which its lines hold numbers."""
    column = lambda name: thin([line.get(name) for line in lines])
    norms = [v for v in column("grad_norm") if v]
    wide = bool(norms) and max(norms) > 30 * min(norms)
    found = [
        Chart("Loss", (Series("training", column("loss")), Series("validation", column("validation_loss"), dots=True))),
        Chart("Throughput", (Series("tokens a second", column("tokens_per_second")),), digits=None, zero=True),
        Chart("Learning rate", (Series("learning rate", column("learning_rate")),), digits=6, zero=True),
        Chart("Gradient norm", (Series("gradient norm", column("grad_norm")),), log=wide, zero=not wide),
        Chart("Bits per byte", (Series("validation", column("bits_per_byte"), dots=True),)),
        Chart("Utilisation (MFU)", (Series("MFU", _percent(column("mfu"))),), unit=" %", digits=1, zero=True),
    ]
    return [
        Chart(
            c.title, tuple(s for s in c.series if any(v is not None for v in s.values)), c.unit, c.digits, c.zero, c.log
        )
        for c in found
        if c.known
    ]


def longer(run: RunFolder) -> dict[float, str]:
    """Where the sequences of a run became longer: words for it, by the tokens read before."""
    found: dict[float, str] = {}
    for event in run.events:
        changes = event["event"] == "length"
        before = [line["tokens"] for line in run.lines if changes and line["step"] <= event["step"]]
        if before:
            found[before[-1]] = f"{event['sequence_length']:,} tokens a sequence from step {event['step'] + 1} on"
    return found


def tiles(run: RunFolder) -> list[tuple[str, str]]:
    """The figures at the top, by name, with the last known value of each."""

    def last(name: str) -> float | None:
        return next((line[name] for line in reversed(run.lines) if line.get(name) is not None), None)

    rates = sorted(line["tokens_per_second"] for line in run.lines if line.get("tokens_per_second"))
    middle = rates[len(rates) // 2] if rates else None
    found = [
        ("loss", last("loss"), "{:.4f}".format),
        ("validation loss", last("validation_loss"), "{:.4f}".format),
        ("bits per byte", last("bits_per_byte"), "{:.4f}".format),
        ("steps", last("step"), "{:,.0f}".format),
        ("tokens", last("tokens"), count),
        ("tokens/s, median", middle, count),
        (_mfu_name(last("mfu_noncausal")), last("mfu"), lambda v: f"{100 * v:.1f} %"),
        ("seconds a step", last("step_seconds"), "{:.3g}".format),
        ("memory", last("memory_bytes"), size),
    ]
    return [(name, show(value)) for name, value, show in found if value is not None]


def _mfu_name(noncausal: float | None) -> str:
    return "MFU" if noncausal is None else f"MFU ({100 * noncausal:.1f} % non-causal)"


def state(run: RunFolder) -> str:
    """The state of the run: finished, paused, interrupted, stopped; training; or killed, if it ended without a word."""
    last = run.events[-1]["event"] if run.events else ""
    return last if last in ENDS else "killed" if run.left else "training"


def _thin_steps(steps: list[int]) -> list[int]:
    return [round(step) for step in thin(steps)]


def _percent(values: list[float | None]) -> list[float | None]:
    return [None if value is None else 100 * value for value in values]


__all__ = ["Markup", "page", "write_report"]
