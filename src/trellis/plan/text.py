"""A plan as text and as JSON."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.named.pipeline.chart import chart
from trellis.named.pipeline.schedule import Schedule
from trellis.plan.advice import advice
from trellis.plan.quick import Plan
from trellis.plan.roofline import collective_lines

# The most ticks for which a chart fits on a line.
MOST_TICKS = 32
STAGES = "microbatches in the stages, forward (F) and backward (B)"


def headline(plan: Plan, fitted: Sequence[str] = ()) -> str:
    """The first lines: whether it fits, how long, what it waits for, and how the recipe was fitted to the target."""
    chip = plan.target.chip
    room = chip.hbm_bytes - plan.memory.peak
    fits = (
        f"fits, {numbers.size(room)} free of {numbers.size(chip.hbm_bytes)}"
        if plan.fits
        else f"DOES NOT FIT: {numbers.size(-room)} more than the {numbers.size(chip.hbm_bytes)} of a device"
    )
    per_device = plan.tokens_per_second / plan.target.num_devices
    lines = [
        f"{plan.name} on {plan.target.name}: {devices_said(plan)}",
        *(f"  fitted      {line}" for line in fitted),
        f"  parameters  {numbers.count(plan.parameters)}; {numbers.count(plan.tokens)} tokens a step",
        f"  memory      {numbers.size(plan.memory.peak)} at the highest point; {fits}",
        f"  step        {numbers.seconds(plan.seconds)} predicted, MFU {plan.mfu:.1%}",
        f"  speed       {numbers.count(plan.tokens_per_second)} tokens/s, {numbers.count(per_device)} a device",
        f"  waits for   {_waits(plan)}",
    ]
    lines += [f"  {name:10}  {words}" for name, words in particulars(plan)]
    if plan.price is not None and (price := plan.dollars_per_billion_tokens) is not None:
        each = numbers.dollars(plan.price)
        lines.append(f"  price       {numbers.dollars(price)} for a billion tokens at {each} a device and hour")
    return "\n".join(lines)


def devices_said(plan: Plan) -> str:
    """The number of devices, and their mesh if the program has one."""
    count = plan.target.num_devices
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    return f"{count} device{'s' * (count > 1)}" + f", mesh {mesh}" * bool(mesh)


def particulars(plan: Plan) -> list[tuple[str, str]]:
    """What a plan says of some runs only, with its name: of a pipeline, and of experts with an uneven load."""
    said = []
    if plan.schedule is not None:
        said.append(("stages", stages_text(plan.schedule)))
    if plan.layers:
        said.append(("layers", f"{', '.join(map(str, plan.layers))}: a tick takes as long as the most of them"))
    if plan.load != 1.0:
        said.append(("load", f"the fullest device has {plan.load:g} times the rows of an even load"))
    return said


def stages_chart(plan: Plan) -> str:
    """Which microbatch each stage of a pipeline has in each tick; nothing without stages, or if it is too wide."""
    return chart(plan.schedule) if plan.schedule is not None and plan.schedule.ends <= MOST_TICKS else ""


def stages_text(schedule: Schedule) -> str:
    """A pipeline's schedule in words.

    >>> stages_text(Schedule(4, 2, 16))
    '4 with 2 groups of layers each, 16 microbatches: a stage idles 9% of the ticks and keeps 11 passes of a group'
    """
    groups, of = (
        (f" with {schedule.groups} groups of layers each", "passes of a group")
        if schedule.groups > 1
        else ("", "microbatches")
    )
    return (
        f"{schedule.stages}{groups}, {schedule.microbatches} microbatches: a stage idles {schedule.bubble:.0%} of the "
        f"ticks and keeps {schedule.slots} {of}"
    )


def _waits(plan: Plan) -> str:
    total = max(plan.seconds, 1e-30)
    parts = [
        f"{bound} {seconds / total:.0%}" for bound, seconds in plan.times.by_bound().items() if seconds / total >= 0.01
    ]
    return ", ".join(parts)


def memory_table(plan: Plan, buffers: int = 8) -> str:
    """Memory by kind, and the largest buffers at the highest point."""
    where = plan.memory.where or "rest"
    return f"memory of a device at its highest point, at {where}\n\n{plan.memory.table(buffers)}"


def kept_table(plan: Plan, most: int = 12) -> str:
    """What is kept between the passes, by the names that `save` gave, and the largest of it."""
    kept = plan.memory.kept_by_name()[:most]
    rows = [(numbers.size(b.num_bytes), b.kind, b.name, b.what) for b in kept]
    if not rows:
        return "nothing is kept between the forward and the backward pass"
    return "kept for the backward pass, by name\n\n" + aligned(("bytes", "kind", "name", "type"), rows, right=(0,))


def time_table(plan: Plan, lines: int = 24, formulas: bool = False) -> str:
    """How long everything takes, longest first."""
    rows = []
    shown = plan.times.lines[:lines]
    for line in shown:
        rows.append(
            (
                numbers.seconds(line.seconds),
                f"{line.hidden / line.seconds:.0%}" if line.hidden else "",
                line.kind,
                line.where,
                line.bound,
                line.label,
                line.source,
                *[line.formula] * formulas,
            )
        )
    rest = plan.times.lines[lines:]
    if rest:
        left = numbers.seconds(sum(line.seconds for line in rest))
        rows.append((left, "", f"{len(rest)} more", *[""] * (4 + formulas)))
    header = ("time", "hidden", "kind", "pass", "waits for", "what", "at", *["formula"] * formulas)
    times = plan.times
    foot = (
        f"computation {numbers.seconds(times.computation)} + communication {numbers.seconds(times.exposed)} exposed "
        f"({numbers.seconds(times.hidden)} hidden) = {numbers.seconds(times.seconds)}"
    )
    return "\n".join(["time of a step, on one device", aligned(header, rows, right=(0, 1)), foot])


def link_table(plan: Plan) -> str:
    """The bytes over each mesh axis, and the links that they use."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for row, line in collective_lines(plan.ledger, plan.links):
        for axis, wire in plan.ledger.split(row):
            seconds[axis] += line.seconds * wire / max(row.wire, 1)
    rows = []
    for axis, total in plan.ledger.per_axis().items():
        where = "; ".join(plan.links.describe(name) for name in axis.split(","))
        rate = f"{total / seconds[axis] / 1e9:.0f} GB/s" if seconds[axis] else ""
        rows.append((axis, numbers.size(total), rate, numbers.seconds(seconds[axis]), where))
    if not rows:
        return "\n".join(filter(None, ("communication: none", plan.ledger.chosen)))
    header = ("mesh axis", "a device sends", "at", "takes", "over")
    return "\n".join(
        filter(None, ("communication in a step", aligned(header, rows, right=(1, 2, 3)), plan.ledger.chosen))
    )


