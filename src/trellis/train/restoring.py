"""A run's model back from its checkpoints, for whoever uses it: evaluation, sampling, export."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from .assemble import Assembled
from .checkpoint import Checkpoints
from .state import State, cast


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
        raise _no_checkpoint(folder)
    return found.state, found.step


def restore_step(abstract_step: Any, folder: Path, *, step: int | None = None) -> int:
    """Finds the checkpoint that `restore_model` would read, and verifies it, reading next to nothing into memory.

    Args:
        abstract_step: the state's count of steps as a `jax.ShapeDtypeStruct`.
        folder: the run's folder.
        step: the checkpoint of this step; None takes the newest that is whole.

    Raises:
        UserError: there is no checkpoint.
    """
    with Checkpoints(folder / "checkpoints", read_only=True) as saved:
        found = saved.restore({"step": abstract_step}, step=step, partial=True)
    if found is None:
        raise _no_checkpoint(folder)
    return found.step


def _no_checkpoint(folder: Path) -> UserError:
    return UserError(
        "A model comes from a checkpoint.",
        seen="no checkpoint yet",
        where=str(folder / "checkpoints"),
        fix=f"train first: trellis train {folder / 'run.yaml'} --run-dir {folder}",
    )


def model_in_use(assembled: Assembled, state: State) -> Any:
    """The model of a state as it is used: the moving average where there is one, in the type to compute in."""
    model = state.model if state.average is None else state.average
    return cast(model, assembled.recipe.compute, assembled.recipe.exceptions)
