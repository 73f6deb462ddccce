"""A plan as one self-contained HTML page: pictures, tables, and how every number is calculated."""

from collections.abc import Sequence

from trellis.figures import numbers
from trellis.figures.html import Markup, join, table, tag
from trellis.pages.plan_pictures import (
    frontier_picture,
    memory_picture,
    roofline_picture,
    slice_picture,
    timeline_picture,
)
from trellis.plan.advice import advice
from trellis.plan.frontier import NOTHING_FITS, OWN_WINS, frontier_rows, why_won
from trellis.plan.narrow import HEADER, Brought
from trellis.plan.phases import PHASES, RIGHT, PhasePlan, about_fullest, about_phases, phases_rows
from trellis.plan.quick import Plan
from trellis.plan.search import Found
from trellis.plan.text import CAVEAT, STAGES, devices_said, particulars, stages_chart
from trellis.plan.verdict import Verdict, waited

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --paper: #fbfbf8; --quiet: #6b7280; --line: #d5d7d2; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15181d; --quiet: #9aa1ac; --line: #343a44; --card: #1c2027; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 24px;
  max-width: 1060px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 34px 0 8px; } p { margin: 4px 0 10px; }
.quiet { color: var(--quiet); fill: var(--quiet); } .bad { color: #b9605a; font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.card b { display: block; font-size: 20px; } .card span { color: var(--quiet); font-size: 13px; }
svg { box-sizing: border-box; width: 100%; height: auto; max-height: 560px; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
svg text { fill: var(--ink); font-family: system-ui, sans-serif; } svg text[fill] { fill: #fff; }
svg .quiet { fill: var(--quiet); } svg .axis { stroke: var(--quiet); fill: none; stroke-width: 1.5; }
svg .roof { stroke: var(--ink); fill: none; stroke-width: 2; } svg .host { stroke: var(--line); }
svg .limit { stroke: #b9605a; stroke-width: 1.5; stroke-dasharray: 5 4; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; width: 100%; }
td, th { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.num, th.num { text-align: right; white-space: nowrap; } code { font: 12px ui-monospace, monospace; }
.scroll td:last-child { min-width: 210px; }
details { margin: 6px 0; } summary { cursor: pointer; } p code { overflow-wrap: anywhere; }
@media (max-width: 720px) { body { padding: 14px; } .scroll svg { width: 700px; max-width: none; }
  .scroll table { min-width: 1000px; } }
"""


def page(
    plan: Plan,
    verdict: Verdict | None = None,
    found: Found | None = None,
    *,
    fitted: Sequence[str] = (),
    ways: Sequence[str] = (),
    narrow: Sequence[Brought] = (),
    advised: Sequence[str] | None = None,
    phases: Sequence[PhasePlan] = (),
) -> str:
    """The page of a plan.

    Args:
        plan: the plan from types.
        verdict: the compiler's view.
        found: what a search found.
        fitted: how the recipe was changed for the target.
        ways: what would make it fit, if it does not.
        narrow: what narrow products gain.
        advised: the plan's advice, if options were tried for it.
        phases: the plans of all lengths, if sequences become longer.
    """
    title = f"{plan.name} on {plan.target.name}"
    about = (
        f"{devices_said(plan)}; {numbers.count(plan.parameters)} parameters, {numbers.count(plan.tokens)} tokens a step"
    )
    ticks = stages_chart(plan)
    changes = [*ways, *(advice(plan) if advised is None else advised)]
    body = join(
        tag("h1", title),
        _quiet(about),
        *(_quiet(f"Fitted: {line}.") for line in fitted),
        *(_sentence(f"{name}: {words}") for name, words in particulars(plan)),
        None if plan.fits else tag("p", "By the prediction this does not fit.", class_="bad"),
        _cards(plan, verdict),
        _part("What to change", tag("ul", *(tag("li", line) for line in changes))) if changes else None,
        _part("Lengths of sequences", *_phases(phases)) if len(phases) > 1 else None,
        _part("Stages", _sentence(STAGES), _wide(tag("pre", ticks))) if ticks else None,
        _part("Narrow products", table([b.row() for b in narrow], HEADER, right=(2,))) if narrow else None,
        _part("The devices and the mesh", _wide(slice_picture(plan))),
        _part("Memory of a device", *_memory(plan, verdict)),
        _part("One layer", _wide(timeline_picture(plan))),
        _part("Roofline", _wide(roofline_picture(plan))),
        _part("Search", *_search(found)) if found is not None else None,
        _part("Time of a step, on one device", *_times(plan)),
        _part("Communication", *_communication(plan)),
        _part("The compiled program", *_compiled(verdict)) if verdict is not None and verdict.ledger else None,
        _part("How far to trust this", tag("p", CAVEAT)),
        _quiet(f"{plan.target.chip.name}: {plan.target.chip.source}."),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width"),
        tag("title", title),
        tag("style", Markup(_STYLE)),
    )
    return f"<!doctype html>{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _part(title: str, *children: object) -> Markup:
    return join(tag("h2", title), *children)


def _quiet(words: str) -> Markup:
    return tag("p", words, class_="quiet")


def _sentence(words: str, kind: str = "quiet") -> Markup:
    return tag("p", f"{words[:1].upper()}{words[1:]}.", class_=kind)


def _wide(picture: Markup | None) -> Markup:
    """A picture that keeps its size on a narrow screen, where it scrolls sideways."""
    return tag("div", picture, class_="scroll")


def _cards(plan: Plan, verdict: Verdict | None) -> Markup:
    free = plan.target.chip.hbm_bytes - plan.memory.peak
    cards = [
        (numbers.seconds(plan.seconds), "a step, predicted"),
        (f"{plan.mfu:.1%}", "MFU, predicted"),
        (numbers.count(plan.tokens_per_second), "tokens a second"),
        (numbers.size(plan.memory.peak), "a device at the highest point"),
        (numbers.size(abs(free)), "free" if free >= 0 else "too much"),
        (plan.times.binding, "is what most of the step waits for"),
    ]
    if verdict is not None and verdict.seconds is not None:
        cards.insert(1, (numbers.seconds(verdict.seconds), "a step, from the compiler's schedule"))
        cards.insert(5, (numbers.size(verdict.compiled.peak), "a device, by the compiler"))
    if plan.dollars_per_billion_tokens is not None:
        cards.append((numbers.dollars(plan.dollars_per_billion_tokens), "for a billion tokens"))
    return tag("div", *(tag("div", tag("b", a), tag("span", b), class_="card") for a, b in cards), class_="cards")


def _memory(plan: Plan, verdict: Verdict | None) -> list[Markup]:
    rows = [(numbers.size(b.num_bytes), b.kind, b.name, b.what, b.source) for b in plan.memory.buffers[:16]]
    largest = table(rows, ("bytes", "kind", "name", "type", "made at"), right=(0,))
    host = f" In the host's memory: {numbers.size(plan.memory.host)} a device." if plan.memory.host else ""
    return [
        _wide(memory_picture(plan, verdict.compiled.peak if verdict is not None else None)),
        _quiet(f"Highest at {plan.memory.where or 'rest'}." + host),
        tag("details", tag("summary", "The largest buffers at that point"), largest),
    ]


def _phases(phases: Sequence[PhasePlan]) -> list[Markup]:
    shown = table(phases_rows(phases), PHASES, right=RIGHT)
    return [_sentence(about_phases(phases)), shown, _sentence(about_fullest(phases))]


def _times(plan: Plan) -> list[Markup | None]:
    times, rows = plan.times, []
    for line in times.lines[:60]:
        hidden = f"{line.hidden / line.seconds:.0%}" if line.hidden else ""
        what = (line.kind, line.where, line.bound, line.label, line.source, line.formula)
        rows.append((numbers.seconds(line.seconds), hidden, *what))
    exposed, hidden = numbers.seconds(times.exposed), numbers.seconds(times.hidden)
    foot = f"Computation {numbers.seconds(times.computation)}, communication {exposed} exposed and {hidden} hidden."
    header = ("time", "hidden", "kind", "pass", "waits for", "what", "at", "formula")
    return [_quiet(foot), *_long(rows, header, right=(0, 1))]


def _long(rows: list[tuple], header: tuple[str, ...], right: tuple[int, ...], first: int = 16) -> list[Markup | None]:
    """A table of the first rows, and one of the others that can be opened."""
    more = rows[first:]
    others = tag("details", tag("summary", f"{len(more)} more"), table(more, header, right=right))
    return [table(rows[:first], header, right=right), others if more else None]


def _communication(plan: Plan) -> list[Markup | None]:
    rows = [
        (row.kind, row.axis, f"{row.dtype}[{row.what}]", numbers.size(row.wire), row.times, numbers.size(row.total),
         row.direction, row.source)
        for row in sorted(plan.ledger.rows, key=lambda row: -row.total)
    ]  # fmt: skip
    header = ("collective", "mesh axis", "of", "bytes", "times", "in a step", "pass", "at")
    said = plan.ledger.chosen
    return [_quiet(f"{said[:1].upper()}{said[1:]}.") if said else None, *_long(rows, header, right=(3, 4, 5))]


def _compiled(verdict: Verdict) -> list[Markup]:
    versions = ", ".join(f"{name} {version}" for name, version in verdict.compiled.versions.items())
    kinds = [
        (axis, kind, numbers.size(said), numbers.size(done))
        for (axis, kind), (said, done) in verdict.comparison.kinds.items()
    ]
    rows = [
        (row.kind, row.axis, numbers.size(row.total), row.times,
         waited(row, seconds), row.direction, row.source)
        for row, seconds in sorted(zip(verdict.ledger.rows, verdict.waits), key=lambda each: -each[0].total)[:40]
    ]  # fmt: skip
    header = ("collective", "mesh axis", "in a step", "times", "runs", "pass", "at")
    return [
        _quiet(f"{versions}; compiled in {verdict.compiled.seconds:.0f} s."),
        table(kinds, ("mesh axis", "collective", "by the types", "compiled"), right=(2, 3)),
        tag("details", tag("summary", "Its collectives"), table(rows, header, right=(2, 3))),
    ]


def _search(found: Found) -> list[Markup]:
    parts = [_wide(frontier_picture(found))]
    if found.winner is None:
        parts.append(_sentence(NOTHING_FITS, "bad"))
    elif found.winner.options:
        parts.append(tag("p", "The winner, to paste after the recipe: ", tag("code", found.winner.words())))
    else:
        parts.append(_sentence(OWN_WINS))
    parts += [_sentence(reason)] if (reason := why_won(found)) else []
    header, rows = frontier_rows(found)
    return [*parts, table(rows, header, right=(1, 2, 3, 6))]
