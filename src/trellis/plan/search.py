"""Searches for a better setting: meshes, layouts, kinds of context parallelism, schedules of stages, microbatches and
checkpoint policies.

All variants are sketched in microseconds, the best few of each mesh are planned from types, the fastest two whose loop
over layers copies much also with layers that are written out, and, on request, the best of those are compiled. The
result is the frontier of time against memory, the fastest that fits as options to paste, and what held the others back.
"""

import dataclasses
import functools
import itertools
import json
import math
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from trellis.errors import UserError
from trellis.hardware.chips import Target
from trellis.hardware.described import described_devices
from trellis.models.protocol import stacked
from trellis.named.pipeline.parts import Parts
from trellis.named.pipeline.schedule import Schedule
from trellis.plan.adapt import DATA_AXES, data_sizes
from trellis.plan.candidate import Candidate, promising, with_less_kept, writes_out, written_out
from trellis.plan.quick import quick_plan
from trellis.plan.sketch import sketch
from trellis.plan.ways_to_fit import POLICIES, some_names
from trellis.run.config import Remat, Run
from trellis.run.layouts import KINDS, LayoutChoice, MeshSizes
from trellis.run.lengths import as_of_phase
from trellis.train.assemble import layout_of

# With fewer positions in a slice, the kernels' start and end cost more than slicing saves.
SHORTEST_SLICE = 2048
# The most blocks of scores for which a TPU's attention kernel has tables. They are made one after another in Python, so
# more would take minutes.
MOST_BLOCKS, BLOCK = 1 << 15, 512
# Stages of a pipeline, and how often parameters are gathered.
STAGES = (1, 2, 4, 8)
ACCUMULATIONS: tuple[Literal["pending", "sharded"], ...] = ("pending", "sharded")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        target: the hardware.
        sketched: the number of variants.
        candidates: the variants that were planned, fastest first.
        frontier: those of them that no other beats in both time and memory, fastest first.
        winner: the fastest that fits; None if none does.
    """

    target: Target
    sketched: int
    candidates: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    winner: Candidate | None

    def roomy(self, share: float) -> Candidate | None:
        """The fastest that takes at most this share of a device's memory; None if none does."""
        able = [c for c in self.candidates if c.plan is not None and c.peak <= share * self.target.chip.hbm_bytes]
        return min(able, key=lambda c: c.seconds, default=None)


def variants(run: Run, target: Target, written: Run | None = None) -> Iterator[tuple[Run, dict[str, str]]]:
    """The run with all other meshes, layouts, microbatches and checkpoint policies that divide, and what differs.

    Args:
        run: the run.
        target: the hardware.
        written: the run as the user wrote it, which options are relative to; `run` itself if None.
    """
    devices = target.num_devices
    for stages in STAGES:
        if devices % stages == 0 and stacked(run.model) >= stages:
            yield from _through(stages, run, target, written or run)


