"""A plan as text and as JSON."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from trellis.inspect.rows import aligned, human_bytes
from trellis.plan.advice import advice
from trellis.plan.quick import Plan


def human_seconds(seconds: float) -> str:
    """Time for people.

    >>> human_seconds(1.5), human_seconds(0.0123), human_seconds(2e-5)
    ('1.50 s', '12.3 ms', '20 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def human_count(count: float) -> str:
    """A large number for people.

    >>> human_count(8.03e9), human_count(1234)
    ('8.03B', '1.23k')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def headline(plan: Plan, fitted: Sequence[str] = ()) -> str:
    """The first lines: does it fit, how long, what it waits for; and how the recipe was fitted to the target."""
    chip = plan.target.chip
    mesh = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    room = chip.hbm_bytes - plan.memory.peak
    fits = (
        f"fits, {human_bytes(room)} free of {human_bytes(chip.hbm_bytes)}"
        if plan.fits
        else f"DOES NOT FIT: {human_bytes(-room)} more than the {human_bytes(chip.hbm_bytes)} of a device"
    )
    per_device = plan.tokens_per_second / plan.target.num_devices
    lines = [
        f"{plan.name} on {plan.target.name}: {plan.target.num_devices} devices, mesh {mesh}",
        *(f"  fitted      {line}" for line in fitted),
        f"  parameters  {human_count(plan.parameters)}; {human_count(plan.tokens)} tokens a step",
        f"  memory      {human_bytes(plan.memory.peak)} at the highest point; {fits}",
        f"  step        {human_seconds(plan.seconds)} predicted, MFU {plan.mfu:.1%}",
        f"  speed       {human_count(plan.tokens_per_second)} tokens/s, {human_count(per_device)} a device",
        f"  waits for   {_waits(plan)}",
    ]
    if plan.load != 1.0:
        lines.append(f"  load        the fullest device has {plan.load:g} times the rows of an even load")
    if (price := plan.dollars_per_billion_tokens) is not None:
        lines.append(f"  price       ${price:,.0f} for a billion tokens at ${plan.price:g} a device and hour")
    return "\n".join(lines)


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
    """What is kept between the passes, by the names that `save` gave, and which of it is largest."""
    kept = plan.memory.kept_by_name()[:most]
    rows = [(human_bytes(b.num_bytes), b.kind, b.name, b.what) for b in kept]
    if not rows:
        return "nothing is kept between the forward and the backward pass"
    return "kept for the backward pass, by name\n\n" + aligned(("bytes", "kind", "name", "type"), rows, right=(0,))


def time_table(plan: Plan, lines: int = 24, formulas: bool = False) -> str:
    """What takes how long, longest first."""
    rows = []
    shown = plan.times.lines[:lines]
    for line in shown:
        rows.append(
            (
                human_seconds(line.seconds),
                f"{line.hidden / line.seconds:.0%}" if line.hidden else "",
                line.kind,
                line.where,
                line.bound,
                line.label,
                line.source,
                *([line.formula] if formulas else []),
            )
        )
    rest = plan.times.lines[lines:]
    if rest:
        rows.append(
            (
                human_seconds(sum(line.seconds for line in rest)),
                "",
                f"{len(rest)} more",
                "",
                "",
                "",
                "",
                *([""] * formulas),
            )
        )
    header = ("time", "hidden", "kind", "pass", "waits for", "what", "at", *(["formula"] if formulas else []))
    times = plan.times
    foot = (
        f"computation {human_seconds(times.computation)} + communication {human_seconds(times.exposed)} exposed "
        f"({human_seconds(times.hidden)} hidden) = {human_seconds(times.seconds)}"
    )
    return "\n".join(["time of a step, on one device", aligned(header, rows, right=(0, 1)), foot])


def link_table(plan: Plan) -> str:
    """Bytes over each mesh axis, and what they run on."""
    rows = []
    for axis, total in plan.ledger.per_axis().items():
        axes = axis.split(",")
        where = "; ".join(plan.links.describe(name) for name in axes)
        rate = plan.links.bandwidth(axes)
        rows.append((axis, human_bytes(total), f"{rate / 1e9:.0f} GB/s", human_seconds(total / rate), where))
    if not rows:
        return "communication: none"
    header = ("mesh axis", "a device sends", "at", "takes", "over")
    return "communication in a step\n" + aligned(header, rows, right=(1, 2, 3))


def text(plan: Plan, *, formulas: bool = False, fitted: Sequence[str] = (), ways: Sequence[str] = ()) -> str:
    """The whole plan.

    Args:
        plan: the plan.
        formulas: add how each time comes about.
        fitted: how the recipe was changed for the target.
        ways: what makes it fit, where it does not.
    """
    parts = [headline(plan, fitted), memory_table(plan), link_table(plan), time_table(plan, formulas=formulas)]
    if found := [*ways, *advice(plan)]:
        parts.append("what to change\n" + "\n".join(f"  - {line}" for line in found))
    parts.append(CAVEAT)
    return "\n\n".join(parts)


CAVEAT = (
    "A prediction from types: memory is usually within 10 % of the compiler's, time is a model of what a good compiler "
    "does\n(its errors against published and measured steps are in docs/plan.md). --compile asks the real compiler."
)


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, as plain values; seconds, bytes, FLOPs."""
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
            "where": plan.memory.where,
            "largest": [_fields(buffer) for buffer in plan.memory.buffers[:16]],
        },
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
        "advice": advice(plan),
    }


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, dict)) else value
