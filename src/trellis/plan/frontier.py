"""Presents what a search found: a table, text, plain values, and what held each candidate back."""

from typing import Any

from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.hardware.chips import Target
from trellis.plan.candidate import Candidate
from trellis.plan.search import Found

NOTHING_FITS = "nothing fits: use a larger slice, a smaller batch, or a shorter sequence"
OWN_WINS = "the run's own setting is the winner"


def why_lost(candidate: Candidate, winner: Candidate | None, target: Target) -> str:
    """What held a candidate back."""
    if candidate.refused:
        return candidate.refused
    if not candidate.fits:
        return f"does not fit, by {numbers.size(candidate.peak - target.chip.hbm_bytes)}"
    if winner is None or candidate is winner:
        return "the fastest that fits"
    if (candidate.verdict is None) != (winner.verdict is None):
        return f"{candidate.plan.seconds / winner.plan.seconds - 1:+.0%} by types, not asked about"
    slower = candidate.seconds / winner.seconds - 1
    if abs(slower) <= 0.01:
        return f"{slower:+.1%}: as fast, and less simple"
    mine, its = _causes(candidate), _causes(winner)
    cause, seconds = max(((key, mine[key] - its[key]) for key in mine), key=lambda pair: pair[1])
    return f"{slower:+.0%}: {numbers.seconds(max(seconds, 0.0))} more {cause}"


def why_won(found: Found) -> str:
    """What the winner saves over the next best mesh that fits, by the same source; empty if it is the only one."""
    winner = found.winner
    others = [c for c in found.candidates if winner and c.plan and c.fits and c.mesh != winner.mesh]
    others = [c for c in others if (c.verdict is None) == (winner.verdict is None)]
    if not others:
        return ""
    other = min(others, key=lambda c: c.seconds)
    named = " ".join(f"{a}={s}" for a, s in other.mesh.items()) or "one device"
    if other.seconds <= 1.01 * winner.seconds:
        return f"it wins over {named}, which is as fast, because it is simpler"
    theirs, its = _causes(other), _causes(winner)
    cause, seconds = max(((key, theirs[key] - its[key]) for key in its), key=lambda pair: pair[1])
    return f"it wins by {other.seconds / winner.seconds - 1:.1%} over {named}: {numbers.seconds(seconds)} less {cause}"


def _causes(candidate: Candidate) -> dict[str, float]:
    """The seconds of a step, by what takes them."""
    found = dict.fromkeys(
        ("moving weights and gradients", "moving activations", "copying to and from the host's memory",
         "computing activations again", "in products", "in attention", "in elementwise work"), 0.0,
    )  # fmt: skip
    for line in candidate.plan.times.lines:
        if line.axes:
            key = "moving activations" if line.role == "activations" else "moving weights and gradients"
        elif line.moves:
            key = "copying to and from the host's memory"
        elif line.where == "recomputed":
            key = "computing activations again"
        else:
            key = {"product": "in products", "grouped": "in products", "elementwise": "in elementwise work"}.get(
                line.kind, "in attention"
            )
        found[key] += line.seconds - line.hidden
    return found


def frontier_rows(found: Found) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The candidates as a table: header and rows."""
    rows = []
    for c in found.candidates:
        mesh = " ".join(f"{a}={s}" for a, s in c.mesh.items())
        mark = "*" if c in found.frontier else ""
        by = "compiled" if c.verdict is not None else "types"
        speed = numbers.count(c.speed) if c.plan else ""
        rows.append(
            (mark, numbers.seconds(c.seconds), numbers.size(c.peak), speed, mesh, c.layout,
             str(c.parts), c.keeps, by, why_lost(c, found.winner, found.target))
        )  # fmt: skip
    return ("", "step", "memory", "tokens/s", "mesh", "layout", "microbatches", "keeps", "by", ""), rows


def frontier_text(found: Found) -> str:
    """The search as text: frontier, winner, runners-up."""
    header, rows = frontier_rows(found)
    lines = [
        f"{found.sketched} variants sketched, {len(found.candidates)} planned; * is on the frontier of time and memory",
        aligned(header, rows, right=(1, 2, 3, 6)),
    ]
    if found.winner is None:
        lines.append(NOTHING_FITS)
    elif found.winner.options:
        lines.append("the winner, to paste after the recipe:\n  " + found.winner.words())
    else:
        lines.append(OWN_WINS)
    lines += [reason] if (reason := why_won(found)) else []
    return "\n\n".join(lines)


def search_json(found: Found) -> dict[str, Any]:
    """The search as plain values."""
    return {
        "sketched": found.sketched,
        "winner": dict(found.winner.options) if found.winner else None,
        "why": why_won(found),
        "candidates": [
            {
                "options": dict(c.options),
                "mesh": c.mesh,
                "step_seconds": c.seconds,
                "peak": c.peak,
                "fits": c.fits,
                "mfu": c.mfu if c.plan else None,
                "compiled": c.verdict is not None,
                "frontier": c in found.frontier,
                "why": why_lost(c, found.winner, found.target),
            }
            for c in found.candidates
        ],
    }
