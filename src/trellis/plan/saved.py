"""A compiled plan as a file: its figures, line by line, for comparison with later ones."""

import collections
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trellis.errors import UserError
from trellis.files import no_room, write_json
from trellis.inspect.compiled import cycles_by_line, gathered_bytes
from trellis.inspect.work import UNSCHEDULED
from trellis.plan.quick import Plan
from trellis.plan.verdict import Verdict
from trellis.run.config import Run
from trellis.run.schema import plain

_FORMAT = 1  # of the files


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """A part of a figure.

    Attributes:
        figure: "step" in seconds, or "memory" or "sent" in bytes on one device.
        what: what takes it.
        source: `file.py:line (function)`, if that is known.
        amount: how much.
    """

    figure: str
    what: str
    source: str
    amount: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """What the compiler made of a run.

    Attributes:
        name: the run's name.
        target: the hardware.
        versions: the versions of JAX and of the compiler.
        settings: the run's fields by their dotted names, including the mesh and the compiler's options.
        fits: whether the compiler found room.
        figures: seconds of a step ("step", if the program has text), bytes that a device needs ("memory") and that it
            sends in a step ("sent").
        lines: what they consist of.
    """

    name: str
    target: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    fits: bool
    figures: Mapping[str, float]
    lines: tuple[Amount, ...]

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        try:
            write_json(path, {"format": _FORMAT, **dataclasses.asdict(self)})
        except OSError as error:
            seen = no_room(error) or error.strerror
            rule = "The file of a saved plan must be writable."
            raise UserError(rule, seen=seen, where=str(path), fix="use another path for --save") from None


def saved_plan(run: Run, plan: Plan, verdict: Verdict) -> SavedPlan:
    """The parts of a compiled plan that are kept."""
    compiled = verdict.compiled
    figures = {"memory": float(compiled.peak)}
    if verdict.seconds is not None and verdict.ledger is not None:
        figures |= {"step": verdict.seconds, "sent": float(verdict.ledger.total())}
    lines = [*_memory(verdict), *_sent(verdict), *_step(plan, verdict)]
    sums: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for line in lines:
        sums[line.figure, line.what, line.source] += line.amount
    return SavedPlan(
        name=run.name,
        target=plan.target.name,
        versions=dict(compiled.versions),
        settings=_settings(run, plan, compiled.options),
        fits=compiled.fits,
        figures=figures,
        lines=tuple(Amount(*key, amount) for key, amount in sums.items() if amount),
    )


def _settings(run: Run, plan: Plan, options: Mapping[str, str]) -> dict[str, Any]:
    """What figures depend on: the run's fields, its mesh, all options of the compiler, and a load that is not even."""
    found = _flat(plain(run)) | {f"mesh.{axis}": size for axis, size in plan.mesh.items()}
    found |= {f"compiler_options.{name}": value for name, value in options.items()}
    return found | ({"load": plan.load} if plan.load != 1 else {})


def read_plan(path: Path) -> SavedPlan:
    """A plan from its file.

    Raises:
        UserError: there is no file, or it is not a saved plan of this version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.pop("format", None) == _FORMAT:
            return SavedPlan(**{**found, "lines": tuple(Amount(**line) for line in found["lines"])})
        seen = "another file, or one of another version"
    except OSError as error:
        seen = str(error.strerror)
    except (ValueError, TypeError, KeyError) as error:
        seen = f"a file that cannot be read: {error}"
    fix = "write one with `trellis plan RECIPE --on TARGET --compile --save FILE`"
    raise UserError("A plan can be compared only with a saved plan.", seen=seen, where=str(path), fix=fix)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Fields by their dotted names.

    >>> _flat({"mesh": {"data": 2}, "steps": 3})
    {'mesh.data': 2, 'steps': 3}
    """
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _memory(verdict: Verdict) -> list[Amount]:
    """The largest buffers and the rest, if the compiler lists them; else its kinds of memory."""
    compiled = verdict.compiled
    if compiled.largest:
        lines = [Amount("memory", a.what, a.source, a.num_bytes) for a in compiled.largest]
        return [*lines, Amount("memory", "smaller buffers", "", compiled.peak - sum(line.amount for line in lines))]
    kinds = ("arguments", "outputs", "temporaries", "code")
    return [Amount("memory", kind, "", compiled.memory[kind]) for kind in kinds if kind in compiled.memory]


def _sent(verdict: Verdict) -> list[Amount]:
    rows = verdict.ledger.rows if verdict.ledger else ()
    return [
        Amount("sent", f"{row.kind} over {row.axis}, {row.dtype}[{row.what}]", row.source, row.total) for row in rows
    ]


def _step(plan: Plan, verdict: Verdict) -> list[Amount]:
    """Computation as scheduled, or as predicted if the compiler estimates none; kernels; waits for collectives."""
    kinds = UNSCHEDULED if verdict.scheduled is not None else (*UNSCHEDULED, "product", "elementwise")
    lines = [Amount("step", x.label or x.kind, x.source, x.seconds) for x in plan.times.lines if x.kind in kinds]
    if verdict.scheduled is not None and (clock := plan.target.chip.clock):
        cycles = cycles_by_line(verdict.compiled.text, load=plan.load)
        lines += [Amount("step", "computation", source, n / clock) for source, n in cycles.items()]
        moved, rate = gathered_bytes(verdict.compiled.text, load=plan.load), plan.target.chip.streaming_bandwidth
        lines += [Amount("step", "gathers of rows", source, n / rate) for source, n in moved.items()]
    lines += [Amount("step", "gathered rows, waited for", *each) for each in verdict.gathers.items()]
    lines += [Amount("step", f"{x.kind}, waited for", x.source, x.seconds - x.hidden) for x in plan.times.copies]
    for row, seconds in zip(verdict.ledger.rows, verdict.waits) if verdict.ledger else ():
        if seconds:
            lines.append(Amount("step", f"{row.kind} over {row.axis}, waited for", row.source, seconds))
    return lines
