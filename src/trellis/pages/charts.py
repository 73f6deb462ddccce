"""Curves as inline SVG. Axes are HTML, so that their text keeps its size on every screen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trellis.figures.html import Markup, join, tag
from trellis.figures.numbers import count
from trellis.frozen import FrozenMap

MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: a value or None for each line of metrics.

    With `dots` each value is a dot, joined by a thin line; without, only a value without neighbours is a dot.
    """

    name: str
    values: Sequence[float | None]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the same steps.

    Attributes:
        title: what it shows.
        series: the curves.
        unit: the unit after a value.
        digits: digits after the point; None takes three significant digits with a suffix.
        zero: whether the scale begins at zero.
        log: whether the scale is logarithmic.
    """

    title: str
    series: tuple[Series, ...]
    unit: str = ""
    digits: int | None = 4
    zero: bool = False
    log: bool = False

    @property
    def known(self) -> bool:
        """Whether there is anything to draw."""
        return any(value is not None for series in self.series for value in series.values)

    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value of the scale, as logarithms if it is logarithmic."""
        values = [self.place(v) for s in self.series for v in s.values if v is not None and (v > 0 or not self.log)]
        low, high = min(values), max(values)
        low = min(0.0, low) if self.zero else low
        room = (high - low) * 0.06 or max(abs(high) * 0.1, 0.1 if self.log else 1e-12)
        return (low if self.zero and low == 0 else low - room), high + room

    def place(self, value: float) -> float:
        """A value on the scale."""
        return math.log10(value) if self.log else value


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[float | None]:
    """At most this many values: means of neighbours, if there are more. None is left out of the means.

    >>> thin([1.0, 3.0, None, 5.0], most=2)
    [2.0, 5.0]
    """
    if len(values) <= most:
        return list(values)
    width = -(-len(values) // most)
    groups = [[v for v in values[i : i + width] if v is not None] for i in range(0, len(values), width)]
    return [sum(group) / len(group) if group else None for group in groups]


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers inside a range, 1, 2 or 5 times a power of ten apart.

    >>> nice_ticks(0, 1000)
    [0, 200, 400, 600, 800, 1000]
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks = [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
    return [int(t) if step >= 1 else round(t, 12) for t in ticks]


def draw(
    chart: Chart,
    steps: Sequence[float],
    number: int,
    marks: Mapping[float, str] = FrozenMap(),
    whole: bool = True,
) -> Markup:
    """The chart as HTML.

    Args:
        chart: what to draw.
        steps: the step of each value, or anything else that grows with it.
        number: the chart's number on the page, by which the script finds its values.
        marks: what begins where, as vertical lines.
        whole: whether only whole numbers are written below it.
    """
    low, high = chart.bounds()
    first, last = steps[0], steps[-1] if steps[-1] > steps[0] else steps[0] + 1
    x = lambda step: 100 * (step - first) / (last - first)
    y = lambda value: 100 * (1 - (chart.place(value) - low) / (high - low))
    lines = []
    for index, series in enumerate(chart.series):
        points = [
            (x(step), y(v)) if v is not None and (v > 0 or not chart.log) else None
            for step, v in zip(steps, series.values, strict=True)
        ]
        lines.append(_curve(points, f"s{index}", series.dots))
    y_ticks = _log_ticks(low, high) if chart.log else nice_ticks(low, high, 4)
    grid = [
        tag("line", x1=0, x2=100, y1=f"{y(t):.2f}", y2=f"{y(t):.2f}", vector_effect="non-scaling-stroke")
        for t in y_ticks
    ]
    grid += [
        tag("line", tag("title", told), x1=f"{x(at):.2f}", x2=f"{x(at):.2f}", y1=0, y2=100, class_="mark",
            vector_effect="non-scaling-stroke")
        for at, told in marks.items()
    ]  # fmt: skip
    x_ticks = [t for t in nice_ticks(first, last, 6) if t == int(t) or not whole]
    plot = tag("svg", tag("g", *grid, class_="grid"), *lines, viewBox="0 0 100 100", preserveAspectRatio="none")
    names = [tag("span", tag("i", class_=f"s{i}"), s.name) for i, s in enumerate(chart.series)]
    return tag(
        "figure",
        tag("figcaption", tag("b", chart.title), tag("span", *names, class_="legend") if len(names) > 1 else None),
        tag(
            "div",
            tag("div", *(tag("span", _label(chart, t), style=f"top:{y(t):.2f}%") for t in y_ticks), class_="yaxis"),
            tag("div", plot, tag("div", class_="cross"), class_="plot", data_chart=number, tabindex=0),
            tag("div", *(tag("span", _round(t), style=f"left:{x(t):.2f}%") for t in x_ticks), class_="xaxis"),
            class_="chart",
        ),
    )


def script_data(charts: Sequence[Chart], steps: Sequence[int], name: str = "step") -> dict:
    """What the page's script shows at the pointer."""
    shown = [
        {
            "digits": chart.digits,
            "unit": chart.unit,
            "series": [{"name": s.name, "values": [_short(v) for v in s.values]} for s in chart.series],
        }
        for chart in charts
    ]
    return {"name": name, "steps": list(steps), "charts": shown}


def _curve(points: Sequence[tuple[float, float] | None], name: str, dots: bool) -> Markup:
    parts, pen_up = [], True
    for point in points:
        if point is None:
            # A curve breaks where a value is missing; dots are joined across the steps between them.
            pen_up = pen_up or not dots
            continue
        parts.append(f"{'M' if pen_up else 'L'}{point[0]:.2f} {point[1]:.2f}")
        pen_up = False
    line = tag("path", d="".join(parts), class_=f"curve {name}", vector_effect="non-scaling-stroke")
    around = zip([None, *points], points, [*points[1:], None])
    alone = [p for before, p, after in around if p is not None and (dots or (before is None and after is None))]
    if not alone:
        return line
    # A line of zero length with round ends is a dot that stretching the picture does not distort.
    spots = "".join(f"M{p[0]:.2f} {p[1]:.2f}h0" for p in alone)
    return join(line, tag("path", d=spots, class_=f"dots {name}", vector_effect="non-scaling-stroke"))


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside the range (given in logarithms), with 2 and 5 between them if there are few."""
    marks = [m * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
    inside = [m for m in marks if low <= math.log10(m) <= high]
    tens = [m for m in inside if math.log10(m) == round(math.log10(m))]
    return tens if len(tens) >= 3 else inside


def _label(chart: Chart, value: float) -> str:
    if chart.digits is None:
        return _round(value)
    if value and abs(value) < 1e-2:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4g}"


def _round(value: float) -> str:
    """A round number without the zeros that `count` would write: `0.2`, `500`, `12k`, `1.5B`."""
    if abs(value) < 1000:
        return f"{value:g}"
    text = count(value)
    suffix = text.lstrip("-0123456789.")
    return f"{float(text.removesuffix(suffix)):g}{suffix}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
