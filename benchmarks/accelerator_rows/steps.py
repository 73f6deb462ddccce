"""Train steps: of recipes, of what the planner's search found, of the explicit trainer."""

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from process import STARTED, Missing
from profiles import profile_of
from random_batch import random_batch
from texts import gibibytes, milliseconds
from timing import step_times

import trellis as tr
from trellis.inspect import compiled_memory
from trellis.plan import chips, local_target, plan_step, quick_plan, search, target
from trellis.recipes import load_run
from trellis.train import CompiledStep, assemble, flops_per_token, known_peak

WORKS = ("search_settings", "train_found", "train_recipe", "train_explicit")

EXPLICIT = Path(__file__).parents[2] / "examples" / "explicit_train.py"
SECONDS = 5.0  # that steps are timed for
# Of a device's memory, what the second and the third choice of a search may take.
ROOM = {1: 0.95, 2: 0.75, 3: 0.6}


def search_settings(
    findings: Any,
    *,
    recipe: str,
    options: dict,
    on: str | None,
    batches: tuple[int, ...],
    types: tuple[str, ...],
    most: int,
) -> None:
    """The fastest predicted settings of one device that leave it 5, 25 and 40 % of its memory, or take the least."""
    on = on or one_of(findings.of("machine")["device"])
    where, candidates = target(on), []
    for params in types:
        for batch in batches:
            given = options | {"batch_size": str(batch), "precision.params": params, "layout.preset": "fsdp"}
            run = load_run(recipe, given)
            for candidate in search(run, where, most=most).candidates:
                if candidate.plan is not None:
                    plan = candidate.plan
                    candidates.append((plan.tokens_per_second, plan.memory.peak, given | candidate.options))
    candidates.sort(key=lambda candidate: -candidate[0])
    chosen: list[tuple] = []
    for room in ROOM.values():
        others = [c for c in candidates if c[1] <= ROOM[1] * where.chip.hbm_bytes and not alike(c, chosen)]
        fitting = [c for c in others if c[1] <= room * where.chip.hbm_bytes]
        chosen += fitting[:1] or sorted(others, key=lambda candidate: candidate[1])[:1]
    settings = [{"tokens_per_second": speed, "memory": memory, "options": more} for speed, memory, more in chosen]
    findings.tell(recipe=recipe, on=on, planned=len(candidates), settings=settings)
    if not settings:
        raise AssertionError(f"none of {len(candidates)} planned settings fits {on}")
    said = (f"{_words(recipe, s['options'])} ({s['tokens_per_second']:,.0f} tokens/s)" for s in settings)
    findings.tell(said=f"{len(candidates)} planned for {on}; {'; then '.join(said)}")


def alike(candidate: tuple, chosen: list[tuple]) -> bool:
    """Whether one of those chosen has the same predicted speed and memory."""
    return any(candidate[:2] == other[:2] for other in chosen)


def one_of(device: str) -> str:
    """What the planner calls one device of a kind.

    >>> one_of("NVIDIA H100 80GB HBM3"), one_of("NVIDIA A100-SXM4-40GB")
    ('1xH100', '1xA100-40GB')
    """
    known = [(kind, chip.name) for chip in chips().values() for kind in chip.device_kinds if device.startswith(kind)]
    if not known:
        raise Missing(f"the planner does not know {device}; --on says what to plan for, as in --on 1xH100")
    return f"1x{max(known, key=lambda pair: len(pair[0]))[1].upper()}"


def _words(recipe: str, options: dict) -> str:
    """What a search chose, in a few words."""
    run = load_run(recipe, options)
    kept = "every activation" if run.remat.policy == "none" else ", ".join(run.remat.names) or run.remat.policy
    return f"batch {run.batch_size} in {run.microbatches or 1}, {run.precision.params} at rest, keeps {kept}"


def train_found(findings: Any, *, settings: str, rank: int, options: dict | None = None, profile: bool = False) -> None:
    """A step with the settings of a rank of a search."""
    found = findings.of(settings)
    if len(found["settings"]) < rank:
        raise Missing(f"`{settings}` found {len(found['settings'])} settings that differ")
    chosen = found["settings"][rank - 1]["options"] | (options or {})
    findings.tell(settings=_words(found["recipe"], chosen))
    train_recipe(findings, recipe=found["recipe"], options=chosen, profile=profile)


def train_recipe(findings: Any, *, recipe: str, options: dict, profile: bool = False) -> None:
    """A recipe's step on one device: speed, memory, the plan beside both."""
    run, devices = load_run(recipe, options), jax.devices()[:1]
    made = assemble(run, devices)
    length = run.data.sequence_length
    costs = [flops_per_token(made.abstract.model, length, causal=causal) for causal in (True, False)]
    program = CompiledStep(made.step, made.compiler_options)
    with made.layout:
        state, batch = made.init(), random_batch(made)

        def step() -> Any:
            nonlocal state
            state, metrics = program(state, batch)
            return metrics

        rows = made.abstract_batch().shape[0]
        findings.tell(recipe=recipe, options=options, model=run.name)
        _measure(findings, step, rows * length, costs, run.precision.compute, lambda: program.programs[0])
        _against_plan(findings, lambda where: quick_plan(run, where))
        if profile:
            profile_of(findings, step, program.programs[0].as_text())


