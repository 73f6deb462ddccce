"""Compares a compiled plan with a saved one: what became slower or larger or moves more, by line."""

import collections
import dataclasses
from typing import Any

from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.plan.saved import SavedPlan

# How much worse a figure may be, in percent.
BOUND = 2.0
_SHOWN = {"step": numbers.seconds, "memory": numbers.size, "sent": numbers.size}
_WORDS = {"step": "step", "memory": "memory", "sent": "sends"}
# Lines that change less than this share of their figure are left out.
_SMALL = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A figure, or a line of one, before and after.

    Attributes:
        figure: "step", "memory" or "sent".
        what: what takes it; empty for the figure itself.
        source: `file.py:line (function)`, if that is known.
        before, after: seconds or bytes.
    """

    figure: str
    what: str
    source: str
    before: float
    after: float

    @property
    def more(self) -> float:
        """How much worse it is; negative if it is better."""
        return self.after - self.before

    @property
    def percent(self) -> float:
        """The same, in percent of what it was before."""
        return 100 * self.more / self.before if self.before else 100.0 if self.more else 0.0


@dataclasses.dataclass(frozen=True)
class Changes:
    """Two compiled plans side by side.

    Attributes:
        before, after: the plans.
        settings: the settings in which they differ, `name before -> after`.
        figures: the figures that both have.
        lines: the lines that change, the worst first.
        bound: how much worse a figure may be, in percent.
    """

    before: SavedPlan
    after: SavedPlan
    settings: tuple[str, ...]
    figures: tuple[Change, ...]
    lines: tuple[Change, ...]
    bound: float

    @property
    def worse(self) -> list[str]:
        """What is worse by more than the bound, in words."""
        if self.before.fits and not self.after.fits:
            return ["it fitted before and does not fit now"]
        return [f"{_WORDS[c.figure]} {c.percent:+.1f} %" for c in self.figures if c.percent > self.bound]

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "settings": list(self.settings),
            "figures": [dataclasses.asdict(change) for change in self.figures],
            "lines": [dataclasses.asdict(change) for change in self.lines],
            "bound_percent": self.bound,
            "worse": self.worse,
        }


def changes(before: SavedPlan, after: SavedPlan, bound: float = BOUND) -> Changes:
    """Compares a plan with an earlier one.

    Lines are the same if what they are and their source lines are the same. Those that are left, from source that was
    edited, are matched by their functions.
    """
    said = [{"target": p.target, **p.versions, **p.settings} for p in (before, after)]
    names = [name for name in {**said[0], **said[1]} if said[0].get(name) != said[1].get(name)]
    settings = tuple(f"{name} {said[0].get(name)} -> {said[1].get(name)}" for name in names if name != "name")
    both = [figure for figure in _SHOWN if figure in before.figures and figure in after.figures]
    figures = tuple(Change(figure, "", "", before.figures[figure], after.figures[figure]) for figure in both)
    lines = [c for c in _lines(before, after) if abs(c.more) > _SMALL * before.figures.get(c.figure, 0.0)]
    share = lambda change: change.more / max(before.figures.get(change.figure, 0.0), 1e-30)
    return Changes(before, after, settings, figures, tuple(sorted(lines, key=share, reverse=True)), bound)


def _lines(before: SavedPlan, after: SavedPlan) -> list[Change]:
    """The lines of both plans that differ."""
    amounts = [{(x.figure, x.what, x.source): x.amount for x in plan.lines} for plan in (before, after)]
    shared = amounts[0].keys() & amounts[1].keys()
    found = [Change(*key, amounts[0][key], amounts[1][key]) for key in shared]
    left: dict[tuple[str, str, str], list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    sources: dict[tuple[str, str, str], str] = {}
    for side, lines in enumerate(amounts):
        for (figure, what, source), amount in lines.items():
            if (figure, what, source) not in shared:
                key = figure, what, _function(source)
                left[key][side] += amount
                sources[key] = source
    return found + [Change(*key[:2], sources[key], *both) for key, both in left.items()]


def _function(source: str) -> str:
    """A source line without its number.

    >>> _function("llama.py:104 (__call__)")
    'llama.py (__call__)'
    """
    file, _, rest = source.partition(":")
    return " ".join([file, *rest.split(" ")[1:]])


def changes_text(found: Changes, most: int = 20) -> str:
    """Two plans side by side as text, the verdict last."""
    before = found.before
    lines = [f"against {before.name} on {before.target}, {' '.join(f'{k} {v}' for k, v in before.versions.items())}"]
    shown = found.settings[:most]
    lines += [f"  differs     {setting}" for setting in shown]
    if len(found.settings) > most:
        lines.append(f"  differs     in {len(found.settings) - most} more settings")
    for change in found.figures:
        lines.append(f"  {_WORDS[change.figure]:<11} {_told(change)} ({change.percent:+.1f} %)")
    if found.lines:
        rows = [_row(change) for change in found.lines]
        header = ("figure", "before", "after", "more", "what", "at")
        rows = rows if len(rows) <= most else rows[: most // 2] + rows[-(most // 2) :]
        lines += ["", aligned(header, rows, right=(1, 2, 3))]
        if len(found.lines) > len(rows):
            lines.append(f"and {len(found.lines) - len(rows)} lines between them")
    worse = found.worse
    verdict = f"WORSE: {', '.join(worse)}" if worse else "no figure is worse"
    return "\n".join([*lines, "", f"{verdict} (bound {found.bound:g} %)"])


def _told(change: Change) -> str:
    show = _SHOWN[change.figure]
    return f"{show(change.before)} -> {show(change.after)}" if change.more else f"{show(change.after)} as before"


def _row(change: Change) -> tuple[str, ...]:
    show = _SHOWN[change.figure]
    more = ("+" if change.more > 0 else "-") + show(abs(change.more))
    sides = [show(amount) if amount else "none" for amount in (change.before, change.after)]
    return (_WORDS[change.figure], *sides, more, change.what, change.source)
