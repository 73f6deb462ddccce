"""A run's model back from its checkpoints, for whoever uses it: evaluation, sampling, export."""

from pathlib import Path

from ..errors import UserError
from .assemble import Assembled
from .checkpoint import Checkpoints
from .state import State


def restore_model(assembled: Assembled, folder: Path, *, step: int | None = None) -> tuple[State, int]:
    """The parameters of a run on the devices of `assembled`, and after how many steps.

    The optimizer's state is left on disk. The run may be training meanwhile.

    Args:
        assembled: the run, on any devices.
        folder: the run's folder.
        step: the checkpoint of this step; None takes the newest that is whole.

    Raises:
        UserError: there is no checkpoint, or it does not fit.
    """
    abstract = assembled.abstract
    target = State(abstract.step, abstract.model, None, abstract.average, abstract.key)
    with Checkpoints(folder / "checkpoints", read_only=True) as saved:
        found = saved.restore(target, step=step, partial=True, resizable={"vocab": assembled.run.model.vocab})
    if found is None:
        raise UserError(
            "A model comes from a checkpoint.",
            seen="no checkpoint yet",
            where=str(folder / "checkpoints"),
            fix=f"train first: trellis train {folder / 'run.yaml'} --run-dir {folder}",
        )
    return found.state, found.step
