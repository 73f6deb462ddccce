"""`trellis export` and `trellis import`: runs to Hugging Face folders and back."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trellis.nn.parameters import Parameter

from ..errors import UserError
from ..hub import Folder, copy_tokenizer, write_folder, write_tokenizer
from ..hub.folder import DTYPE_NAMES, At
from .config import Run


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis export`."""
    parser.description = (
        "Writes a run's model as a folder that `transformers` loads: config.json, safetensors and the tokenizer. "
        "Weights are read and written one layer of a parameter at a time, whatever the size of the model."
    )
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPE_NAMES), default="bfloat16", help="of weights (default: bfloat16)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")


def run_export(args: argparse.Namespace) -> int:
    """`trellis export`."""
    from .assemble import assemble
    from .devices import choose_platform
    from .folder import open_run
    from .generating import in_use, tokenizer_of

    folder, to = Path(args.folder), Path(args.to)
    run = open_run(folder)
    choose_platform()
    assembled = assemble(in_use(run, 1), jax.devices("cpu")[:1])
    positions = getattr(run.model, "positions", run.data.sequence_length)
    chosen = run.data.tokenizer
    tokenizer = tokenizer_of(run)
    if tokenizer is None:
        print("without a tokenizer: the run's data holds none")
    end = None if tokenizer is None else tokenizer.end_of_document
    step, read = checkpoint_reader(folder, run, assembled.abstract, step=args.step)
    more = {"bos_token_id": end, "eos_token_id": end}
    model = assembled.abstract.model
    files = write_folder(to, run.model, model, read, dtype=args.dtype, positions=positions, more=more)
    if chosen is not None and Path(chosen).is_dir():
        files += copy_tokenizer(sorted(Path(chosen).iterdir()), to)
    elif tokenizer is not None:
        files += write_tokenizer(tokenizer.json, tokenizer.end_of_document_text, to, positions=positions)
    print(f"step {step} of {folder}")
    for file in files:
        print(f"  {file.stat().st_size:>14,}  {file}")
    return 0


def checkpoint_reader(
    folder: Path, run: Run, abstract: Any, *, step: int | None = None
) -> tuple[int, Callable[[Parameter, At], np.ndarray]]:
    """A function that reads a run's parameters, holding one layer at a time, and the step they are of.

    Args:
        folder: the run's folder.
        run: the run. Where it keeps a moving average of the parameters, that is read.
        abstract: the state on one device.
        step: the checkpoint of this step; None takes the newest that is whole.
    """
    from .checkpoint import Checkpoints
    from .restoring import restore_step

    taken = restore_step(abstract.step, folder, step=step)
    which = "model" if run.ema is None else "average"
    saved = Checkpoints(folder / "checkpoints", read_only=True)

    @functools.lru_cache(maxsize=1)
    def stored(path: str, layer: int | None = None) -> np.ndarray:
        return saved.read(taken, f"{which}/{path.replace('.', '/')}", layer)

    def read(parameter: Parameter, at: At) -> np.ndarray:
        return stored(parameter.path, *at[:1])[at[1:]]  # a layer's experts are stored together

    return taken, read


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis import`."""
    parser.description = (
        "Makes a run of a Hugging Face folder: its model and tokenizer, at step 0 of a recipe (default: starter). "
        "`trellis generate`, `evaluate` and `train` take it from there. To train it further, name data that its own "
        "tokenizer made: --data.source store --data.source.path STORE."
    )
    parser.add_argument("source", metavar="DIR", help="the folder, as `save_pretrained` writes it")
    parser.add_argument("--to", metavar="RUN", help="the run's folder (default: runs/NAME-DATE)")


def run_import(args: argparse.Namespace) -> int:
    """`trellis import`."""
    from .assemble import assemble
    from .checkpoint import Checkpoints
    from .devices import find_devices
    from .folder import claim, new_folder

    source = Folder(args.source)
    files = source.tokenizer_files()
    name = source.path.resolve().name
    run = dataclasses.replace(args.run, name=name, model=source.config)
    folder = Path(args.to) if args.to else new_folder(run)
    if any(file.name == "tokenizer.json" for file in files):
        tokenizer = str((folder / "tokenizer").resolve())
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=tokenizer))
    devices = find_devices(run)
    if (folder / "run.yaml").exists():
        fix = "give another --to, or remove what is there"
        raise UserError("An import makes a new run.", seen="a run", where=str(folder), fix=fix)
    assembled = assemble(run, devices)
    state = _first_state(assembled, source)
    claim(folder, run)
    copy_tokenizer(files, folder / "tokenizer")
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(state.model))
    with Checkpoints(folder / "checkpoints", copy=(folder / "run.yaml",), host_bytes=largest) as saved:
        saved.save(0, state, data={"tokens": 0})
    count = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    print(f"{source.hub['model_type']} of {count:,} parameters\nfolder   {folder}")
    if run.data.tokenizer is None:
        print("without a tokenizer: there is no tokenizer.json")
    return 0


def _first_state(assembled: Any, source: Folder) -> Any:
    """A run's state at step 0 with the folder's parameters."""
    from .state import State

    abstract = assembled.abstract
    model = source.load(abstract.model)
    with assembled.layout:
        shardings = jax.tree.map(lambda x: x.sharding, abstract.optimizer)
        optimizer = jax.jit(assembled.optimizer.init, out_shardings=shardings)(model)
        step = jax.device_put(np.int32(0), abstract.step.sharding)
        key = jax.device_put(jax.random.key(assembled.run.seed), abstract.key.sharding)
        average = None if abstract.average is None else jax.tree.map(lambda x: x.copy(), model)
    return State(step, model, optimizer, average, key)
