"""Plans of a run whose sequences become longer: one for each length, side by side."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.plan.quick import Plan
from trellis.run.config import Run
from trellis.run.lengths import Phase, as_of_phase

PHASES, RIGHT = ("steps", "sequences", "memory", "fits", "a step", "MFU", "all of them"), (2, 4, 5, 6)


class PhasePlan(NamedTuple):
    """A phase of a run, and its plan.

    Attributes:
        phase: the phase.
        plan: the plan of its largest batch.
        of_sizes: the seconds of a step of each of its smaller batches, by size; those that it lacks take as long as
            the largest.
    """

    phase: Phase
    plan: Plan
    of_sizes: Mapping[int, float]

    @property
    def seconds(self) -> float:
        """The seconds of all its steps."""
        sizes = self.phase.run.batch_sizes()
        starts = [self.phase.start, *(entry.step for entry in sizes[1:])]
        of_size = [self.of_sizes.get(entry.size, self.plan.seconds) for entry in sizes]
        steps = [end - start for start, end in zip(starts, (*starts[1:], self.phase.stop), strict=True)]
        return sum(count * seconds for count, seconds in zip(steps, of_size, strict=True))


def plan_phases(run: Run, planned: Callable[[Run], Plan], *, every_size: bool = False) -> list[PhasePlan]:
    """The plan of each phase of a run; a run of one length has one phase.

    Args:
        run: the run.
        planned: plans a run of one length.
        every_size: whether to plan each size of a batch that grows within a phase, for the seconds of its steps.

    Raises:
        UserError: a phase cannot be planned, for example because the mesh does not divide its length.
    """
    found = []
    for phase in run.phases():
        with as_of_phase(phase.start):
            plan = planned(phase.run)
            found.append(PhasePlan(phase, plan, _of_sizes(phase.run, planned) if every_size and run.lengths else {}))
    return found


def _of_sizes(run: Run, planned: Callable[[Run], Plan]) -> dict[int, float]:
    """The seconds of a step of each batch of a phase but its largest."""
    sizes = sorted({entry.size for entry in run.batch_sizes()})
    return {size: planned(dataclasses.replace(run, batch_size=size)).seconds for size in sizes[:-1]}


def fullest(plans: Sequence[PhasePlan]) -> PhasePlan:
    """The phase that needs the most memory: if it fits, the run does."""
    return max(plans, key=lambda p: p.plan.memory.peak)


def phases_text(plans: Sequence[PhasePlan]) -> str:
    """A line for each phase, and how long the run takes."""
    return "\n".join([about_phases(plans), aligned(PHASES, phases_rows(plans), right=RIGHT), about_fullest(plans)])


def phases_rows(plans: Sequence[PhasePlan]) -> list[tuple[str, ...]]:
    """The columns `PHASES` of each phase."""
    rows = []
    for each in plans:
        phase, plan = each.phase, each.plan
        length = phase.run.data.sequence_length
        sizes = " then ".join(f"{entry.size:,}" for entry in phase.run.batch_sizes())
        rows.append(
            (
                f"{phase.start + 1:,} to {phase.stop:,}",
                f"{sizes} x {length:,}",
                numbers.size(plan.memory.peak),
                "yes" if plan.fits else "NO",
                numbers.seconds(plan.seconds),
                f"{plan.mfu:.1%}",
                numbers.duration(each.seconds),
            )
        )
    return rows


def about_phases(plans: Sequence[PhasePlan]) -> str:
    """Whether a run fits in all phases, and how long it takes."""
    whole = "all lengths fit" if fullest(plans).plan.fits else "the run DOES NOT FIT"
    return f"lengths of sequences: {whole}; {numbers.duration(sum(p.seconds for p in plans))} of steps"


def about_fullest(plans: Sequence[PhasePlan]) -> str:
    """Which phase the rest of a plan is about."""
    phase = fullest(plans).phase
    return f"what follows is for steps {phase.start + 1:,} to {phase.stop:,}, which need the most memory"


def phases_json(plans: Sequence[PhasePlan]) -> list[dict[str, Any]]:
    """The same as plain values; seconds and bytes."""
    return [
        {
            "step": p.phase.start,
            "stop": p.phase.stop,
            "length": p.phase.run.data.sequence_length,
            "batch_sizes": [entry.size for entry in p.phase.run.batch_sizes()],
            "peak": p.plan.memory.peak,
            "fits": p.plan.fits,
            "step_seconds": p.plan.seconds,
            "mfu": p.plan.mfu,
            "seconds": p.seconds,
        }
        for p in plans
    ]
