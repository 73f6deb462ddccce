"""The verdict of a compiled step on its plan: memory, collectives and time by the compiler, beside the prediction."""

import collections
import dataclasses
from collections.abc import Mapping

from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.frames import in_a_library
from trellis.inspect.compiled import Comparison, compare
from trellis.inspect.ledger import ledger_of
from trellis.inspect.rows import Ledger, Row
from trellis.inspect.structure import Structure, structure_of
from trellis.plan.compile import Compiled
from trellis.plan.estimates import estimates, kernel_seconds
from trellis.plan.prepared import Prepared
from trellis.plan.quick import Plan


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compiler's view of a planned step.

    Attributes:
        compiled: what the compiler made of the step.
        ledger: the collectives of the compiled program at the assumed load; None if it did not fit.
        comparison: the plan's ledger compared with it, per mesh axis.
        structure: the rows of that ledger matched with those collectives; None if it did not fit.
        scheduled: seconds of everything but collectives and kernels by the compiler's own estimate; None if it gives
            none (GPU).
        kernels: seconds of what the compiler has no estimate for: kernels for attention and grouped products, as the
            plan has them, and gathers of rows that are not on SparseCores, by their bytes.
        exposed: seconds for which the device waits for collectives, at the plan's link rates, by the compiler's
            schedule.
        hidden: seconds of collectives beside computation.
        gathers: seconds for which it waits for rows that SparseCores gather, by line.
        gathered: seconds that these gather beside computation.
        copies: seconds of copies to and from the host's memory that nothing hides, as the plan has them.
        waits: for each row of `ledger`, the seconds that the device waits for it.
        seconds: predicted time of a step from these.
        mfu: the MFU by that time.
    """

    compiled: Compiled
    ledger: Ledger | None
    comparison: Comparison | None
    structure: Structure | None
    scheduled: float | None
    kernels: float
    exposed: float
    hidden: float
    gathers: Mapping[str, float]
    gathered: float
    copies: float
    waits: tuple[float, ...]
    seconds: float | None
    mfu: float | None


def judge(plan: Plan, prepared: Prepared, compiled: Compiled) -> Verdict:
    """Reads a compiled step.

    The time is that of the scheduled computation (the plan's if the compiler estimates none), of the kernels, and of
    the collectives as far as the schedule, replayed in its order, has nothing else to do meanwhile.
    """
    if not compiled.text:
        return Verdict(compiled, None, None, None, None, kernel_seconds(plan), 0.0, 0.0, {}, 0.0, 0.0, (), None, None)
    mesh = prepared.layout.mesh
    known = estimates(plan, compiled.text, mesh)
    waits = known.replay().waits
    times = collections.Counter[str]()
    for collective, row in known.found:
        times[collective.name] += row.times
    of_rows = tuple(waits.get(c.name, 0.0) * row.times / times[c.name] for c, row in known.found)
    exposed = sum(of_rows)
    hidden = max(0.0, sum(known.sending[c.name].seconds * row.times for c, row in known.found) - exposed)
    gathers, gathered = collections.defaultdict[str, float](float), 0.0
    for gather, runs in known.gathers:
        gathers[known.program.source(gather, in_a_library)] += waits.get(gather.name, 0.0)
        gathered += known.sending[gather.name].seconds * runs - waits.get(gather.name, 0.0)
    others = plan.times.computation - known.kernels if known.scheduled is None else known.scheduled
    copies = sum(line.seconds - line.hidden for line in plan.times.copies)
    seconds = others + known.kernels + exposed + sum(gathers.values()) + copies
    mfu = plan.model_flops / (seconds * plan.target.num_devices * plan.target.chip.bf16_flops)
    # This matches all that may run: a loop whose number of turns is unknown counts as one turn.
    matched = structure_of(ledger_of(prepared.traced()), compiled.text, mesh)
    ledger = Ledger(tuple(row for _, row in known.found), dict(mesh.shape))
    return Verdict(
        compiled=compiled,
        ledger=ledger,
        comparison=compare(plan.ledger, ledger),
        structure=matched,
        scheduled=known.scheduled,
        kernels=known.kernels,
        exposed=exposed,
        hidden=hidden,
        gathers=dict(gathers),
        gathered=gathered,
        copies=copies,
        waits=of_rows,
        seconds=seconds,
        mfu=mfu,
    )


def verdict_text(plan: Plan, verdict: Verdict) -> str:
    """The compiler's view as text."""
    compiled = verdict.compiled
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    kept = "kept from before, " if compiled.cached else ""
    lines = [f"by the compiler ({versions}; {kept}compiled in {compiled.seconds:.0f} s)"]
    if compiled.options:
        lines.append("  options     " + " ".join(f"{name}={value}" for name, value in compiled.options.items()))
    peak = compiled.peak
    capacity = plan.target.chip.hbm_bytes
    if not compiled.fits:
        lines.append(f"  memory      DOES NOT FIT: {numbers.size(compiled.excess)} more than {numbers.size(capacity)}")
        lines += ["", _largest(plan, verdict)]
        if not compiled.text:
            return "\n".join(lines)
    else:
        free = f"{numbers.size(capacity - peak)} free"
        error = plan.memory.peak / peak - 1 if peak else 0.0
        lines.append(
            f"  memory      {numbers.size(peak)}, {free}; predicted {numbers.size(plan.memory.peak)} ({error:+.0%})"
        )
    if verdict.seconds is not None:
        parts = [
            f"{numbers.seconds(verdict.scheduled)} scheduled"
            if verdict.scheduled is not None
            else "computation as predicted",
            f"{numbers.seconds(verdict.kernels)} kernels and gathers",
            f"{numbers.seconds(verdict.exposed)} waiting for collectives",
            *[f"{numbers.seconds(sum(verdict.gathers.values()))} waiting for gathered rows"] * bool(verdict.gathers),
            *[f"{numbers.seconds(verdict.copies)} waiting for the host's memory"] * bool(verdict.copies),
        ]
        lines.append(f"  step        {numbers.seconds(verdict.seconds)} = {' + '.join(parts)}; MFU {verdict.mfu:.1%}")
        beside = [f"{numbers.seconds(verdict.hidden)} of collectives"]
        beside += [f"{numbers.seconds(verdict.gathered)} of gathers"] * bool(verdict.gathers)
        lines.append(f"              ({' and '.join(beside)} run beside computation)")
    lines += ["", "collectives, by the types and in the compiled program", str(verdict.comparison)]
    lines += ["", str(verdict.structure), "", _rows(verdict)]
    return "\n".join(lines)


def _largest(plan: Plan, verdict: Verdict, count: int = 10) -> str:
    """The largest buffers of what does not fit: the compiler's, with the names of values of that size; else by name."""
    named = [b for b in plan.memory.by_name() if b.kind != "gradients"]
    if not verdict.compiled.largest:
        rows = [(numbers.size(b.num_bytes), b.kind, b.name, b.what) for b in named[:count]]
        text = aligned(("largest", "kind", "by name", "type"), rows, right=(0,))
        return f"{text}\nfrom types: the compiler gave up before it placed buffers"
    rows = []
    for allocation in verdict.compiled.largest[:count]:
        size, dtype = allocation.num_bytes, allocation.what.partition("[")[0]
        same = [b.name for b in named if b.what.startswith(dtype) and abs(b.num_bytes - size) < 0.002 * size]
        rows.append((numbers.size(allocation.num_bytes), allocation.what, " or ".join(same[:3]), allocation.source))
    return aligned(("largest", "what", "by name", "made by"), rows, right=(0,))


def waited(row: Row, seconds: float) -> str:
    """How a collective of a compiled step runs: how long it is waited for, as text."""
    if "asynchronous" not in row.note:
        return f"alone, {numbers.seconds(seconds)}"
    return f"waits {numbers.seconds(seconds)}" if seconds else "hidden"


def _rows(verdict: Verdict, count: int = 16) -> str:
    rows = sorted(zip(verdict.ledger.rows, verdict.waits), key=lambda each: -each[0].total)
    shown = [
        (row.kind, row.axis, f"{row.dtype}[{row.what}]", numbers.size(row.wire), str(row.times),
         numbers.size(row.total), waited(row, seconds), row.direction, row.source)
        for row, seconds in rows[:count]
    ]  # fmt: skip
    header = ("collective", "axis", "of", "bytes", "times", "total", "runs", "in", "at")
    text = aligned(header, shown, right=(3, 4, 5))
    return text + (f"\nand {len(rows) - count} smaller ones" if len(rows) > count else "")
