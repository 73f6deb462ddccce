"""`trellis evaluate`."""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.commands.command import Command, check_counts, whole
from trellis.errors import UserError

if TYPE_CHECKING:
    from trellis.run.config import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis evaluate`."""
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--step", type=whole(), metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--devices", type=whole(), metavar="N", help="use N devices (default: the mesh of the run)")
    parser.add_argument("--batches", type=whole(), metavar="N", help="validation batches (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """`trellis evaluate`."""
    from trellis.train.assemble import assemble
    from trellis.train.compilation import use_persistent_cache
    from trellis.train.devices import find_devices
    from trellis.train.evaluation import Evaluator
    from trellis.train.restoring import corpus_of, open_checkpoint, restore_model

    check_counts(args, "devices", "batches")
    folder = Path(args.folder)
    run, chosen = open_checkpoint(folder, args.step)
    run = run if args.devices is None else _in_one_row(run, args.devices)
    reported = run.evaluation
    run = dataclasses.replace(run, evaluation=dataclasses.replace(reported, batches=args.batches))
    use_persistent_cache()
    devices = find_devices(run)
    try:
        assembled = assemble(run, devices)
    except UserError as error:  # the run is trained, and cannot be changed
        fix = "use --devices 1, or a number that divides it"
        where = error.where if args.devices is None else "--devices"
        raise UserError(error.rule, seen=error.seen, where=where, fix=fix) from None
    corpus = corpus_of(run, folder)
    if not corpus.validation:
        raise UserError(
            "An evaluation needs validation text.",
            seen="a run without a validation store",
            where=args.folder,
            fix="name one in the run's data, as `validation:`",
        )
    state, step = restore_model(assembled, folder, step=chosen)
    with assembled.layout:
        evaluate = Evaluator(corpus.validation, assembled.options, assembled.batch_sharding)
        values = {name: float(value) for name, value in evaluate(state).items()}
    limits = (args.batches, reported.batches, None)
    used, theirs, whole = (sum(s._replace(limit=n).num_batches for s in corpus.validation.values()) for n in limits)
    if args.json:
        print(_as_json(step, used, values))
        return 0
    print(f"step {step}, {_words(used, theirs, whole)}")
    for name, value in values.items():
        print(f"{name:<32} {value:.4f}")
    return 0


def _in_one_row(run: "Run", devices: int) -> "Run":
    """A run over this many devices in one row, without what its mesh had decided: how steps are cut and placed."""
    from trellis.run.layouts import LayoutChoice, MeshSizes

    layout = LayoutChoice(preset="single" if devices == 1 else "auto", mode=run.layout.mode)
    steps = {"microbatches": None, "accumulation": "pending"}
    return dataclasses.replace(run, devices=devices, mesh=MeshSizes(), layout=layout, **steps)


def _as_json(step: int, batches: int, values: Mapping[str, float]) -> str:
    """One object. A number that is not known is null, such as bits a byte if a store does not know its text."""
    known = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step, "batches": batches, **known})


def _words(used: int, reported: int, whole: int) -> str:
    """How many batches these figures are for, and the run's own figures, if that number differs."""
    of = lambda batches: f"all {batches}" if batches == whole else f"{batches} of {whole}"
    words = f"{of(used)} batches of validation text"
    return words if used == reported else f"{words}; the run's own figures are for {of(reported)}"


COMMAND = Command(
    name="evaluate",
    summary="measure the loss, perplexity and bits per byte of a run",
    description="Measures loss, perplexity and bits per byte of a run's newest checkpoint on its validation text.",
    arguments=arguments,
    execute=execute,
)
