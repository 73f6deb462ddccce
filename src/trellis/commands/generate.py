"""`trellis generate`."""

import argparse
from pathlib import Path

from trellis.commands.command import Command, check_counts, whole
from trellis.errors import UserError
from trellis.files import check_utf8


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis generate`."""
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="the beginning of the text; special tokens written out are those tokens",
    )
    parser.add_argument("--tokens", type=whole(), default=200, metavar="N", help="the most new tokens (default: 200)")
    parser.add_argument("--samples", type=whole(), default=1, metavar="N", help="the number of texts (default: 1)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the most likely token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k",
        type=whole(),
        metavar="K",
        help="choose from the K most likely tokens, or all if fewer (default: all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="choose from the most likely tokens of total probability P (default: all)",
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="the seed of the choices (default: 0)")
    parser.add_argument("--step", type=whole(), metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--devices", type=whole(), default=1, metavar="N", help="devices to slice the model over (default: 1)"
    )


def execute(args: argparse.Namespace) -> int:
    """`trellis generate`."""
    from trellis.models.generate import Sampling, check_tokens, sample
    from trellis.train.assemble import assemble
    from trellis.train.compilation import use_persistent_cache
    from trellis.train.devices import find_devices
    from trellis.train.restoring import (
        for_use,
        generation_config,
        model_in_use,
        open_checkpoint,
        restore_model,
        tokenizer_of,
    )

    folder = Path(args.folder)
    check_counts(args, "tokens", "samples", "devices", "top-k")
    check_utf8(args.prompt, "A prompt must be valid UTF-8.", "--prompt")
    if args.temperature == 0:
        given = {"top-k": args.top_k, "top-p": args.top_p, "samples": args.samples if args.samples > 1 else None}
        for name, value in given.items():
            if value is not None:
                rule = "With temperature 0, the most likely of all tokens is taken, and all texts are the same."
                seen, fix = f"{name}={value}, temperature=0: it has no effect", "leave it out, or use --temperature 0.8"
                raise UserError(rule, seen=seen, where=f"--{name}", fix=fix)
    try:
        sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    except UserError as error:
        where = f"--{error.where.replace('_', '-')}"
        raise UserError(error.rule, seen=error.seen, where=where, fix=error.fix) from None
    run, step = open_checkpoint(folder, args.step)
    run = for_use(run, args.devices)
    use_persistent_cache()
    try:
        assembled = assemble(run, find_devices(run))
    except UserError as error:
        if args.devices == 1 or not error.where.startswith("model."):
            raise
        fix = "use --devices 1, or a number that divides it"  # the model is trained, and cannot be changed
        raise UserError(error.rule, seen=error.seen, where="--devices", fix=fix) from None
    tokenizer = tokenizer_of(run, folder)
    if tokenizer is None:
        raise UserError(
            "Generating text needs a tokenizer.",
            seen="a token store without one" if run.data.tokenizer is None else f"none in {run.data.tokenizer}",
            where=str(folder / "run.yaml"),
            fix="set data.tokenizer there to a tokenizer.json"
            + ("" if run.data.tokenizer is None else ", or put the model's own in that folder"),
        )
    asked = tokenizer.encode_markup(args.prompt) if args.prompt else [tokenizer.end_of_document]
    check_tokens(asked, run.model.vocab, "--prompt")
    state, _ = restore_model(assembled, folder, step=step)
    how = {"new_tokens": args.tokens, "sampling": sampling, "seed": args.seed, "count": args.samples}
    theirs = generation_config(folder, run).get("eos_token_id")
    how["ends"] = [end for end in (theirs if isinstance(theirs, list) else [theirs]) if type(end) is int]
    with assembled.layout:
        texts = sample(model_in_use(assembled, state), tokenizer, args.prompt, **how)
    print("\n\n".join(texts))
    return 0


COMMAND = Command(
    name="generate",
    summary="generate text from a run",
    description="Continues a text with a run's newest checkpoint. Without a prompt, it begins a document.",
    arguments=arguments,
    execute=execute,
)
