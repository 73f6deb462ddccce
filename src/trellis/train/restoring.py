"""Restores a run's model from its checkpoints, for its uses: evaluation, sampling, export."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trellis.checkpoints.checkpoints import Checkpoints
from trellis.checkpoints.manifest import finished_steps
from trellis.data import Tokenizer, load_tokenizer
from trellis.errors import UserError
from trellis.files import typed
from trellis.hub.folder import At, read_json
from trellis.nn.parameters import Parameter
from trellis.run.config import Run
from trellis.run.data import MixtureSource
from trellis.run.folder import IMPORTED, open_run
from trellis.run.layouts import LayoutChoice, MeshSizes
from trellis.train.assemble import Assembled
from trellis.train.corpus import Corpus, lacks_tokenizer, open_corpus
from trellis.train.state import TrainState


def open_checkpoint(folder: Path, step: int | None = None) -> tuple[Run, int | None]:
    """The run of a folder as it is at a checkpoint, and which one to restore.

    A run whose sequences become longer has the length and the rotary frequencies of the checkpoint's last step.

    Args:
        folder: the run's folder.
        step: the checkpoint of this step; None takes the newest.

    Raises:
        UserError: the folder is not a run's.
    """
    run = open_run(folder)
    if not run.lengths:
        return run, step
    if step is None:  # without looking at the devices, which `find_devices` must be the first to do
        step = max(finished_steps(folder / "checkpoints"), default=None)
    return run.at(max((step or 0) - 1, 0)), step


def restore_model(assembled: Assembled, folder: Path, *, step: int | None = None) -> tuple[TrainState, int]:
    """The parameters of a run on the devices of `assembled`, and the number of steps that they are after.

    The optimizer's state is left on disk. The run may still be training.

    Args:
        assembled: the run, on any devices.
        folder: the run's folder.
        step: the checkpoint of this step; None takes the newest that is whole.

    Raises:
        UserError: there is no checkpoint, or it does not fit.
    """
    abstract = assembled.abstract
    target = TrainState(abstract.step, abstract.model, None, abstract.average, abstract.key)
    with Checkpoints(folder / "checkpoints", read_only=True) as saved:
        found = saved.restore(target, step=step, partial=True, resizable={"vocab": assembled.run.model.vocab})
    if found is None:
        raise _no_checkpoint(folder)
    return found.state, found.step


def restore_step(abstract_step: Any, folder: Path, *, step: int | None = None) -> int:
    """Finds and verifies the checkpoint that `restore_model` would read, reading next to nothing into memory.

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
        "The run must have a checkpoint to take the model from.",
        seen="no checkpoint yet",
        where=str(folder / "checkpoints"),
        fix=f"train first: trellis train {typed(folder)}",
    )


def model_in_use(assembled: Assembled, state: TrainState) -> Any:
    """The model of a state as it is used: the moving average if there is one, in the type to compute in.

    No product is narrow: its scale would depend on all texts of a batch.
    """
    model = state.model if state.average is None else state.average
    return dataclasses.replace(assembled.options.precision, products={}, amax_history=0).in_use(model)


def for_use(run: Run, devices: int) -> Run:
    """The run as it is used rather than trained: whole on one device, or with its widths sliced over several."""
    choice = LayoutChoice(preset="tensor" if devices > 1 else "single")
    return dataclasses.replace(
        run, devices=devices, mesh=MeshSizes(data=1, model=devices), layout=choice, accumulation="pending"
    )


def corpus_of(run: Run, folder: Path, *, instead: str = "") -> Corpus:
    """What a run reads, for a command that has no option for its places.

    Args:
        run: the run.
        folder: its folder.
        instead: what else may be written into the run's file if a store is not there.

    Raises:
        UserError: a store is not where the run's file says, or `open_corpus` refuses it.
    """
    try:
        return open_corpus(run)
    except UserError as error:
        source = run.data.source
        parts = source.parts if isinstance(source, MixtureSource) else [source]
        named = [getattr(part, name, None) for part in parts for name in ("path", "validation")]
        if error.where not in named or "://" in error.where or Path(error.where).exists():
            raise
        file = typed(folder / "run.yaml")
        fix = f"start the command where this path leads to the store, or write the store's path into {file}{instead}"
        rule = "A run's token stores must be where its run.yaml says."
        raise UserError(rule, seen=error.seen, where=error.where, fix=fix) from error


def tokenizer_of(run: Run, folder: Path) -> Tokenizer | None:
    """The tokenizer that a run names, or that of its data; None if there is none, as for a model that was imported
    without one."""
    if (named := run.data.tokenizer) is None:
        return corpus_of(run, folder, instead=", or a tokenizer.json as its data.tokenizer").tokenizer
    return None if lacks_tokenizer(run) else load_tokenizer(named)


def imported_config(folder: Path) -> dict:
    """The `config.json` of the folder that a run was imported from; empty if it was not imported.

    Raises:
        UserError: it is not a JSON object.
    """
    return read_json(folder / IMPORTED) if (folder / IMPORTED).is_file() else {}


def generation_config(folder: Path, run: Run) -> dict:
    """What the folder of a run's tokenizer says about generating, as an imported one does; empty if it says nothing.
    The tokens at which texts begin and end may also be in an imported folder's `config.json`.

    Args:
        folder: the run's folder.
        run: the run.

    Raises:
        UserError: a file is not a JSON object.
    """
    file = None if run.data.tokenizer is None else Path(run.data.tokenizer) / "generation_config.json"
    imported = imported_config(folder)
    ends = {name: imported[name] for name in ("bos_token_id", "eos_token_id") if imported.get(name) is not None}
    return ends | (read_json(file) if file is not None and file.is_file() else {})


def checkpoint_reader(
    folder: Path, run: Run, abstract: Any, *, step: int | None = None
) -> tuple[int, Callable[[Parameter, At], np.ndarray]]:
    """The step of a checkpoint, and a function that reads its parameters, holding one layer at a time.

    Args:
        folder: the run's folder.
        run: the run. If it keeps a moving average of the parameters, that is read.
        abstract: the state on one device.
        step: the checkpoint of this step; None takes the newest that is whole.
    """
    taken = restore_step(abstract.step, folder, step=step)
    which = "model" if run.ema is None else "average"
    saved = Checkpoints(folder / "checkpoints", read_only=True)

    @functools.lru_cache(maxsize=1)
    def stored(path: str, layer: int | None = None) -> np.ndarray:
        return saved.read(taken, f"{which}.{path}", layer)

    def read(parameter: Parameter, at: At) -> np.ndarray:
        return stored(parameter.path, *at[:1])[at[1:]]  # a layer's experts are stored together

    return taken, read
