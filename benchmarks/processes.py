"""What a run of several processes does when one of them stops, hangs, dies or is slow.

    python benchmarks/processes.py [--deadline 3]

The toy of `tests/train/toy.py` as two processes with four CPU devices each, and as four with two each. A row says what
was done to process 1, the exit codes of all, the seconds from then until the others had ended, and what they said. A
heartbeat is missed after ten seconds here, as in tests, where JAX's runtime takes a hundred.
"""

import argparse
import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VICTIM, STUCK_AT = 1, 15


@dataclasses.dataclass(frozen=True)
class Case:
    """What is done to process 1: a signal after ten steps, or options of its own."""

    what: str
    sent: signal.Signals | None = None
    own: tuple[str, ...] = ()
    all: tuple[str, ...] = ("--steps", "4000", "--every", "4000")


SHORT = ("--steps", "24", "--every", "8")
CASES = (
    Case("SIGSTOP", signal.SIGSTOP),
    Case("its loop hangs in the data, its heartbeat lives", own=("--stick-at", str(STUCK_AT))),
    Case("SIGKILL", signal.SIGKILL),
    Case("its disk takes 0.5 s a file", own=("--slow-disk", "0.5"), all=SHORT),
    Case("its data takes 0.5 s a step", own=("--pause", "0.5"), all=("--steps", "24", "--every", "24")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", default="3", metavar="SECONDS")
    args = parser.parse_args()
    for count in (2, 4):
        for case in CASES:
            print(f"of {count}: {case.what}: {row(case, count, args.deadline)}", flush=True)


def row(case: Case, count: int, deadline: str) -> str:
    """How a case ended, in words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = start(folder, count, (*case.all, "--deadline", deadline), case.own)
        try:
            begun = wait_for_steps(folder, processes, STUCK_AT if case.own else 10)
            if case.sent is not None:
                processes[VICTIM].send_signal(case.sent)
            said = [p.communicate(timeout=200) for n, p in enumerate(processes) if n != VICTIM or case.sent is None]
            seconds = time.monotonic() - begun
        finally:
            for process in processes:
                process.kill()
        seen = {found for _, err in said for found in re.findall(r"^  seen:  (.*)", err, re.MULTILINE)}
        said_by = sum("  seen:" in err for _, err in said)
        codes = [process.wait() for process in processes]
        told = [f"{said_by} of them: {shortest(seen)}" if seen else "none says anything", *slow(folder)]
        return f"exit codes {codes} after {seconds:.1f} s; {'; '.join(told)}"


def start(folder: Path, count: int, options: tuple[str, ...], own: tuple[str, ...]) -> list[subprocess.Popen]:
    """The toy as so many processes of eight devices in all, with options of process 1 alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.train.toy", str(folder), "--data", "4", "--devices", str(8 // count)]
    command += ["--pause", "0.03", *options, "--coordinator", address, "--processes", str(count), "--process"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    each = ([*command, str(n), *(own if n == VICTIM else ())] for n in range(count))
    return [subprocess.Popen(words, **pipes) for words in each]


def wait_for_steps(folder: Path, processes: list[subprocess.Popen], steps: int) -> float:
    """When so many steps had been made, or a process had ended."""
    metrics = folder / "metrics.jsonl"
    while all(process.poll() is None for process in processes):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
            break
        time.sleep(0.02)
    return time.monotonic()


def shortest(seen: set[str]) -> str:
    """The shortest of what the processes saw, without names of machines."""
    return re.sub(r"(process \d+) on \S+?([,;]| which)", r"\1\2", min(seen, key=len))[:260]


def slow(folder: Path) -> list[str]:
    """Which processes the others waited for."""
    timeline = folder / "timeline.jsonl"
    events = map(json.loads, timeline.read_text().splitlines()) if timeline.exists() else ()
    found = [f"timeline.jsonl: {event['why']}" for event in events if event["event"] == "slow"]
    return [re.sub(r"(process \d+) on \S+", r"\1", words) for words in found]


if __name__ == "__main__":
    main()
