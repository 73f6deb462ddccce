"""`trellis prove`."""

import argparse
import json
import sys
from pathlib import Path

from trellis.commands.command import Command
from trellis.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `trellis prove`."""
    parser.add_argument(
        "--on", required=True, metavar="TARGET", help="v5e:2x2, v5p:2x2x2, 8xH100: the smallest that has the mesh"
    )
    parser.add_argument("--hardware", metavar="FILE.yaml", help="more chips, in the form of the built-in table")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all numbers")
    parser.add_argument(
        "--no-reason", action="store_true", help="do not look for what made it wrong, where it is; saves a minute"
    )
    parser.add_argument(
        "--programs",
        metavar="DIR",
        help="write the compiled program, and where it is wrong the ones around the mistake",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")


def execute(args: argparse.Namespace) -> int:
    """Proves the step of `args.run` on `args.on`; 0 if it is right, 3 if not."""
    from trellis.hardware.chips import target
    from trellis.proof.interpreter import Failed, NotInterpreted
    from trellis.proof.report import as_json, text
    from trellis.proof.runs import prove_run
    from trellis.train.compilation import use_persistent_cache

    where = target(args.on, args.hardware)
    use_persistent_cache()
    try:
        proof = prove_run(args.run, where, args.given, explain=not args.no_reason, progress=True, seed=args.seed)
    except (NotInterpreted, Failed) as error:
        raise UserError(
            "A compiled program is executed by an interpreter that knows all of its operations.",
            seen=str(error),
            where=f"the program of {args.run.name} for {args.on}",
            fix="report it, with the recipe and the target; the run can be trained without a proof",
        ) from error
    if args.programs:
        folder = Path(args.programs)
        folder.mkdir(parents=True, exist_ok=True)
        found = {"compiled": proof.compiled.text}
        if proof.finding is not None:
            found |= {"right": proof.finding.right, "wrong": proof.finding.wrong}
        for name, program in found.items():
            if program:
                (folder / f"{name}.hlo").write_text(program, encoding="utf-8")
        print(f"programs written to {folder}", file=sys.stderr)
    print(json.dumps(as_json(proof), indent=1) if args.json else text(proof))
    return 0 if proof.proven else 3


COMMAND = Command(
    name="prove",
    summary="the step compiled for hardware that is not here, executed here, held against one device",
    arguments=arguments,
    execute=execute,
    recipe="",
)
