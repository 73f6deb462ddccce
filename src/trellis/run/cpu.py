"""What a run says about the CPU that it trains on."""

import dataclasses
from typing import Literal

from trellis.choices import check_choices
from trellis.named.tuned import Tuned
from trellis.run.schema import at_least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """What is faster on one CPU and slower on another. None of it has an effect on accelerators."""

    measure: bool = True
    """Measure what the run leaves open (null here, in microbatches and in devices) before the first long run on a
    machine. The result is kept for later runs, and written to run.yaml. Set it to false to use what was found
    elsewhere."""
    attention_chunk: int | None = None
    """Queries of attention that are computed at a time; null measures it, or takes 128. Set it to compare."""
    loss_chunk: int | None = None
    """Tokens of the loss that are computed at a time; null measures it, or takes 512. Set it to compare."""
    turned: Literal["narrower", "none"] | None = None
    """The operand of a weight gradient's product that is first copied transposed; null measures it, or takes narrower.
    Set it to compare."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, attention_chunk=self.attention_chunk, loss_chunk=self.loss_chunk)

    @property
    def tuned(self) -> Tuned:
        """The same, with null replaced by what was found on other machines."""
        return Tuned(self.attention_chunk, self.loss_chunk, self.turned or "narrower")