def train_explicit(findings: Any, *, preset: str, rows: int | None) -> None:
    """The same of the trainer in which every collective stands in the text, with the preset's rows or so many."""
    spec = importlib.util.spec_from_file_location("explicit_train", EXPLICIT)
    explicit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(explicit)
    model, usual, length, rate = explicit.PRESETS[preset]
    rows = rows or usual
    training = explicit.Training(steps=1000, learning_rate=rate, warmup=100, dtype="bfloat16")
    devices = jax.devices()[:1]
    mesh = tr.make_mesh(devices, data=1, model=1)
    place = jax.NamedSharding(mesh, tr.parse("batch/data pos").spec)
    stream = np.random.default_rng(0).integers(0, model.vocab, (rows, length + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    arrays = dict(
        tokens=stream[:, :-1], targets=stream[:, 1:], loss_mask=np.ones((rows, length), np.float32),
        segment_ids=np.ones((rows, length), np.int32), positions=positions,
    )  # fmt: skip
    jitted = jax.jit(explicit.train_step, static_argnums=(2, 3), donate_argnums=(0,))
    causal = explicit.flops_per_token(model, length)
    attention = 12 * model.layers * model.kv_heads * model.queries * model.head_dim * length
    with jax.set_mesh(mesh):
        batch = explicit.Batch(**jax.device_put(arrays, place))
        state = explicit.initial(model, 0, mesh)
        compiled = None

        def step() -> Any:
            nonlocal state, compiled
            if compiled is None:
                compiled = jitted.lower(state, batch, model, training).compile()
            state, metrics = compiled(state, batch)
            return metrics

        costs = [causal, causal + attention / 2]
        _measure(findings, step, rows * length, costs, training.dtype, lambda: compiled)
        whole = jax.jit(lambda state, batch: jitted(state, batch, model, training), donate_argnums=0)
        asked = dict(name=preset, tokens=rows * length, model_flops=causal * rows * length)
        _against_plan(findings, lambda where: plan_step(whole, state, batch, where, **asked))


def _measure(findings: Any, step: Callable, tokens: int, costs: list[float], dtype: str, compiled: Callable) -> None:
    """Time to the first step, speed, utilisation and memory of a step.

    Args:
        findings: where it goes.
        step: dispatches a step and returns its metrics.
        tokens: of a batch.
        costs: FLOPs of a token, with the causal half of attention and with all of it.
        dtype: of products.
        compiled: gives the compiled step once the first step was made.
    """
    first = float(step()["loss"])
    findings.tell(first_step_seconds=time.time() - STARTED, first_loss=first)
    if not np.isfinite(first):
        raise AssertionError(f"the first loss is {first}")
    times = step_times(step, seconds=SECONDS if jax.default_backend() != "cpu" else 0.2)
    seconds = statistics.median(times)
    device, speed = jax.devices()[0], tokens / seconds
    peak = known_peak([device], dtype)
    used = [speed * cost / peak for cost in costs] if peak else [None, None]
    findings.tell(
        step_seconds=seconds, steps=len(times), slowest=max(times), tokens=tokens, tokens_per_second=speed,
        loss=float(step()["loss"]), flops_per_token=costs[0], mfu=used[0], mfu_noncausal=used[1],
    )  # fmt: skip
    memory = {"compiled_peak": compiled_memory(compiled()).peak}
    with contextlib.suppress(TypeError, KeyError):  # a device that does not count
        memory["measured_peak"] = device.memory_stats()["peak_bytes_in_use"]
    findings.tell(**memory)
    _say(findings)


def _against_plan(findings: Any, plan: Callable) -> None:
    """What the planner says of it, where the device's rates are known: with guesses in their place it says nothing.

    Args:
        findings: where it goes.
        plan: makes it, for a target.
    """
    where = local_target(jax.devices()[:1])
    if where.chip.name != "cpu":
        made = plan(where)
        findings.tell(plan_seconds=made.seconds, plan_peak=made.memory.peak, waits_for=made.times.by_bound())
    _say(findings)


def _say(findings: Any) -> None:
    """One line of it all."""
    v = findings.values
    mfu = f", MFU {v['mfu']:.1%} ({v['mfu_noncausal']:.1%} non-causal)" if v.get("mfu") else ""
    step = milliseconds(v["step_seconds"], v.get("plan_seconds"))
    memory = gibibytes(v.get("measured_peak", v["compiled_peak"]), v.get("plan_peak"))
    findings.tell(
        said=f"{v['tokens_per_second']:,.0f} tokens/s{mfu}, step {step}, {memory}, first step after "
        f"{v['first_step_seconds']:.0f} s"
    )
