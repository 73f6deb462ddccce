"""Runs side by side: what differs in their files, and their curves over steps, tokens and time."""

import bisect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trellis.errors import UserError
from trellis.figures.html import join, section, table, tag
from trellis.figures.numbers import count, duration
from trellis.figures.terminal import sparkline
from trellis.figures.text import aligned
from trellis.files import load_yaml, yaml_problem
from trellis.pages.charts import Chart, Series, draw
from trellis.pages.read import RunFolder
from trellis.pages.style import CSS
from trellis.run.help import text_of

MOST_RUNS = 8
_POINTS = 300
_SCALES = {"steps": "steps", "tokens": "tokens", "seconds": "seconds of training"}
_SHOWN = {"loss": "Loss", "validation_loss": "Validation loss"}
# The first two curves of a page take their colours from its style sheet, which are those of k0 and k4.
_MORE_COLOURS = "".join(
    f".curve.s{i},.dots.s{i}{{stroke:var(--k{k})}}i.s{i}{{background:var(--k{k})}}"
    for i, k in enumerate((2, 3, 1, 5, 6, 7), start=2)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A run's numbers by steps, tokens and seconds of training, each a list as long as `lines`."""

    name: str
    lines: list[dict[str, Any]]
    steps: list[float]
    tokens: list[float]
    seconds: list[float]


def curves(runs: Sequence[RunFolder]) -> list[Curve]:
    """The curves of runs; runs with the same name are told apart by a number.

    Raises:
        UserError: there are too few or too many runs, or one of them has no step yet.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        fix = f"name 2 to {MOST_RUNS} folders, as in `trellis compare runs/a runs/b`"
        raise UserError(
            f"Only 2 to {MOST_RUNS} runs can be compared.", seen=len(runs), where="trellis compare", fix=fix
        )
    found = []
    for number, run in enumerate(runs, start=1):
        if not run.lines:
            raise UserError(
                "A run must have a step to be compared.", seen="no step yet", where=run.name, fix="wait for one"
            )
        name = run.name if [r.name for r in runs].count(run.name) == 1 else f"{run.name} ({number})"
        spent, before, seconds = 0.0, 0, []
        for line in run.lines:
            mean = line.get("step_seconds") or 0.0  # over more steps if a line's are short; for older runs
            took = line.get("seconds")
            spent += (line["step"] - before) * mean if took is None else took
            before = line["step"]
            seconds.append(spent)
        steps, tokens = ([float(line.get(key) or 0) for line in run.lines] for key in ("step", "tokens"))
        found.append(Curve(name=name, lines=run.lines, steps=steps, tokens=tokens, seconds=seconds))
    return found


def differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """The fields in which the runs' files differ, by dotted name, with each run's value, or `-` if it has none.

    A run's name is left out.
    """
    flat = [dict(_flat(_fields(run))) for run in runs]
    names = list(dict.fromkeys(name for fields in flat for name in fields))
    rows = [(name, [fields.get(name, "-") for fields in flat]) for name in names if name != "name"]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _fields(run: RunFolder) -> Mapping[str, Any]:
    import yaml

    try:
        found = load_yaml(run.run) or {}
    except yaml.YAMLError as error:
        found = yaml_problem(error)
    if not isinstance(found, Mapping):
        fix = "use the copy that is in each checkpoint"
        raise UserError(
            "A run's file must be valid YAML, of fields.", seen=found, where=f"{run.name}/run.yaml", fix=fix
        )
    return found


def _flat(value: Any, path: str = ""):
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, text_of(value)


def text(runs: Sequence[RunFolder]) -> str:
    """The comparison for a terminal."""
    found = curves(runs)
    rows = [(*_ends(curve), sparkline([line.get("loss") for line in curve.lines])) for curve in found]
    lines = [aligned((*_ENDS, "training loss"), rows, right=range(1, 8))]
    differ = differences(runs)
    reached = _together(runs, found, differ)
    if reached:
        lines += ["", reached]
    if not differ:
        return "\n".join([*lines, "", "their run.yaml files differ only in the name"])
    shown = [(name, *(_short(value) for value in values)) for name, values in differ]
    return "\n".join([*lines, "", "what differs in run.yaml", "", aligned(("field", *(c.name for c in found)), shown)])


_ENDS = ("run", "steps", "tokens", "time", "tok/s", "loss", "validation", "bits/byte")


def _ends(curve: Curve) -> tuple[str, ...]:
    """Where a run ended."""
    rate = curve.tokens[-1] / curve.seconds[-1] if curve.seconds[-1] else 0.0
    return (
        curve.name,
        f"{curve.steps[-1]:,.0f}",
        count(curve.tokens[-1]),
        duration(curve.seconds[-1]),
        count(rate),
        *(_last(curve, name) for name in ("loss", "validation_loss", "bits_per_byte")),
    )


# Fields that say which tokens a loss is counted over, where a run's folder does not tell its tokenizer.
_VOCABULARY = {"data.tokenizer", "data.source.vocab"}


def _of_one_vocabulary(runs: Sequence[RunFolder], differ: Sequence[tuple[str, list[str]]]) -> bool:
    """Whether runs count their losses over the same tokens. One tokenizer may lie at several paths, and stores at
    several paths may have several."""
    names = {name for name, _ in differ}
    told = [run.about.get("tokenizer") for run in runs]
    made = {each if isinstance(each, str) else None for each in told}
    return "model.vocab" not in names and (not _VOCABULARY & names if None in made else len(made) == 1)


def _together(runs: Sequence[RunFolder], found: Sequence[Curve], differ: Sequence[tuple[str, list[str]]]) -> str:
    """The losses at a point that all runs reached: the last number of tokens that each of them has read."""
    if not _of_one_vocabulary(runs, differ):
        return "their vocabularies differ: bits/byte can be compared, and losses cannot"
    tokens = min(curve.tokens[-1] for curve in found)
    at = [_at(curve.tokens, [line.get("loss") for line in curve.lines], tokens) for curve in found]
    if any(value is None for value in at):
        return ""
    return f"loss after {count(tokens)} tokens: " + ", ".join(
        f"{c.name} {v:.4f}" for c, v in zip(found, at, strict=True)
    )


def page(runs: Sequence[RunFolder]) -> str:
    """The comparison as one self-contained HTML page."""
    found = curves(runs)
    drawn = []
    for name, title in _SHOWN.items():
        for scale, words in _SCALES.items():
            scales = [getattr(curve, scale) for curve in found]
            grid = _grid(min(x[0] for x in scales), max(x[-1] for x in scales))
            series = tuple(Series(curve.name, _resampled(curve, scale, name, grid)) for curve in found)
            chart = Chart(f"{title} over {words}", series)
            if chart.known:
                drawn.append(draw(chart, grid, len(drawn), whole=scale != "seconds"))
    differ = differences(runs)
    what = (
        table([(name, *values) for name, values in differ], head=("field", *(c.name for c in found)))
        if differ
        else tag("p", "Their run.yaml files differ only in the name.", class_="note")
    )
    reached = tag("p", _together(runs, found, differ), class_="note")
    ends = join(table([_ends(curve) for curve in found], head=_ENDS), reached)
    body = join(
        tag("header", tag("h1", " · ".join(curve.name for curve in found))),
        tag("div", section("Where they ended", ends, wide=True), class_="grid2"),
        tag("div", section("Curves", tag("div", *drawn, class_="curves"), wide=True), class_="grid2"),
        tag("div", section("What differs in run.yaml", what, wide=True), class_="grid2"),
        tag("footer", f"written {time.strftime('%Y-%m-%d %H:%M:%S')} by `trellis compare`"),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>runs side by side · Trellis</title><style>{CSS}{_MORE_COLOURS}.grid2{{margin-bottom:14px}}</style>"
        f"</head>\n<body><main>{body}</main></body></html>\n"
    )


def _grid(first: float, last: float) -> list[float]:
    last = last if last > first else first + 1
    return [first + (last - first) * i / (_POINTS - 1) for i in range(_POINTS)]


def _resampled(curve: Curve, scale: str, name: str, grid: Sequence[float]) -> list[float | None]:
    pairs = zip(getattr(curve, scale), (line.get(name) for line in curve.lines), strict=True)
    known = [(x, value) for x, value in pairs if value is not None]
    xs, values = [x for x, _ in known], [value for _, value in known]
    found = [_at(xs, values, x) for x in grid]
    for x, value in [known[0], known[-1]] if known else ():  # which may be between two points of the grid
        nearest = min(range(len(grid)), key=lambda i: abs(grid[i] - x))
        found[nearest] = value if found[nearest] is None else found[nearest]
    return found


def _at(xs: Sequence[float], values: Sequence[float | None], x: float) -> float | None:
    """The value at a place, on the straight line between its neighbours; None outside the range of values."""
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    right = bisect.bisect_left(xs, x)
    after = values[right]
    if xs[right] == x or after is None or (before := values[right - 1]) is None:
        return after
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return before + share * (after - before)


def _last(curve: Curve, name: str) -> str:
    """The last known value. If the run went on without one, as after a loss that is no number, it says so."""
    given = [line[name] for line in curve.lines if name in line]
    known = [value for value in given if value is not None]
    return (f"{known[-1]:.4f}" if known else "") + (", then null" if given and given[-1] is None else "")


def _short(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:37]}..."
