"""What narrow products gain on a target: compares a step's time with each of them made in bfloat16 instead."""

import dataclasses
from collections.abc import Callable, Sequence

from trellis.errors import UserError
from trellis.figures import numbers
from trellis.figures.text import aligned
from trellis.nn.precision import ProductKind
from trellis.plan.quick import Plan
from trellis.run.config import Run

HEADER = ("products", "in", "without it", "brings")
# The share of a step below which the time model cannot tell.
_NOTICEABLE = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Brought:
    """What one entry of `precision.products` gains.

    Attributes:
        part: the part of parameters' names.
        kind: the narrow type.
        seconds: the seconds of a step with it, by the plan.
        without: those of a step with these products in the type of computation.
        peak: bytes on one device at the highest point with it.
        peak_without: the same without it.
    """

    part: str
    kind: str
    seconds: float
    without: float
    peak: float
    peak_without: float

    @property
    def saves(self) -> float:
        """The share of a step's time that it saves; negative if a step takes longer with it."""
        return 1 - self.seconds / self.without

    @property
    def pays(self) -> bool:
        """Whether it saves a hundredth of a step."""
        return self.saves >= _NOTICEABLE

    def row(self) -> tuple[str, ...]:
        """The gain as a row of a table under `HEADER`."""
        words = "nothing"
        if self.pays:
            words = f"{self.saves:.0%} of the time"
        elif self.saves <= -_NOTICEABLE:
            words = f"{-self.saves:.0%} more time"
        if difference := numbers.size(abs(self.peak_without - self.peak)) if self.peak_without != self.peak else "":
            words += f", {difference} {'less' if self.peak < self.peak_without else 'more'} at the highest point"
        if not self.pays:
            words += f": leave --precision.products.{self.part} out"
        return (self.part, self.kind, numbers.seconds(self.without), words)


def brought(run: Run, plan: Plan, planned: Callable[[Run], Plan]) -> list[Brought]:
    """What each of a run's narrow products gains, found by leaving out each alone.

    Args:
        run: the run, of one length.
        plan: its plan.
        planned: plans a run on the same target.
    """
    found = []
    for part, kind in run.precision.products.items():
        others = {p: k for p, k in run.precision.products.items() if p != part}
        try:
            without = planned(_with_products(run, others, run.precision.amax_history))
        except UserError:  # no product that is left has a history of scales
            without = planned(_with_products(run, others, 0))
        found.append(Brought(part, kind, plan.seconds, without.seconds, plan.memory.peak, without.memory.peak))
    return found


def _with_products(run: Run, products: dict[str, ProductKind], history: int) -> Run:
    precision = dataclasses.replace(run.precision, products=products, amax_history=history)
    return dataclasses.replace(run, precision=precision)


def brought_text(found: Sequence[Brought]) -> str:
    """The same as a table."""
    return "narrow products\n" + aligned(HEADER, [each.row() for each in found], right=(2,))