def _through(stages: int, run: Run, target: Target, written: Run) -> Iterator[tuple[Run, dict[str, str]]]:
    """The variants with this many stages; several stages are combined with data, FSDP and tensor parallelism."""
    devices = target.num_devices // stages
    size = max(entry.size for entry in run.batch_sizes())
    heads, kv_heads = run.model.heads, run.model.kv_heads
    width, experts = run.model.mlp, run.model.experts
    for model in (1, 2, 4, 8, 16):
        if devices % model or heads % model or kv_heads % model or width % model:
            continue
        slices = [(1, run.layout.context), *itertools.product((2, 4, 8, 16, 32), KINDS)]
        if stages > 1:
            slices = slices[:1]
        among = _expert_sizes(min(experts, devices) if stages == 1 else 1, target)
        for (context, kind), (expert_y, near) in itertools.product(slices, among):
            expert = expert_y * near
            ways = devices // model // context // expert
            if experts % expert or devices % (model * context * expert):
                continue
            if context > 1 and run.data.sequence_length % (2 * 128 * context):  # two pieces a device, as kernels need
                continue
            if context > 1 and run.data.sequence_length < SHORTEST_SLICE * context:
                continue
            if kind == "exchange" and heads % (model * context):
                continue
            whole = context == 1 or kind != "ring"
            if whole and target.chip.kind == "tpu" and _blocks(run.data.sequence_length, context, kind) > MOST_BLOCKS:
                continue
            presets = ("auto",) if context > 1 else ("fsdp",) if model == 1 else ("fsdp_tensor", "fsdp_tensor_sequence")
            groups = target.num_slices if target.chip.torus else target.shape[0]
            kinds = [(1, preset) for preset in presets]
            if groups > 1 and ways % groups == 0:  # a copy of the model in each slice or host
                kinds = [*kinds, (groups, "hybrid")]
            if (copies := _fewest_copies(ways, run.model.embed)) > 1:
                kinds = [*kinds, (copies, "hybrid")]
            schedules, policies = list(_schedules(run, stages)), _policies(run, stages)
            for (replica, preset), schedule in itertools.product(kinds, schedules):
                if size % (ways * expert * schedule.parts):
                    continue
                data = data_sizes(ways // replica, target)
                sizes = {"replica": replica, **{axis: data.get(axis, 1) for axis in DATA_AXES}}
                sizes |= {"stage": stages, "context": context, "context_y": 1, "model": model}
                sizes |= {"expert": near, "expert_y": expert_y}
                mesh = dataclasses.replace(run.mesh, **sizes)
                rings = run.layout.overlap if model > 1 and preset != "fsdp_tensor" else ()
                layout = dataclasses.replace(
                    run.layout, preset=preset, mode="explicit", context=kind, context_y=None, overlap=rings,
                    **schedule.stages,
                )  # fmt: skip
                microbatches = run.microbatches if schedule.microbatches == run.parts else schedule.microbatches
                for policy, names in policies:
                    changed = dataclasses.replace(
                        run, mesh=mesh, layout=layout, microbatches=microbatches, accumulation=schedule.accumulation,
                        remat=dataclasses.replace(run.remat, policy=policy, names=names),
                    )  # fmt: skip
                    yield changed, _options(written, changed)


def _expert_sizes(most: int, target: Target) -> list[tuple[int, int]]:
    """Slices of experts across hosts and inside one, together at most this many; on a torus none across.

    >>> from trellis.hardware.chips import target
    >>> _expert_sizes(16, target("4x4xH100"))
    [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (4, 4)]
    """
    powers = [2**n for n in range(most.bit_length())]
    host = 0 if target.chip.torus else target.shape[1]
    return [(1, size) for size in powers] + [(size // host, host) for size in powers if host and size > host > 1]


def _fewest_copies(ways: int, width: int) -> int:
    """The fewest copies of a model with which this many devices slice its width, each copy into equal parts.

    >>> _fewest_copies(8, 512), _fewest_copies(6, 512), _fewest_copies(3, 512)
    (1, 3, 3)
    """
    return next(copies for copies in range(1, ways + 1) if ways % copies == 0 and width % (ways // copies) == 0)


def _policies(run: Run, stages: int) -> Iterable[tuple]:
    """Policies with the names that they keep, and the run's own, whose model may have others; stages do not offload."""
    own = (run.remat.policy, run.remat.names)
    some = [*((policy, ()) for policy in POLICIES), *(("saved", names) for names in some_names(run))]
    return dict.fromkeys(some if stages > 1 and run.remat.policy == "offload" else (*some, own))


class _Schedule(NamedTuple):
    """How a batch is cut.

    Attributes:
        parts: the number of parts.
        microbatches: those of a run without stages; 1 for one with stages.
        accumulation: that of gradients.
        stages: fields of the layout.
    """

    parts: int
    microbatches: int
    accumulation: Literal["pending", "sharded"]
    stages: dict[str, Any]


def _schedules(run: Run, stages: int) -> Iterator[_Schedule]:
    none = {"pipeline_microbatches": None, "pipeline_groups": 1}
    for count in (1, 2, 4, 8, 16) if stages == 1 else ():
        yield _Schedule(count, count, run.accumulation if count > 1 else "pending", none)
    for times in (1, 2, 4, 8) if stages > 1 else ():
        found = worthwhile_groups(stacked(run.model), stages, times * stages, even=bool(run.layout.overlap))
        for groups, how in itertools.product(found, ACCUMULATIONS):
            own = {"pipeline_microbatches": times * stages, "pipeline_groups": groups}
            yield _Schedule(times * stages, 1, how, own)


def worthwhile_groups(layers: int, stages: int, microbatches: int, *, even: bool = False) -> list[int]:
    """Groups of layers a stage that save a hundredth over any fewer, in ticks times the largest part's layers.

    >>> worthwhile_groups(80, stages=4, microbatches=4), worthwhile_groups(78, stages=4, microbatches=16)
    ([1, 2, 3, 4, 5, 10, 20], [1, 2, 4, 10])

    Args:
        layers, stages, microbatches: those of the pipeline.
        even: whether every part must have the same number of layers.
    """
    found, least = [], math.inf
    for groups in range(1, layers // stages + 1):
        parts, ticks = Parts(layers, stages, groups), Schedule(stages, groups, microbatches).forward_ends
        if ticks * parts.most < 0.99 * least and not (even and parts.uneven):
            found, least = [*found, groups], ticks * parts.most
    return found


def _blocks(length: int, context: int, kind: str) -> int:
    """Blocks of a device's scores if the sequence's keys meet its queries at once.

    >>> [_blocks(131_072, 4, kind) for kind in ("gather", "exchange")]
    [16384, 65536]
    """
    keys = math.ceil(length / BLOCK)
    return keys * (keys if kind == "exchange" else keys // context)


@functools.lru_cache(maxsize=1024)
def _sizes(mesh: MeshSizes) -> Mapping[str, int]:
    """The sizes of a mesh by axis, cached: thousands of variants have a few meshes."""
    return dataclasses.asdict(mesh)


def _options(before: Run, after: Run) -> dict[str, str]:
    """The options in which two runs differ, by the dotted names of the command line."""
    was = _sizes(before.mesh)
    found = {f"mesh.{axis}": str(size) for axis, size in _sizes(after.mesh).items() if was[axis] != size}
    for name in ("layout.preset", "layout.mode", "layout.context", "remat.policy", "remat.names", "layout.overlap"):
        get = operator.attrgetter(name)
        if get(before) != (now := get(after)):
            found[name] = now if isinstance(now, str) else ",".join(now)
    if before.batch_size != after.batch_size:
        entries = [dataclasses.asdict(entry) for entry in after.batch_sizes()]
        found["batch_size"] = str(after.batch_size) if isinstance(after.batch_size, int) else json.dumps(entries)
    if before.parts != after.parts:
        found["microbatches"] = str(after.parts)
    if before.accumulation != after.accumulation:
        found["accumulation"] = after.accumulation
    if before.scan_layers != after.scan_layers:
        found["scan_layers"] = "null" if after.scan_layers is None else str(after.scan_layers).lower()
    for name in ("context_y", "pipeline_microbatches", "pipeline_groups"):
        if getattr(before.layout, name) != (now := getattr(after.layout, name)):
            found[f"layout.{name}"] = "null" if now is None else str(now)
    return found


def search(
    run: Run,
    target: Target,
    *,
    written: Run | None = None,
    start: int = 0,
    most: int = 18,
    compile_best: int = 0,
    progress: bool = False,
    price: float | None = None,
    load: float = 1.0,
) -> Found:
    """Searches for the fastest setting of a run on a target that fits.

    The time is that of the steps from `start` on; steps with other lengths of sequences have to fit, too.

    Args:
        run: the run; model, batch and sequence length stay as they are.
        target: the hardware.
        written: the run as the user wrote it, which the options to paste are relative to; `run` itself if None.
        start: of a run with several lengths of sequences, the first step of those that are compared.
        most: variants that are planned from types, about half a second each.
        compile_best: how many of the fastest that fit the compiler is asked about.
        progress: whether to report progress on stderr.
        price: dollars for one device and hour.
        load: for a mixture of experts, the rows that the fullest device gets, relative to an even load.

    Raises:
        UserError: no mesh divides the batch, or the axes of the model that it slices, or nothing that is tried can be
            planned.
    """
    found, refusals = [], []
    whole, run, written = run, run.at(start), written or run
    refused = functools.cache(functools.partial(_refused, described_devices(target), whole))
    # Plans of layers that are written out take long. The fastest have them, once it is known which these are.
    looped = dataclasses.replace(run, scan_layers=None) if writes_out(run) else run
    for variant, options in variants(looped, target, written):
        if why := refused(variant.mesh, variant.layout, variant.microbatches, variant.accumulation):
            refusals.append(why)
        elif not whole.lengths:
            found.append((variant, options))
        elif (everywhere := _throughout(whole, start, variant)) is not None:
            found.append((variant, _options(written, everywhere)))
    sketched = [_sketched(variant, options, target) for variant, options in found]
    if not sketched and refusals:
        raise refusals[0]
    if not sketched:
        size = max(entry.size for entry in run.batch_sizes())
        raise UserError(
            "At least one mesh must divide the batch over the devices.",
            seen=f"batch_size={size} on {target.num_devices} devices of {target.name}",
            where="batch_size",
            fix=f"use --batch_size {-(-size // target.num_devices) * target.num_devices}",
        )
    planned = []
    own = next((c for c in sketched if _same(c.run, run, target)), None) or _itself(run, target, written, whole)
    chosen = [own] if own else []
    chosen += [c for c in promising(sketched, target, most) if c is not own]
    plan = functools.partial(_planned, whole=whole, start=start, target=target, price=price, load=load)
    for number, candidate in enumerate(chosen, 1):
        if progress:
            print(f"\rplanning {number} of {len(chosen)}", end="", file=sys.stderr, flush=True)
        planned.append(plan(candidate))
    for _ in range(most // 3):
        if (candidate := with_less_kept(planned, sketched, target)) is None:
            break
        planned.append(plan(candidate))
    planned += map(plan, written_out(planned, target, written))
    if progress:
        print(file=sys.stderr)
    if planned and all(c.plan is None and not c.too_large for c in planned):
        raise UserError(
            "At least one setting that a search tries must be one that can be planned.",
            seen=planned[0].refused,
            where=f"{len(planned)} settings for {target.name}",
            fix="change what this names in the run: no mesh, layout or checkpoint policy does",
        )
    if compile_best:
        planned = _compiled(planned, target, compile_best)
    planned.sort(key=lambda c: (c.plan is None, not c.fits, c.seconds))
    able = [c for c in planned if c.plan is not None]
    frontier = tuple(c for c in able if not any(_beats(other, c) for other in able))
    return Found(target, len(sketched), tuple(planned), tuple(sorted(frontier, key=lambda c: c.seconds)), best(able))


def _refused(
    devices: Sequence[Any],
    run: Run,
    mesh: MeshSizes,
    layout: LayoutChoice,
    microbatches: int | None,
    accumulation: Literal["pending", "sharded"],
) -> UserError | None:
    """Why a run cannot be computed on this mesh; None if it can."""
    changed = {"mesh": mesh, "layout": layout, "microbatches": microbatches, "accumulation": accumulation}
    if mesh.stage > 1 and run.remat.policy == "offload":  # variants with stages have other policies
        changed["remat"] = Remat(policy="full")
    try:
        for phase in dataclasses.replace(run, **changed).phases():
            layout_of(phase.run, devices)
    except UserError as error:
        return error
    return None


def _throughout(whole: Run, start: int, variant: Run) -> Run | None:
    """The run with the settings that a variant has from `start` on; None if its other steps cannot have them, or these
    have a number of microbatches of their own."""
    same = variant.microbatches == whole.at(start).microbatches
    try:
        found = dataclasses.replace(
            whole, mesh=variant.mesh, layout=variant.layout, accumulation=variant.accumulation, remat=variant.remat,
            scan_layers=variant.scan_layers, microbatches=whole.microbatches if same else variant.microbatches,
        )  # fmt: skip
    except UserError:
        return None
    return found if found.at(start).microbatches == variant.microbatches else None


def _planned(
    candidate: Candidate, whole: Run, start: int, target: Target, price: float | None, load: float
) -> Candidate:
    everywhere = _throughout(whole, start, candidate.run) if whole.lengths else None
    try:
        for phase in everywhere.phases() if everywhere else ():
            if phase.start == start:
                continue
            with as_of_phase(phase.start):
                other = quick_plan(phase.run, target, load=load)
            if not other.fits:
                why = f"steps from {phase.start + 1:,} on do not fit"
                return dataclasses.replace(candidate, refused=why, too_large=True)
        return dataclasses.replace(candidate, plan=quick_plan(candidate.run, target, price=price, load=load))
    except (UserError, ValueError, NotImplementedError) as error:
        return dataclasses.replace(candidate, refused=str(error).splitlines()[0])


def _sketched(run: Run, options: dict[str, str], target: Target) -> Candidate:
    sizes = {name: size for name, size in _sizes(run.mesh).items() if size > 1}
    return Candidate(run, options, sketch(run, target, sizes))


def _itself(run: Run, target: Target, written: Run, whole: Run) -> Candidate | None:
    """The run's own setting, if it is not one of the variants; None if its mesh does not fit the target."""
    try:
        sizes = run.mesh.resolve(target.num_devices)
    except UserError:
        return None
    own = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, **sizes))
    return _sketched(own, _options(written, whole if whole.lengths else run), target)


def _same(one: Run, run: Run, target: Target) -> bool:
    """Whether a variant is the run's own setting, which is always planned for comparison."""
    parts = lambda r: (r.layout, r.parts, r.remat, r.accumulation, r.scan_layers)
    try:
        sizes = [r.mesh.resolve(target.num_devices) for r in (one, run)]
    except UserError:
        return False
    return parts(one) == parts(run) and sizes[0] == sizes[1]


def best(able: list[Candidate]) -> Candidate | None:
    """The fastest that fits; of those within a hundredth of it, the one with the fewest kinds of parallelism.

    If the compiler was asked, only its answers count.
    """
    fit = [c for c in able if c.fits]
    fit = [c for c in fit if c.verdict is not None] or fit
    close = [c for c in fit if c.seconds <= 1.01 * min(c.seconds for c in fit)]
    kinds = lambda mesh: sum(
        size > 1 for size in (mesh.model, mesh.context, mesh.expert, mesh.expert_y, mesh.replica, mesh.stage)
    )
    return min(close, key=lambda c: (kinds(c.run.mesh), c.parts, c.run.scan_layers is False, c.seconds), default=None)


def _beats(one: Candidate, other: Candidate) -> bool:
    return (
        one.seconds <= other.seconds
        and one.peak <= other.peak
        and (one.seconds, one.peak) != (other.seconds, other.peak)
    )


def _compiled(planned: list[Candidate], target: Target, count: int) -> list[Candidate]:
    """Asks the compiler about the fastest, until `count` fit by its count or it was asked about twice as many."""
    from trellis.plan.compile import compile_run
    from trellis.plan.verdict import judge

    fastest = sorted((c for c in planned if c.plan and c.plan.fits), key=lambda c: c.seconds)
    done, fit = {}, 0
    for candidate in fastest[: 2 * count]:
        try:
            prepared, compiled = compile_run(candidate.run, target, progress=True)
        except RuntimeError as error:  # there may be others that it takes
            why = str(error).splitlines()[0][:200]
            done[id(candidate)] = dataclasses.replace(candidate, plan=None, refused=why)
            continue
        done[id(candidate)] = dataclasses.replace(candidate, verdict=judge(candidate.plan, prepared, compiled))
        fit += compiled.fits
        if fit == count:
            break
    return [done.get(id(candidate), candidate) for candidate in planned]
