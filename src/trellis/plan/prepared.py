"""A run's train step, ready to be traced or compiled, on devices that need not be here."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from trellis._compat import cudnn_assumed
from trellis.hardware.chips import Target
from trellis.mesh import Layout
from trellis.plan.links import check_tiles
from trellis.program import Program, trace
from trellis.run.config import Run
from trellis.train.assemble import assemble


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run's train step with abstract arguments.

    Attributes:
        run: the run whose step it is.
        layout: its mesh and maps.
        step: the jitted step, its state donated.
        state: `jax.ShapeDtypeStruct`s with shardings.
        batch: likewise.
        tokens: the tokens of a step.
        parts: the microbatches of a step.
    """

    run: Run
    layout: Layout
    step: Any
    state: Any
    batch: Any
    tokens: int
    parts: int

    def traced(self) -> Program:
        """The step as a program."""
        with self.layout, cudnn_assumed():
            return trace(self.step, self.state, self.batch)

    def lowered(self, platform: str) -> Any:
        """The step as `jax.stages.Lowered`, for the platform of its devices by JAX's name."""
        with self.layout, cudnn_assumed():
            return self.step.trace(self.state, self.batch).lower(lowering_platforms=(platform,))


def prepare(run: Run, target: Target, devices: Sequence[Any], *, chunk_bytes: int | None = None) -> Prepared:
    """The train step of a run on a target's devices.

    Args:
        run: the run; its largest batch is planned for, and the longest of several sequence lengths.
        target: the hardware that the devices are, for messages.
        devices: real ones, a compiler's, or described ones.
        chunk_bytes: those of the loss, as in `assemble`.

    Raises:
        UserError: the mesh does not fill the target, or the batch or a width does not divide.
    """
    run = max((phase.run for phase in run.phases()), key=lambda r: r.data.sequence_length)
    given = {name: size for name, size in dataclasses.asdict(run.mesh).items() if size != 1}
    if -1 not in given.values():
        check_tiles(given or {"data": 1}, target)
    made = assemble(run, devices, chunk_bytes=chunk_bytes)
    batch = made.abstract_batch(made.largest)
    tokens = batch.tokens.size
    return Prepared(run, made.layout, made.step, made.abstract, batch, tokens, made.options.microbatches)
