"""What a run leaves open for the CPU that it trains on is measured before the first long run and kept for later ones.

The choice is written to the run's file, and a resumed run keeps what it began with: how a sum is cut into parts decides
how it is rounded.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from trellis.cores import is_crowded
from trellis.errors import UserError
from trellis.figures.numbers import duration
from trellis.hardware.remembered import devices_here, digest_of, recall, remember, today
from trellis.inspect.memory import memory_of
from trellis.mesh.platform import are_cpus, rehearses
from trellis.models.protocol import dropout
from trellis.run.config import Cpu, Run
from trellis.run.folder import has_begun
from trellis.run.run_file import read_run
from trellis.run.schema import plain
from trellis.train.assemble import Assembled, assemble
from trellis.train.checks import check_step
from trellis.train.devices import possible_counts
from trellis.train.flops import costs, work_of
from trellis.train.pace import LONGEST_STEP, Pace, expected_pace, keep_pace, tokens_of, tried_pace
from trellis.train.probes import GAIN, fastest, probes
from trellis.train.summary import step_program

# A run of this many seconds is worth the few seconds of measuring kernels; a run of at most so few tokens never is.
_LONG, _FEW = 60.0, 100_000
# Steps are tried for no longer than this share of the run.
_SHARE = 0.05
# What is printed, and the name of a pace that was found this way.
MEASURES, TRIAL = "measures what suits this processor, once", "trial steps"
# Fields that do not affect a choice.
_BESIDE = (
    "name", "steps", "schedule", "checkpoints", "evaluation", "logging", "guard", "deadline", "profile", "seed",
    "distributed", "skip_nonfinite", "weight_decay_exclude",
)  # fmt: skip


def as_it_began(run: Run, folder: Path) -> Run:
    """A run that is resumed in a folder, with what it leaves open chosen as when it began.

    On another mesh, layout or number of devices only the kernels' choices stay.

    Args:
        run: as it was asked for.
        folder: the run's folder, which may be empty.
    """
    path = folder / "run.yaml"
    if not has_begun(folder) or not path.is_file():
        return run
    before = read_run(path)
    run = dataclasses.replace(run, cpu=_filled(run.cpu, dataclasses.asdict(before.cpu)))
    there = (run.mesh, run.layout) == (before.mesh, before.layout) and run.devices in (None, before.devices)
    if not there:
        return run
    microbatches = run.microbatches or before.microbatches
    try:
        return dataclasses.replace(run, devices=before.devices, microbatches=microbatches)
    except UserError:  # another batch size, for which `claim` has its own message
        return run


def choose(
    run: Run,
    devices: Sequence[Any],
    *,
    tell: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
    trial: Callable[[Assembled], Pace] = tried_pace,
) -> Run:
    """A run with everything chosen that it leaves open on a CPU, if that was measured or is worth measuring.

    Kernels are timed by themselves, which takes seconds. Numbers of microbatches and of devices are tried in whole
    steps, for at most a twentieth of the run. The usual choice stays unless another is faster by 5 %. Choices that were
    measured while many other programs ran hold for this run alone.

    Args:
        run: the run.
        devices: all devices that it may use.
        tell: gets a line of words if something was chosen.
        clock: seconds.
        trial: the pace of a few steps.

    Raises:
        UserError: a step does not fit in memory.
    """
    if not _is_open(run, devices):
        return run
    key = _key(run, devices)
    kept = recall("choices").get(key)
    if kept is not None and (known := _applied(run, kept)) is not None:
        tell(f"chosen   {words_of(known, kept)}, as measured on {kept['date']}")
        return known
    assembled = assemble(run, devices)
    if rehearses(assembled.layout.mesh):
        return run
    work = work_of(assembled)
    guess = expected_pace(assembled, work)
    whole = 0.0 if guess is None else guess.seconds(run, 0, run.steps)
    if guess is None or whole < _LONG or guess.step_seconds(run) > LONGEST_STEP:
        return run
    check_step(memory_of(step_program(assembled)).per_kind(), assembled)
    tell(MEASURES)
    started, crowded = clock(), is_crowded()
    found = _kernels(run, assembled, clock)
    run = _applied(run, found) or run
    budget = _SHARE * whole - (clock() - started)
    run, made, pace = _steps(run, devices, budget, clock, trial)
    keep_pace(made, dataclasses.replace(work, **costs(made)), pace.token_seconds, how=TRIAL)
    found |= {"devices": run.devices, "microbatches": run.microbatches}
    if not crowded:
        remember("choices", key, found | {"date": today()})
    whether = "not kept, since other programs are at work here" if crowded else "kept for this machine"
    tell(f"chosen   {words_of(run, found)}, in {duration(clock() - started)}; {whether}")
    return run


def _is_open(run: Run, devices: Sequence[Any]) -> bool:
    here = are_cpus(devices) and jax.process_count() == 1
    asked = run.microbatches, run.devices, run.cpu.attention_chunk, run.cpu.loss_chunk, run.cpu.turned
    plain_run = not run.lengths and run.mesh.stage == 1
    return here and run.cpu.measure and plain_run and None in asked and tokens_of(run, 0, run.steps) > _FEW


def _kernels(run: Run, assembled: Assembled, clock: Callable[[], float]) -> dict[str, Any]:
    """The fastest value of each field of `run.cpu` that the run leaves open."""
    ways = math.prod(assembled.layout.mesh.shape[axis] for axis in assembled.layout.assign(("batch",))[0])
    rows = run.batch_sizes()[0].size // ways // assembled.options.microbatches
    open_ = {name: calls for name, calls in probes(run, rows).items() if getattr(run.cpu, name) is None}
    return {name: fastest(calls, next(iter(calls)), clock) for name, calls in open_.items()}


def _steps(
    run: Run, devices: Sequence[Any], budget: float, clock: Callable[[], float], trial: Callable[[Assembled], Pace]
) -> tuple[Run, Assembled, Pace]:
    """The run with the microbatches and devices of the fastest steps that there was time to try."""
    started = clock()
    assembled = assemble(run, devices)
    usual = dataclasses.replace(
        run,
        devices=run.devices or len(devices),
        microbatches=run.microbatches or assembled.options.microbatches,
    )
    best = usual, assembled, trial(assembled)
    one = clock() - started
    for other in _others(run, usual, len(devices)):
        if clock() - started + one > budget:
            break
        try:
            made = assemble(other, devices[: other.devices])
            new = trial(made)
        except UserError:  # does not divide
            continue
        if new.token_seconds < GAIN * best[2].token_seconds:
            best = other, made, new
    return best


def _others(run: Run, usual: Run, most: int) -> list[Run]:
    """Runs that may be faster than the usual one, the likeliest first."""
    count, found = usual.microbatches or 1, []
    if run.microbatches is None and not dropout(run.model):  # which is drawn for each part
        found += [(2 * count, usual.devices)] + [(count // 2, usual.devices)] * (count > 1)
    if run.devices is None:
        fewer = [n for n in possible_counts(run, most) if n in (most // 2, 1)]
        found += [(count, n) for n in reversed(fewer)]
    runs = []
    for microbatches, devices in found:
        try:
            runs.append(dataclasses.replace(usual, microbatches=microbatches, devices=devices))
        except UserError:  # does not divide the batch
            continue
    return runs


def _applied(run: Run, found: dict[str, Any]) -> Run | None:
    """The run with what was found for what it leaves open; None if that does not fit, as from another version."""
    try:
        cpu = _filled(run.cpu, found)
        several = {name: found.get(name) for name in ("devices", "microbatches") if getattr(run, name) is None}
        return dataclasses.replace(run, cpu=cpu, **several)
    except (UserError, TypeError):
        return None


def _filled(cpu: Cpu, found: Mapping[str, Any]) -> Cpu:
    """The configuration with what was found for what it leaves open."""
    names = [field.name for field in dataclasses.fields(Cpu) if getattr(cpu, field.name) is None]
    return dataclasses.replace(cpu, **{name: found[name] for name in names if name in found})


def words_of(run: Run, found: dict[str, Any]) -> str:
    """The choices, in words."""
    counts = {"devices": ("device", "devices"), "microbatches": ("microbatch", "microbatches")}
    parts = [f"{found[name]} {words[found[name] > 1]}" for name, words in counts.items() if found.get(name)]
    parts += [f"{words} of {found[name]}" for name, words in _KERNELS.items() if found.get(name)]
    turned = {"narrower": "turned operands", "none": "operands as they are"}.get(run.cpu.turned or "")
    return ", ".join(parts + [f"weight gradients by {turned}"] * (turned is not None))


_KERNELS = {"attention_chunk": "attention in chunks", "loss_chunk": "loss in chunks"}


def _key(run: Run, devices: Sequence[Any]) -> str:
    decides = {name: value for name, value in plain(run).items() if name not in _BESIDE}
    return f"{devices_here(devices)}, {digest_of(decides)}"
