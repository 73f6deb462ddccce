"""A plan as one self-contained HTML page: pictures, tables, and how every number came about."""

import html
from collections.abc import Iterable, Sequence

from trellis.inspect.rows import human_bytes
from trellis.plan.advice import advice
from trellis.plan.draw import frontier_picture, memory_picture, roofline_picture, slice_picture, timeline_picture
from trellis.plan.quick import Plan
from trellis.plan.show import CAVEAT, human_count, human_seconds

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
td.n, th.n { text-align: right; white-space: nowrap; } code { font: 12px ui-monospace, monospace; }
details { margin: 6px 0; } summary { cursor: pointer; } p code { overflow-wrap: anywhere; }
@media (max-width: 720px) { body { padding: 14px; } .scroll svg { width: 700px; max-width: none; }
  .scroll table { min-width: 900px; } }
"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        inside = "".join(
            f"<{tag}{' class=n' if i in right else ''}>{html.escape(str(cell))}</{tag}>" for i, cell in enumerate(cells)
        )
        return f"<tr>{inside}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<div class=scroll><table><thead>{row(header, 'th')}</thead><tbody>{body}</tbody></table></div>"


def _wide(picture: str) -> str:
    """A picture that keeps its size on a narrow screen, and is moved sideways there."""
    return f"<div class=scroll>{picture}</div>"


def _cards(plan: Plan, verdict) -> str:
    free = plan.target.chip.hbm_bytes - plan.memory.peak
    cards = [
        (human_seconds(plan.seconds), "a step, predicted"),
        (f"{plan.mfu:.1%}", "MFU, predicted"),
        (human_count(plan.tokens_per_second), "tokens a second"),
        (human_bytes(plan.memory.peak), "a device at the highest point"),
        (human_bytes(abs(free)), "free" if free >= 0 else "too much"),
        (plan.times.binding, "is what most of the step waits for"),
    ]
    if verdict is not None and verdict.seconds is not None:
        cards.insert(1, (human_seconds(verdict.seconds), "a step, from the compiler's schedule"))
        cards.insert(5, (human_bytes(verdict.compiled.peak), "a device, by the compiler"))
    if plan.dollars_per_billion_tokens is not None:
        cards.append((f"${plan.dollars_per_billion_tokens:,.0f}", "for a billion tokens"))
    return (
        "<div class=cards>"
        + "".join(f"<div class=card><b>{html.escape(a)}</b><span>{b}</span></div>" for a, b in cards)
        + "</div>"
    )


def page(plan: Plan, verdict=None, found=None, *, fitted: Sequence[str] = (), ways: Sequence[str] = ()) -> str:
    """The page of a plan.

    Args:
        plan: from types.
        fitted: how the recipe was changed for the target.
        ways: what makes it fit, where it does not.
        verdict: the compiler's view, a `trellis.plan.verdict.Verdict`, or None.
        found: a search, a `trellis.plan.search.Found`, or None.
    """
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    compiled = verdict.compiled.peak if verdict is not None else None
    fits = "" if plan.fits else "<p class=bad>By the prediction this does not fit.</p>"
    parts = [
        f"<h1>{html.escape(plan.name)} on {html.escape(plan.target.name)}</h1>",
        f"<p class=quiet>{plan.target.num_devices} devices, mesh {html.escape(mesh)}; "
        f"{human_count(plan.parameters)} parameters, {human_count(plan.tokens)} tokens a step</p>",
        *(f"<p class=quiet>Fitted: {html.escape(line)}.</p>" for line in fitted),
        fits,
        _cards(plan, verdict),
    ]
    if changes := [*ways, *advice(plan)]:
        parts.append(
            "<h2>What to change</h2><ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in changes) + "</ul>"
        )
    parts += ["<h2>The devices and the mesh</h2>", _wide(slice_picture(plan))]
    parts += ["<h2>Memory of a device</h2>", _wide(memory_picture(plan, compiled))]
    parts.append(f"<p class=quiet>Highest at {html.escape(plan.memory.where or 'rest')}.</p>")
    rows = [(human_bytes(b.num_bytes), b.kind, b.name, b.what, b.source) for b in plan.memory.buffers[:16]]
    parts.append("<details><summary>The largest buffers at that point</summary>")
    parts.append(_table(("bytes", "kind", "name", "type", "made at"), rows, right=(0,)) + "</details>")
    parts += ["<h2>One layer</h2>", _wide(timeline_picture(plan))]
    parts += ["<h2>Roofline</h2>", _wide(roofline_picture(plan))]
    if found is not None:
        parts += _search(found)
    parts += ["<h2>Time of a step, on one device</h2>", _times(plan)]
    parts += ["<h2>Communication</h2>", _links(plan)]
    if verdict is not None and verdict.ledger is not None:
        parts += ["<h2>The compiled program</h2>", _compiled(verdict)]
    parts.append(f"<h2>How far to trust this</h2><p>{html.escape(CAVEAT)}</p>")
    parts.append(f"<p class=quiet>{html.escape(plan.target.chip.name)}: {html.escape(plan.target.chip.source)}.</p>")
    title = html.escape(f"{plan.name} on {plan.target.name}")
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title>"
    body = "".join(parts)
    return f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n"


def _times(plan: Plan) -> str:
    rows = [
        (human_seconds(line.seconds), f"{line.hidden / line.seconds:.0%}" if line.hidden else "", line.kind, line.where,
         line.bound, line.label, line.source, line.formula)
        for line in plan.times.lines[:60]
    ]  # fmt: skip
    times = plan.times
    foot = (
        f"<p class=quiet>Computation {human_seconds(times.computation)}, communication "
        f"{human_seconds(times.exposed)} exposed and {human_seconds(times.hidden)} hidden.</p>"
    )
    return foot + _table(("time", "hidden", "kind", "pass", "waits for", "what", "at", "formula"), rows, right=(0, 1))


def _links(plan: Plan) -> str:
    rows = [
        (row.kind, row.axis, f"{row.dtype}[{row.what}]", human_bytes(row.wire), row.times, human_bytes(row.total),
         row.direction, row.source)
        for row in plan.ledger.rows
    ]  # fmt: skip
    header = ("collective", "mesh axis", "of", "bytes", "times", "in a step", "pass", "at")
    return _table(header, rows, right=(3, 4, 5))


def _compiled(verdict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in verdict.compiled.versions.items())
    rows = [
        (axis, kind, human_bytes(said), human_bytes(done))
        for (axis, kind), (said, done) in verdict.comparison.kinds.items()
    ]
    alone = [
        (row.kind, row.axis, human_bytes(row.total), row.times,
         "asynchronous" if "asynchronous" in row.note else "alone", row.direction, row.source)
        for row in sorted(verdict.ledger.rows, key=lambda row: -row.total)[:40]
    ]  # fmt: skip
    return (
        f"<p class=quiet>{html.escape(versions)}; compiled in {verdict.compiled.seconds:.0f} s.</p>"
        + _table(("mesh axis", "collective", "by the types", "compiled"), rows, right=(2, 3))
        + "<details><summary>Its collectives</summary>"
        + _table(("collective", "mesh axis", "in a step", "times", "runs", "pass", "at"), alone, right=(2, 3))
        + "</details>"
    )


def _search(found) -> list[str]:
    from trellis.plan.search import frontier_rows

    parts = ["<h2>Search</h2>", _wide(frontier_picture(found))]
    if found.winner is not None and found.winner.options:
        parts.append(f"<p>The winner, to paste after the recipe: <code>{html.escape(found.winner.words())}</code></p>")
    parts.append(_table(*frontier_rows(found), right=(1, 2, 3, 6)))
    return parts
