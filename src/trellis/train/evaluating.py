"""`trellis evaluate`."""

import argparse
import dataclasses
import json
from pathlib import Path

from ..errors import UserError
from .assemble import Assembled, assemble
from .compilation import use_persistent_cache
from .config import Evaluation as EvaluationRule
from .config import Run
from .corpus import open_corpus
from .devices import find_devices
from .evaluation import Evaluation
from .folder import open_run
from .layouts import MeshSizes
from .restoring import restore_model
from .state import State


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis evaluate`."""
    parser.description = "Loss, perplexity and bits per byte of a run's newest checkpoint on its validation text."
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--devices", type=int, metavar="N", help="use N devices (default: the mesh of the run)")
    parser.add_argument("--batches", type=int, metavar="N", help="validation batches (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_evaluate(args: argparse.Namespace) -> int:
    """`trellis evaluate`."""
    assembled, state, step = _open(args)
    run = dataclasses.replace(assembled.run, evaluation=EvaluationRule(every=None, batches=args.batches))
    corpus = open_corpus(run)
    if not corpus.validation:
        raise UserError(
            "An evaluation needs validation text.",
            seen="a run without a validation store",
            where=args.folder,
            fix="name one in the run's data, with `validation:`",
        )
    with assembled.layout:
        evaluation = Evaluation(corpus.validation, assembled.recipe, assembled.batch_sharding, assembled.fields)
        values = {name: float(value) for name, value in evaluation(state).items()}
    if args.json:
        print(json.dumps({"step": step, **values}))
        return 0
    print(f"step {step}")
    for name, value in values.items():
        print(f"{name:<32} {value:.4f}")
    return 0


def _open(args: argparse.Namespace) -> tuple[Assembled, State, int]:
    """A run's newest model on the devices here: those of its own mesh, or so many in one row."""
    folder = Path(args.folder)
    run = open_run(folder)
    if args.devices is not None:
        run = _on(run, args.devices)
    use_persistent_cache()
    assembled = assemble(run, find_devices(run))
    state, step = restore_model(assembled, folder, step=args.step)
    return assembled, state, step


def _on(run: Run, devices: int) -> Run:
    layout = dataclasses.replace(run.layout, preset="single" if devices == 1 else "auto", params={}, compute={})
    return dataclasses.replace(run, devices=devices, mesh=MeshSizes(), layout=layout)
