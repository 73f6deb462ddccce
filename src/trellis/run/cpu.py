"""What a run says of the CPU that it trains on."""

import dataclasses
from typing import Literal

from trellis.named.tuned import Tuned
from trellis.run.schema import at_least


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """What is faster on one CPU and slower on another. On accelerators nothing of it has an effect."""

    measure: bool = True
    """Measure what the run leaves open (null here, in microbatches and in devices) before the first long run on a
    machine. It is kept for later ones, and written into run.yaml. Set it to false for what was found elsewhere."""
    attention_chunk: int | None = None
    """Queries of attention that are computed at a time; null is measured, or 128. Set it to compare."""
    loss_chunk: int | None = None
    """Tokens of the loss that are computed at a time; null is measured, or 512. Set it to compare."""
    turned: Literal["narrower", "none"] | None = None
    """Which operand of a weight gradient's product is copied transposed first; null is measured, or narrower. Set it to
    compare."""

    def __post_init__(self):
        at_least(1, attention_chunk=self.attention_chunk, loss_chunk=self.loss_chunk)

    @property
    def tuned(self) -> Tuned:
        """The same, with what was found on other machines for what is null."""
        return Tuned(self.attention_chunk, self.loss_chunk, self.turned or "narrower")
