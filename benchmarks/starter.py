"""Whether the starter recipe reaches the loss that its docstring promises, through the command that users type.

    python benchmarks/starter.py [--out benchmarks/results/starter.json] [-- --devices 8 --mesh.data 4 --mesh.model 2]

Trains `trellis train starter` to its end in a folder of its own, with what follows `--` added, and compares the losses
of its metrics with those in `recipes/starter.py`. Exits with 1 where the validation loss or the bits a byte are further
away than the docstring allows. The corpus is the standard library of the Python that runs it: another version's text is
a little different, which the allowance covers.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from train_speed import processor

from trellis.recipes import starter


def promised() -> dict[str, float]:
    """The figures of the recipe's docstring."""
    text = " ".join(starter.__doc__.split())
    found = re.search(
        r"from (?P<loss_10>[\d.]+) after 10 steps to about (?P<loss>[\d.]+) after 600, with a validation loss of "
        r"(?P<validation_loss>[\d.]+) \((?P<bits_per_byte>[\d.]+) bits a byte\), within (?P<within>[\d.]+) on any",
        text,
    )
    assert found is not None, "the docstring of the recipe says its losses in another way"
    return {name: float(value) for name, value in found.groupdict().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("more", nargs="*", help="options of `trellis train`, after --")
    args = parser.parse_args()
    wanted = promised()
    with tempfile.TemporaryDirectory() as folder:
        program = "import sys, trellis_start; sys.exit(trellis_start.main())"
        command = [sys.executable, "-c", program, "train", "starter", "--run-dir", f"{folder}/run", *args.more]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        about = json.loads(Path(folder, "run", "about.json").read_text())
    last, tenth = lines[-1], next(line for line in lines if line["step"] == 10)
    tail = [line["loss"] for line in lines[-10:]]
    found = {
        "loss_10": tenth["loss"],
        "loss": sum(tail) / len(tail),
        "validation_loss": last["validation_loss"],
        "bits_per_byte": last["bits_per_byte"],
    }
    allowed = {"validation_loss": wanted["within"], "bits_per_byte": wanted["within"]}
    good = True
    for name, value in found.items():
        off = abs(value - wanted[name])
        bound = allowed.get(name)
        verdict = "" if bound is None else f"  within {bound}: {'yes' if off <= bound else 'NO'}"
        good &= bound is None or off <= bound
        print(f"{name:16} {value:7.3f}  promised {wanted[name]:6.2f}{verdict}")
    print(f"{seconds:.0f} s from command to end, {last['tokens_per_second']:,.0f} tokens/s at the end")
    if args.out:
        machine = {"processor": processor(), "cores": os.cpu_count()}
        rows = {
            "machine": machine,
            "python": platform.python_version(),
            "mesh": about.get("mesh"),
            "seconds": round(seconds),
            "tokens_per_second": round(last["tokens_per_second"]),
            "promised": wanted,
            "found": {name: round(value, 4) for name, value in found.items()},
            "reached": good,
        }
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
