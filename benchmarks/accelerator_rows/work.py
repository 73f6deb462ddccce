"""One row of `accelerator.py`, in a process of its own: `work.py FOLDER NAME OUT [--toy] [--on TARGET]`.

What is found is written to OUT as soon as it is there, so that a row that is ended keeps what it had.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from process import LEFT_OUT, Missing


class Findings:
    """What a row found so far, in a file.

    Args:
        path: the file.
        folder: of all rows, for those that read another's.
    """

    def __init__(self, path: Path, folder: Path):
        self.path, self.folder, self.values = path, folder, {}

    def tell(self, **values: object) -> None:
        """Adds values, and writes all of them."""
        self.values |= values
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values))
        part.replace(self.path)

    def of(self, row: str) -> dict:
        """What another row found.

        Raises:
            Missing: it did not end well, or has not run.
        """
        lines = (json.loads(line) for line in (self.folder / "rows.jsonl").read_text().splitlines())
        for line in lines:
            if line["row"] == row and line["outcome"] == "done":
                return line["values"]
        raise Missing(f"needs what `{row}` finds, which did not end well")


def main() -> None:
    """Does the row's work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--on")
    args = parser.parse_args()
    if sys.platform == "linux":  # ends with the process that started it, however that ended
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    from rows import all_rows

    row = next(row for row in all_rows(args.toy, args.on) if row.name == args.name)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # as `trellis train` does; JAX would keep a quarter
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")
    if not args.toy:  # a first step is one with nothing compiled before
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    platforms = os.environ.get("JAX_PLATFORMS") or ("cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "")
    if platforms and "cpu" not in platforms:  # checks need the CPU, too
        platforms += ",cpu"
    os.environ["JAX_PLATFORMS"] = "cpu" if row.on_cpu else platforms
    import alone
    import checks
    import experts
    import steps
    import with_torch

    works = {
        name: getattr(module, name) for module in (alone, checks, experts, steps, with_torch) for name in module.WORKS
    }
    try:
        works[row.work](Findings(args.out, args.folder), **row.given)
    except Missing as missing:
        print(missing.args[0])
        sys.exit(LEFT_OUT)


if __name__ == "__main__":
    main()