def text(
    plan: Plan,
    *,
    formulas: bool = False,
    fitted: Sequence[str] = (),
    ways: Sequence[str] = (),
    advised: Sequence[str] | None = None,
) -> str:
    """The whole plan.

    Args:
        plan: the plan.
        formulas: whether to add how each time is calculated.
        fitted: how the recipe was changed for the target.
        ways: what would make it fit, if it does not.
        advised: its advice, if options were tried for it.
    """
    parts = [headline(plan, fitted), memory_table(plan), link_table(plan), time_table(plan, formulas=formulas)]
    if ticks := stages_chart(plan):
        parts.insert(1, f"{STAGES}\n\n{ticks}")
    if found := [*ways, *(advice(plan) if advised is None else advised)]:
        parts.append("what to change\n" + "\n".join(f"  - {line}" for line in found))
    parts.append(CAVEAT)
    return "\n\n".join(parts)


CAVEAT = (
    "A prediction from types: memory is usually within 10 % of the compiler's, time is a model of what a good compiler "
    "does\n(its errors against published and measured steps are in docs/plan.md). --compile asks the real compiler."
)


def as_json(plan: Plan, advised: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything, as plain values; seconds, bytes, FLOPs. `advised` is as in `text`."""
    return {
        "name": plan.name,
        "target": plan.target.name,
        "devices": plan.target.num_devices,
        "chip": _fields(plan.target.chip),
        "mesh": dict(plan.mesh),
        "links": {axis: plan.links.describe(axis) for axis in plan.mesh},
        "parameters": plan.parameters,
        "tokens": plan.tokens,
        "load": plan.load,
        "fits": plan.fits,
        "memory": {
            "peak": plan.memory.peak,
            "capacity": int(plan.target.chip.hbm_bytes),
            "kinds": plan.memory.per_kind(),
            "host": plan.memory.host,
            "where": plan.memory.where,
            "largest": [_fields(buffer) for buffer in plan.memory.buffers[:16]],
        },
        "stages": _schedule(plan.schedule),
        "layers": list(plan.layers),
        "refused": list(plan.refused),
        "step_seconds": plan.seconds,
        "mfu": plan.mfu,
        "model_flops": plan.model_flops,
        "tokens_per_second": plan.tokens_per_second,
        "waits_for": plan.times.by_bound(),
        "computation_seconds": plan.times.computation,
        "exposed_seconds": plan.times.exposed,
        "hidden_seconds": plan.times.hidden,
        "dollars_per_billion_tokens": plan.dollars_per_billion_tokens,
        "communication": {"per_axis": plan.ledger.per_axis(), "rows": [_fields(row) for row in plan.ledger.rows]},
        "times": [_fields(line) for line in plan.times.lines],
        "advice": advice(plan) if advised is None else list(advised),
    }


def _schedule(schedule: Schedule | None) -> dict[str, Any] | None:
    if schedule is None:
        return None
    return _fields(schedule) | {"idle": schedule.bubble, "kept": schedule.slots}


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, dict)) else value
