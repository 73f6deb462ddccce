"""How long a run will take, known before it begins from earlier runs of its step on this machine, or from a trial."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trellis.figures.numbers import duration, seconds
from trellis.hardware.remembered import devices_here, digest_of, recall, remember, today
from trellis.mesh.platform import are_cpus
from trellis.run.config import Run
from trellis.run.schema import plain
from trellis.train.assemble import Assembled
from trellis.train.compilation import CompiledStep
from trellis.train.metrics import Work

# The fields that define the steps of a run, besides its mesh and its microbatches.
_STEP = (
    "accumulation", "batch_size", "clip_norm", "compiler_options", "cpu", "ema", "layout", "model", "optimizer",
    "precision", "remat", "z_loss",
)  # fmt: skip
# The share of the peak in products if nothing better is known: between what small and large models reach.
_USUAL = 0.5
# Log of the largest ratio of two models' FLOPs a token at which they reach a similar share of the peak.
_COMPARABLE = math.log(4)
# The fewest seconds of a step, however few its FLOPs: it has hundreds of operations.
_LEAST_STEP = 5e-3
# Seconds of a run that is long enough for a trial, and of a step that is short enough for one.
_WORTH_A_TRIAL, LONGEST_STEP = 20.0, 5.0
_TRIED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast steps are.

    Attributes:
        token_seconds: the seconds of a step, divided by its tokens.
        basis: how that is known, in words; "" for a guess.
        measured: whether these very steps were measured. A guess may be off by many times: it decides what is worth a
            trial, and is not reported.
    """

    token_seconds: float
    basis: str
    measured: bool

    def step_seconds(self, run: Run, step: int = 0) -> float:
        """The seconds of a step of a run."""
        return self.token_seconds * tokens_of(run, step, step + 1)

    def seconds(self, run: Run, start: int, stop: int, validation_batches: int = 0) -> float:
        """The seconds from one step of a run to another. A validation batch takes a forward pass, a third of a step."""
        evaluated = validation_batches / 3 * run.batch_sizes()[-1].size * run.data.sequence_length
        return self.token_seconds * (tokens_of(run, start, stop) + evaluated)

    def tell(self, run: Run, start: int, stop: int, *, evaluations: int, validation_batches: int) -> str:
        """The same in words: `about 5 min 12 s: 600 steps of 0.52 s and 3 evaluations, as ...`."""
        whole = duration(self.seconds(run, start, stop, validation_batches))
        also = f" and {evaluations} evaluations" if evaluations > 1 else " and an evaluation" if evaluations else ""
        return f"about {whole}: {stop - start} steps of {seconds(self.step_seconds(run, start))}{also}, {self.basis}"


def tokens_of(run: Run, start: int, stop: int) -> int:
    """The tokens that a run reads from one step to another, by all batch sizes and lengths of its schedules.

    >>> from trellis.recipes import tiny
    >>> tokens_of(tiny(), 0, 20)
    10240
    """
    total = 0
    for phase in run.phases():
        sizes = phase.run.batch_sizes()
        starts = [entry.step or phase.start for entry in sizes]
        for first, end, entry in zip(starts, [*starts[1:], phase.stop], sizes, strict=True):
            steps = max(0, min(end, stop) - max(first, start))
            total += steps * entry.size * phase.run.data.sequence_length
    return total


def expected_pace(assembled: Assembled, work: Work) -> Pace | None:
    """The pace of a run that has not begun, as far as this machine's cache and the peak of products can tell.

    The best source is the time of the same step in an earlier run. Otherwise it is a guess: the share of the peak that
    was reached by the run with the most similar cost of a token, up to four times as much or as little; if none is
    known, half of the peak. None if no peak is known.

    Args:
        assembled: the run.
        work: what a token costs, and what the devices could do.
    """
    place, key = _place(assembled), _key(assembled)
    known = {name: kept for name, kept in recall("paces").items() if _is_pace(kept)}
    if key in known:
        basis = f"as in {known[key].get('how', 'the run')} of {known[key]['date']} on this machine"
        return Pace(token_seconds=known[key]["token_seconds"], basis=basis, measured=True)
    if not work.peak_flops:
        return None
    ratio = lambda kept: abs(math.log(kept["token_flops"] / work.flops_per_token))
    near = [kept for name, kept in known.items() if name.startswith(place) and ratio(kept) <= _COMPARABLE]
    best = min(near, key=ratio, default=None)
    rate = best["token_flops"] / best["token_seconds"] if best else _USUAL * work.peak_flops
    tokens = tokens_of(assembled.run, 0, 1)
    return Pace(token_seconds=max(work.flops_per_token / rate, _LEAST_STEP / tokens), basis="", measured=False)


def worth_a_trial(assembled: Assembled, guess: Pace | None, steps: int) -> bool:
    """Whether a few steps may be made to find the pace of a run: on a single process's CPU, if nothing measured it.

    Args:
        assembled: the run.
        guess: its expected pace.
        steps: the steps of the run.
    """
    if not are_cpus(assembled.layout.mesh) or jax.process_count() > 1 or guess is None or guess.measured:
        return False
    long = guess.seconds(assembled.run, 0, steps) >= _WORTH_A_TRIAL
    return long and guess.step_seconds(assembled.run) <= LONGEST_STEP


def tried_pace(assembled: Assembled, clock: Callable[[], float] = time.perf_counter) -> Pace:
    """The pace of a few steps on made-up tokens, from a first state of their own. Nothing of them is kept."""
    step = CompiledStep(assembled.step, assembled.compiler_options)
    with assembled.layout:
        state = assembled.init()
        batch = jax.tree.map(
            lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding), assembled.abstract_batch()
        )
        taken = []
        for _ in range(1 + _TRIED):
            started = clock()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            taken.append(clock() - started)
    basis = f"as the fastest of {_TRIED} trial steps did"
    return Pace(token_seconds=min(taken[1:]) / tokens_of(assembled.run, 0, 1), basis=basis, measured=True)


def keep_pace(assembled: Assembled, work: Work, token_seconds: float, *, how: str = "the run") -> None:
    """Keeps the pace of a run's steps, for the forecasts of later runs.

    Args:
        assembled: the run.
        work: what a token costs.
        token_seconds: the seconds of a step, divided by its tokens.
        how: what was measured, in words.
    """
    kept = {"token_seconds": token_seconds, "token_flops": work.flops_per_token, "name": assembled.run.name}
    remember("paces", _key(assembled), kept | {"date": today(), "how": how})


def _place(assembled: Assembled) -> str:
    return f"{devices_here(list(assembled.layout.mesh.devices.flat))}, {assembled.run.precision.compute}, "


def _key(assembled: Assembled) -> str:
    """Where a step runs, and a digest of what defines it."""
    run = plain(assembled.run)
    parts: Mapping[str, Any] = {name: run[name] for name in _STEP} | {
        "length": assembled.run.data.sequence_length,
        "mesh": dict(assembled.layout.mesh.shape),
        "microbatches": assembled.options.microbatches,
    }
    return _place(assembled) + digest_of(parts)


def _is_pace(kept: Any) -> bool:
    wanted = ("token_seconds", "token_flops")
    whole = isinstance(kept, dict) and {*wanted, "name", "date"} <= kept.keys()
    return whole and all(isinstance(kept[name], float | int) and kept[name] > 0 for name in wanted)
