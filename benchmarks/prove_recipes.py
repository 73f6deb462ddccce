"""What is proven, one row each: `python benchmarks/prove_recipes.py recipes|layouts [WORD ...]`.

`trellis prove` with every recipe on eight devices of the hardware that it is written for, or with every layout of the
equivalence suite and every family on v5e, v5p, v6e and H100 (`tests/proof/cases.py`). With words, the rows that one of
them stands in: a recipe's name, a family's, a target's. Rows of GPUs need JAX's CUDA plugin.

`--into FILE` writes the rows to a file behind those that it has, and leaves out those that it has: a run that was cut
short goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.proof import cases

_ROW = "{:<26} {:<10} {:<10} {:<30} {:<18} {:<14} {}"


def row(case: cases.Case) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trellis_start", *case.arguments(Path(folder)), "--no-reason", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        seen = [line for line in done.stderr.splitlines() if "seen:" in line] or done.stderr.splitlines()[-1:]
        return _ROW.format(case.name, case.family, case.on, "", "not proven", "", " ".join(seen).strip()[:150])
    proof = json.loads(done.stdout)
    mesh = " ".join(f"{axis}={size}" for axis, size in proof["mesh"].items() if size > 1)
    error = "not finite" if proof["error"] is None else f"{proof['error']:.1e}"
    matched, faults = proof["structure"], proof["structure"]["faults"]
    there = f"{matched['rows'] - sum(fault.startswith('missing') for fault in faults)}/{matched['rows']}"
    more = "; ".join(faults) or f"{sum(proof['seconds'].values()):.0f} s"
    verdict = f"{'proven' if proof['proven'] else 'WRONG'} {error}"
    found = f"{there} in {matched['collectives']}"
    return _ROW.format(case.name, case.family, case.on, mesh, verdict, found, more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("recipes", "layouts"))
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--into", type=Path, metavar="FILE")
    args = parser.parse_args()
    packages = {package.name: package.version for package in metadata.distributions()}
    compilers = ("jax", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    versions = ", ".join(f"{name} {packages[name]}" for name in compilers if name in packages)
    head = f"{versions}; rows of the ledger that are in so many collectives; seconds beside other work"
    known = args.into.read_text().splitlines() if args.into and args.into.exists() else []
    have = {line[:48].rstrip() for line in known}
    if not known:
        tell(f"python benchmarks/prove_recipes.py {args.what}; {head}; nothing ran on a TPU or GPU", args.into)
    for case in getattr(cases, args.what)():
        key = _ROW.format(case.name, case.family, case.on, "", "", "", "").rstrip()
        if key not in have and (not args.words or set(args.words) & {case.name, case.family, case.on}):
            tell(row(case), args.into)


def tell(line: str, into: Path | None) -> None:
    """On the screen, and to a file."""
    print(line, flush=True)
    if into:
        with open(into, "a", encoding="utf-8") as file:
            file.write(line.rstrip() + "\n")


if __name__ == "__main__":
    main()
