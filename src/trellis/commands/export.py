"""`trellis export`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.commands.command import Command, some_path, whole
from trellis.errors import UserError

if TYPE_CHECKING:
    from trellis.run.config import Run


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis export`."""
    from trellis.hub.folder import DTYPE_NAMES

    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--to", type=some_path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPE_NAMES), default="bfloat16", help="the dtype of the weights (default: bfloat16)"
    )
    parser.add_argument(
        "--positions",
        type=whole(),
        metavar="N",
        help="the longest sequence, for config.json (default: that of the run)",
    )
    parser.add_argument("--step", type=whole(), metavar="N", help="the checkpoint of this step (default: the newest)")


def execute(args: argparse.Namespace) -> int:
    """`trellis export`."""
    from trellis.hardware.platform import choose_platform, devices_of_jax
    from trellis.hub import copy_tokenizer, write_folder, write_tokenizer
    from trellis.models import FAMILIES
    from trellis.train.assemble import assemble
    from trellis.train.restoring import (
        checkpoint_reader,
        for_use,
        generation_config,
        imported_config,
        open_checkpoint,
        tokenizer_of,
    )

    folder, to = Path(args.folder), Path(args.to)
    run, at = open_checkpoint(folder, args.step)
    choose_platform()
    assembled = assemble(for_use(run, 1), devices_of_jax("cpu")[:1])
    positions = _positions(run, args.positions)
    chosen = run.data.tokenizer
    tokenizer = tokenizer_of(run, folder)
    if tokenizer is None:
        print("no tokenizer: the run's data has none")
    step, read = checkpoint_reader(folder, run, assembled.abstract, step=at)
    theirs, end = generation_config(folder, run), None if tokenizer is None else tokenizer.end_of_document
    more = {name: theirs.get(name, end) for name in ("bos_token_id", "eos_token_id")}  # at which a text begins and ends
    family, model = FAMILIES[run.model.family], assembled.abstract.model
    if imported := imported_config(folder):
        more |= family.dropped_in(dict.fromkeys(family.dropped, 0.0) | imported)
        if (padding := imported.get("pad_token_id")) is not None:
            more["pad_token_id"] = padding
    files = write_folder(to, family, run.model, model, read, dtype=args.dtype, positions=positions, more=more)
    if chosen is not None and Path(chosen).is_dir():
        files += copy_tokenizer(Path(chosen), to)
    elif tokenizer is not None:
        files += write_tokenizer(tokenizer.json, tokenizer.end_of_document_text, to, positions=positions)
    if tokenizer is not None and tokenizer.around and (step or not imported):
        names = " and ".join(tokenizer.around)
        print(f"trained without the {names} that `transformers` puts around a text: use add_special_tokens=False")
    print(f"step {step} of {folder}")
    for file in files:
        print(f"  {file.stat().st_size:>14,}  {file}")
    return 0


def _positions(run: "Run", asked: int | None) -> int:
    """The longest sequence for `config.json`: programs that load it refuse longer ones."""
    from trellis.nn import YarnScaling

    own = run.model.positions
    if isinstance(scaling := getattr(run.model, "rope_scaling", None), YarnScaling):
        own = round(scaling.factor * scaling.original_context)
    if asked is not None and (asked < 1 or own not in (None, asked)):
        rule = "The number of positions must be 1 or more, or the model's own if it has learned positions or YaRN."
        seen = f"--positions {asked}" + ("" if own is None else f" of a model with {own}")
        raise UserError(rule, seen=seen, where="--positions", fix="leave it out" if own else "use 1 or more")
    return own or asked or run.data.sequence_length


COMMAND = Command(
    name="export",
    summary="export a run to a Hugging Face folder",
    description=(
        "Writes a run's model as a folder that `transformers` loads: config.json, safetensors and the tokenizer. "
        "Weights are read and written one layer of a parameter at a time, however large the model is. A model that "
        "was imported for longer sequences than it is trained on keeps them with --positions."
    ),
    arguments=arguments,
    execute=execute,
)
