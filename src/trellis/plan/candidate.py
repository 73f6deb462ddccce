"""Variants of a run that a search considers, and which of them are worth a plan."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trellis.hardware.chips import Target
from trellis.inspect.work import STACKED
from trellis.plan.quick import Plan
from trellis.plan.sketch import Sketch
from trellis.run.config import Run

# The share of a device's memory within which a variant surely fits, if it was not planned but a similar one was.
_ROOM = 0.9
# The share of a step that a loop's copies must take for a plan without them: what is written out is to be that faster.
_COPIES = 0.01


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One variant of a run.

    Attributes:
        run: the variant.
        options: what differs, as command line options.
        sketch: rough figures.
        plan: the plan from types; None if it was not among the best, or could not be planned.
        refused: why it has no plan.
        too_large: whether that is because steps of another length need more memory than there is.
        verdict: the compiler's view, if it was asked.
    """

    run: Run
    options: Mapping[str, str]
    sketch: Sketch
    plan: Plan | None = None
    refused: str = ""
    too_large: bool = False
    verdict: Any = None

    @property
    def seconds(self) -> float:
        """The best known time of a step."""
        if self.verdict is not None and self.verdict.seconds is not None:
            return self.verdict.seconds
        return self.plan.seconds if self.plan else self.sketch.seconds

    @property
    def speed(self) -> float:
        """Tokens a second over all devices in that time; 0.0 if it was not planned."""
        return self.plan.tokens / self.seconds if self.plan else 0.0

    @property
    def mfu(self) -> float:
        """The MFU in that time; 0.0 if it was not planned."""
        return self.plan.mfu * self.plan.seconds / self.seconds if self.plan else 0.0

    @property
    def peak(self) -> float:
        """The best known memory of a device."""
        if self.verdict is not None:
            return self.verdict.compiled.peak
        return self.plan.memory.peak if self.plan else self.sketch.peak

    @property
    def fits(self) -> bool:
        """Whether it fits, by the best known figure."""
        if self.verdict is not None:
            return self.verdict.compiled.fits
        return bool(self.plan and self.plan.fits)

    def words(self) -> str:
        """The options as text to paste."""
        return " ".join(f"--{name} {shlex.quote(value)}" for name, value in self.options.items())

    @property
    def layout(self) -> str:
        """The preset, how attention reaches keys of other slices, how layers are dealt out to stages, and whether they
        are written out."""
        layout, mesh = self.run.layout, self.run.mesh
        kinds: list[str] = [layout.preset, *[layout.context] * (mesh.context > 1)]
        if mesh.stage > 1:
            kinds += [f"{layout.pipeline_groups} groups"] * (layout.pipeline_groups > 1)
            kinds += [self.run.accumulation] * (self.run.accumulation != "pending")
        kinds += ["written out"] * (self.run.scan_layers is False)
        return ", ".join(kinds)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes along which there are several devices, and how many."""
        return {axis: size for axis, size in dataclasses.asdict(self.run.mesh).items() if size > 1}

    @property
    def parts(self) -> int:
        """The number of parts that a batch is cut into."""
        return self.run.layout.pipeline_microbatches or self.run.parts

    @property
    def keeps(self) -> str:
        """What is kept for the backward pass, in words."""
        remat = self.run.remat
        return f"{remat.policy}: {', '.join(remat.names)}" if remat.names else remat.policy


def promising(sketched: list[Candidate], target: Target, most: int) -> Iterator[Candidate]:
    """The candidates worth tracing: the best of each kind of parallelism first, then the fastest of all.

    A sketch's memory is off by a fifth or so. So for each kind and checkpoint policy, with one microbatch and with
    more, both the fastest that surely fits and the fastest that may fit are taken.
    """
    room = target.chip.hbm_bytes
    chosen: dict[tuple, Candidate] = {}
    for c in sorted(sketched, key=lambda c: c.sketch.seconds):
        for share in (0.75, 1.2):
            if c.sketch.peak <= share * room:
                chosen.setdefault((_kind(c), c.run.remat, c.parts == 1, share), c)
    able = sorted({id(c): c for c in chosen.values()}.values(), key=lambda c: c.sketch.seconds)
    if not able:  # nothing fits: shows how far off the smallest are
        yield from sorted(sketched, key=lambda c: c.sketch.peak)[: min(most, 6)]
        return
    plain, staged = ([c for c in able if (c.run.mesh.stage > 1) == several] for several in (False, True))
    staged = _firsts(staged, room)[: most // 6 if plain else most]
    first = _firsts(plain, room)[: most // 2]
    rest = [c for c in plain if not any(c is f for f in first)]
    yield from (first + rest)[: most - len(staged)]
    yield from staged


def _firsts(candidates: list[Candidate], room: float) -> list[Candidate]:
    """The first that surely fits, of each kind of parallelism."""
    firsts: dict[tuple, Candidate] = {}
    for c in candidates:
        if c.sketch.peak <= 0.75 * room:
            firsts.setdefault(_kind(c)[1:], c)
    return list(firsts.values())


def _kind(candidate: Candidate) -> tuple:
    mesh = candidate.run.mesh
    layout = candidate.run.layout
    return layout.context, mesh.model, mesh.context, mesh.replica, mesh.expert, mesh.expert_y, mesh.stage, layout.preset


def writes_out(run: Run) -> bool:
    """Whether a search tries a run also with layers that are written out, where a loop copies what products and kernels
    make for the backward pass: unless the user asks for a loop, or layers are dealt out to stages."""
    return run.mesh.stage == 1 and run.scan_layers is not True


def written_out(planned: Sequence[Candidate], target: Target, written: Run) -> list[Candidate]:
    """The two fastest that surely fit and of which a hundredth of the step is a loop's copies, with layers that are
    written out. They have no plan yet.

    Args:
        planned: the candidates with their plans, or why there is none.
        target: the hardware.
        written: the run as the user wrote it.
    """
    done = [c.run for c in planned if c.run.scan_layers is False]
    able = [c for c in planned if c.plan is not None and c.peak <= _ROOM * target.chip.hbm_bytes]
    able = [c for c in able if c.run.scan_layers is None and writes_out(c.run)]
    # Of dense layers written out on TPUs, those whose slices of keys travel were not held against their compiler.
    sure = lambda c: target.chip.kind != "tpu" or c.run.model.experts > 1 or c.run.mesh.context == 1
    able = [c for c in able if sure(c) and c.plan.alone(STACKED) > _COPIES * c.seconds]
    found = []
    for c in sorted(able, key=lambda c: c.seconds)[:2]:
        run = dataclasses.replace(c.run, scan_layers=False)
        options = {name: value for name, value in c.options.items() if name != "scan_layers"}
        options |= {} if written.scan_layers is False else {"scan_layers": "false"}
        found += [dataclasses.replace(c, run=run, options=options, plan=None)] if run not in done else []
    return found


def with_less_kept(planned: Sequence[Candidate], sketched: Sequence[Candidate], target: Target) -> Candidate | None:
    """The next candidate worth a plan once others have theirs: one that would be the fastest but does not fit, on the
    same mesh and layout with other checkpointing or microbatches. None if none promises to be faster than what fits.

    A variant's time and memory are its sketch's, corrected by how far the sketch of the planned one was off.

    Args:
        planned: the candidates with their plans, or why there is none.
        sketched: all variants.
        target: the hardware.
    """
    room = _ROOM * target.chip.hbm_bytes
    known = [c for c in planned if c.plan is not None]
    least = min((c.seconds for c in known if c.peak <= room), default=float("inf"))
    tried, found = {id(c.run) for c in planned}, []
    for like in (c for c in known if c.seconds < least and c.peak > room):
        slower, larger = like.seconds / like.sketch.seconds, like.peak / like.sketch.peak
        for c in (c for c in sketched if _kind(c) == _kind(like) and id(c.run) not in tried):
            if c.sketch.peak * larger <= room and c.sketch.seconds * slower < least:
                found.append((c.sketch.seconds * slower, c))
    return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]
