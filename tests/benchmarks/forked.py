"""`benchmarks/accelerator.py --toy`, whose rows are forked from it: what all of them import is imported once.

To start a process for each, as the benchmark does by itself, takes 1.3 s of processor more.
"""

import importlib
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import types

HERE = pathlib.Path(__file__).parents[2] / "benchmarks"


class Row:
    """A row's process, with what the benchmark asks of `subprocess.Popen`."""

    def __init__(self, command: list[str], stdout, **_):
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=(command[1:], stdout.fileno()))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, limit: float | None = None) -> int:
        self._process.join(limit)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", limit)
        return self.poll()


def _work(words: list[str], out: int) -> None:
    os.setsid()
    for number in (1, 2):
        os.dup2(out, number)
    sys.argv = words
    for name in ("steps", "with_torch"):
        sys.modules[name].STARTED = time.time()
    sys.modules["work"].main()


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE / "accelerator_rows")]
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "OPENBLAS_NUM_THREADS": "1"}
    for name in ("alone", "checks", "experts", "steps", "with_torch", "work", "trellis.plan.search"):
        importlib.import_module(name)
    accelerator = importlib.import_module("accelerator")
    accelerator.subprocess = types.SimpleNamespace(
        Popen=Row, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    return accelerator.main()


if __name__ == "__main__":
    sys.exit(main())
