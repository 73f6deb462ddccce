"""`trellis prove`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.commands.command import Command, check_folder, some_path, whole

if TYPE_CHECKING:
    from trellis.proof.proof import Proof


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `trellis prove`."""
    parser.add_argument(
        "--on", required=True, metavar="TARGET", help="v5e:2x2, v5p:2x2x2, 8xH100: the smallest that fits the mesh"
    )
    parser.add_argument("--hardware", metavar="FILE.yaml", help="more chips, in the format of the built-in table")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="the seed of all numbers (default: 0)")
    parser.add_argument(
        "--no-reason", action="store_true", help="do not look for the cause if the program is wrong; saves a minute"
    )
    parser.add_argument(
        "--programs",
        type=some_path,
        metavar="DIR",
        help="write the compiled program and, if it is wrong, the ones around the mistake",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(args: argparse.Namespace) -> int:
    """Proves the step of `args.run` on `args.on`; returns 0 if it is right, 3 if not."""
    from trellis.hardware.chips import target
    from trellis.proof.proof import interpreted
    from trellis.proof.report import as_json, text
    from trellis.proof.runs import prove_run
    from trellis.train.compilation import use_persistent_cache

    if args.programs:
        check_folder(Path(args.programs))
    where = target(args.on, args.hardware)
    use_persistent_cache()
    how = {"explain": not args.no_reason, "progress": True, "seed": args.seed}
    program = f"the program of {args.run.name} for {args.on}"
    with interpreted(program, "report it, with the recipe and the target; the run can be trained without a proof"):
        proofs = [prove_run(phase.run, where, args.given, **how) for phase in args.run.phases()]
    starts = [phase.start for phase in args.run.phases()]
    if args.programs:
        for start, proof in zip(starts, proofs, strict=True):
            _write(proof, Path(args.programs) / (f"step-{start + 1}" if len(proofs) > 1 else ""))
        print(f"programs written to {args.programs}", file=sys.stderr)
    if args.json:
        found = [as_json(proof) for proof in proofs]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    else:
        titles = [f"from step {start + 1} on: " if len(proofs) > 1 else "" for start in starts]
        print("\n\n".join(title + text(proof) for title, proof in zip(titles, proofs, strict=True)))
    return 0 if all(proof.proven for proof in proofs) else 3


def _write(proof: "Proof", folder: Path) -> None:
    """Writes the compiled program, and if it is wrong, the ones around the mistake."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"compiled": proof.compiled.text}
    if proof.finding is not None:
        found |= {"right": proof.finding.right, "wrong": proof.finding.wrong}
    for name, program in found.items():
        if program:
            (folder / f"{name}.hlo").write_text(program, encoding="utf-8")


COMMAND = Command(
    name="prove",
    summary="compare a step compiled for other hardware with one device, by executing it here",
    arguments=arguments,
    execute=execute,
    recipe="",
)
