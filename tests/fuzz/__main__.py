"""`python -m tests.fuzz`: random programs in the language, each against its plain twin on one device.

A process of its own runs them, so that one that hangs or ends the process is found, too.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time

import conftest  # noqa: F401  before anything imports JAX: eight CPU devices, the tests' strictness and their compiler

from .tally import Tally


def main() -> int:
    options = _options()
    if options.worker:
        import jax

        from trellis.mesh.platform import leave_threads

        from .layouts import MOST
        from .worker import work

        if options.many:
            jax.config.update("jax_num_cpu_devices", MOST)
            leave_threads(MOST)
        seeds = [int(seed) for seed in sys.stdin.read().split()]
        how = dict(only=options.only, shrink=options.shrink, ledger_share=options.ledgers)
        work(seeds, **how, many=options.many, chip=options.on)
        return 0
    tally, begin = Tally(), time.monotonic()
    seeds = list(range(options.seed, options.seed + options.count))
    retried: set[int] = set()
    while seeds:
        batch, seeds = seeds[: options.batch], seeds[options.batch :]
        left = _batch(batch, options, tally, retried)
        seeds = left + seeds
        _progress(tally, begin)
        if options.seconds and time.monotonic() - begin > options.seconds:
            break
    print(tally)
    print(f"{tally.total} programs in {time.monotonic() - begin:.0f} s")
    return 1 if tally.failures else 0


def _options():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many programs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; a seed is one program")
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long; 0 for never")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to look for a smaller failing program")
    parser.add_argument("--ledgers", type=float, default=0.1, help="share of programs whose ledger is checked")
    parser.add_argument("--only", default="", help="only programs of one kind: explicit, auto, manual, broken, ...")
    parser.add_argument("--limit", type=float, default=180, help="seconds after which a program hangs")
    parser.add_argument("--many", action="store_true", help="on 9 to 24 devices, instead of up to 8")
    parser.add_argument("--on", default="", help="also compiled for this chip, and executed by `prove`: v5e, H100, ...")
    parser.add_argument("--batch", type=int, default=300, help="programs a process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on:
        from trellis.hardware.chips import chips

        if options.on.lower() not in chips():
            parser.error(f"--on takes a chip, got {options.on}: use one of {', '.join(chips())}")
    return options


def _batch(seeds: list[int], options, tally: Tally, retried: set[int]) -> list[int]:
    """Runs seeds in a process; gives those that are left when it ended or hung."""
    command = [sys.executable, "-m", "tests.fuzz", "--worker"]
    command += ["--shrink", str(options.shrink), "--ledgers", str(options.ledgers), "--only", options.only]
    command += ["--many"] * options.many + ["--on", options.on]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    process.stdin.write(" ".join(map(str, seeds)))
    process.stdin.close()
    lines: queue.Queue = queue.Queue()
    errors: list[str] = []
    for stream, take in ((process.stdout, lines.put), (process.stderr, errors.append)):
        threading.Thread(target=_read, args=(stream, take), daemon=True).start()
    running, left = None, list(seeds)
    while left:
        try:
            line = lines.get(timeout=options.limit + options.shrink)
        except queue.Empty:
            process.kill()
            return _ended("hang", running, left, errors, tally, retried)
        if line is None:
            process.wait()
            return _ended("crash", running, left, errors, tally, retried)
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        running = told["seed"]
        if "what" in told or "skipped" in told:
            left.remove(running)
        if "what" in told:
            if tally.add(told):
                print(f"seed {running}, {told['what']}: {told['rule']}\n\n{told['text']}", flush=True)
    process.wait()
    return []


def _read(stream, take) -> None:
    for line in stream:
        take(line)
    take(None)


def _ended(how: str, running: int | None, left: list[int], errors: list, tally: Tally, retried: set[int]) -> list[int]:
    """A process that hung or ended early: its seed is tried once more, then it counts."""
    running = left[0] if running is None else running
    if running not in retried:
        retried.add(running)
        return [running, *(seed for seed in left if seed != running)]
    tail = "".join(line for line in errors[-40:] if line)
    print(f"seed {running}: {how}\n{tail}", flush=True)
    tally.add({"seed": running, "what": how, "rule": "", "kind": "?"})
    return [seed for seed in left if seed != running]


def _progress(tally: Tally, begin: float) -> None:
    failed = sum(map(len, tally.failures.values()))
    print(f"{tally.total} programs, {failed} failed, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
