"""How many mistakes in compiled programs a proof finds: `python benchmarks/prove_mutations.py [--each N] [WORD ...]`.

Every recipe, with shrunk sizes and on eight devices of the hardware that it is written for, and a few runs with meshes
that no recipe has (`BESIDES`) are compiled, each compiled program is altered in N ways (`tests/proof/mutations.py`),
and executed. Programs for GPUs need JAX's CUDA plugin; with words only those of a recipe or a target are made.

A mistake is found where a result deviates from one device by more than rounding may. Where nothing changes, each result
is the same to the last bit on every device, metrics included; where it is rounding, results are as near to one device's
as those of the right program, as after sums in another order. Of mistakes in collectives that are found it is said how
many the structure of the program shows as well, without any numbers.

`--into FILE` keeps what each program showed, a line of JSON, and a later call goes on after those that are there.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.proof.cases import Case, recipes
from tests.proof.mutations import Outcome, outcomes

AUTO = ("--mesh.data=2", "--mesh.model=2", "--layout.preset=auto")
CONTEXT = ("--mesh.data=2", "--mesh.context=2", "--layout.preset=auto")
STAGES = ("--mesh.stage=2", "--mesh.data=2", "--layout.preset=auto", "--microbatches=2")
BESIDES = [
    Case(name, "", on, options)
    for on in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "4xH100")
    for name, options in (("tiny", AUTO), ("llama_84m", CONTEXT), ("llama_84m", STAGES))
]
COLUMNS = ("made", "found", "nothing changes", "rounding", "missed", "in collectives, found", "and by structure")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--each", type=int, default=12, metavar="N")
    parser.add_argument("--into", type=Path, metavar="FILE")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # one program, in a process of its own
    args = parser.parse_args()
    cases = [*recipes(), *BESIDES]
    if args.only is not None:
        print(json.dumps(shown(cases[args.only], args.each, args.only)))
        return
    known = args.into.read_text().splitlines() if args.into and args.into.exists() else []
    rows = {row["program"]: row for row in map(json.loads, known)}
    for number, case in enumerate(cases):
        if args.words and not {case.name, case.on} & set(args.words):
            continue
        if program(case) not in rows:
            command = [sys.executable, __file__, "--each", str(args.each), "--only", str(number)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{program(case)}: ended with exit code {done.returncode}", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            rows[row["program"]] = row
            if args.into:
                with open(args.into, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        tell(rows[program(case)])
    table(rows.values())


def program(case: Case) -> str:
    """A compiled program in words."""
    return " ".join((case.name, "on", case.on, *case.options))


def shown(case: Case, each: int, seed: int) -> dict:
    """What altering a program showed: counts by the kind of a mistake, and what is to be looked at."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    notes = []
    for seen in outcomes(case, np.random.default_rng(seed), each):
        counts[seen.kind] += columns(seen)
        if seen.collective and seen.result == "found" and not seen.structure:
            notes.append(f"not by structure: {seen.kind}: {seen.line[:150]}")
        if seen.result in ("missed", "rounding"):
            notes.append(f"{seen.result}: {seen.kind}, {seen.error:.1e} of {seen.right_error:.1e}: {seen.line[:150]}")
    return {"program": program(case), "counts": counts, "notes": notes}


def columns(seen: Outcome) -> collections.Counter[str]:
    """In which columns a mistake counts."""
    names = ["made", seen.result]
    if seen.collective and seen.result == "found":
        names += ["in collectives, found", *(["and by structure"] if seen.structure else [])]
    return collections.Counter(names)


def tell(row: dict) -> None:
    """A program's line, and what is to be looked at."""
    total = sum(map(collections.Counter, row["counts"].values()), collections.Counter())
    print(f"{row['program']}: " + ", ".join(f"{total[name]} {name}" for name in COLUMNS), flush=True)
    for note in row["notes"]:
        print(f"  {note}", flush=True)


def table(rows) -> None:
    """How often which mistake was found."""
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for kind, counts in row["counts"].items():
            kinds[kind] += collections.Counter(counts)
            kinds["~all"] += collections.Counter(counts)
    print(f"{'mistake':<32}" + "".join(f"{column:>24}" for column in COLUMNS))
    for kind in sorted(kinds):
        print(f"{kind.lstrip('~'):<32}" + "".join(f"{kinds[kind][column]:>24}" for column in COLUMNS))


if __name__ == "__main__":
    main()
