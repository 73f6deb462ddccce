"""Where faults are tried: runs in folders of their own, and the run that nothing disturbed."""

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.train.forks import Forked, Server
from tests.train.small import make_run
from trellis.train.trackers import read_lines

STEPS, EVERY = 40, 4
# What a run logs that is the same whatever happens to it.
MEASURES = ("loss", "grad_norm", "validation_loss", "tokens")
# Seconds after which a command is taken to hang.
LIMIT = 240.0


class Wrong(AssertionError):
    """A fault that did not end as it should."""


@dataclasses.dataclass
class End:
    """How a command ended: its exit code, below zero for a signal, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The last message of the command, from its first word on."""
        return self.err[self.err.rindex("trellis: ") :] if "trellis: " in self.err else ""


class Started(Forked):
    """A command that runs."""

    def end(self) -> End:
        """Waits for it."""
        try:
            out, err = self.communicate(LIMIT)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGUSR1)
            time.sleep(1)
            self.kill()
            raise Wrong(f"a command hung for {LIMIT:.0f} s: {self.said('err')}") from None
        return End(self.returncode or 0, out, err)


def measured(run: Path) -> dict[int, list[float | None]]:
    """What a run logged of every step that does not depend on time."""
    lines = read_lines(run / "metrics.jsonl")
    return {line["step"]: [line.get(name) for name in MEASURES] for line in lines}


class Bench:
    """What all cases share: stores, compiled programs, the undisturbed run."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "stores").mkdir(parents=True)
        self.run_file = make_run(folder / "stores")
        self.server = Server({"XDG_CACHE_HOME": str(folder / "cache")})
        self.whole = Case(self, random.Random(0), "whole")
        self.whole.expect(self.whole.start().end(), (0,))  # compiles what the others find compiled
        begun = time.monotonic()
        self.whole.expect(self.whole.start().end(), (0,))  # restores, and starts no step
        self.seconds = time.monotonic() - begun
        self.measured = measured(self.whole.run)

    def close(self) -> None:
        self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Case:
    """One run in a folder, to which things happen.

    Attributes:
        run: the run's folder.
        stores: its own copy of the stores.
        random: where all choices come from.
        torn: whether lines of metrics may be missing, as files were copied at different times.
    """

    def __init__(self, bench: Bench, rng: random.Random, name: str):
        self.bench, self.random, self.torn = bench, rng, False
        self.folder = bench.folder / name
        self.run, self.stores = self.folder / "run", self.folder / "stores"
        shutil.copytree(bench.folder / "stores", self.stores)
        self.run_file = self.stores / "run.yaml"
        self.run_file.write_text(bench.run_file.read_text().replace(str(bench.folder / "stores"), str(self.stores)))

    def start(self, *more: str, run: Path | None = None, **world: Any) -> Started:
        """The command that trains this run, or goes on with it."""
        words = [
            "train",
            str(self.run_file),
            "--run-dir",
            str(run or self.run),
            "--devices",
            "2",
            "--steps",
            str(STEPS),
        ]
        words += ["--checkpoints.every", str(EVERY), "--checkpoints.keep_latest", "3", "--guard.every", "5", *more]
        return Started(self.bench.server, "tests.chaos.spoilt", [json.dumps(world), *words], self.folder)

    def part(self) -> tuple[str, str]:
        """Options for some more steps, so that something is left for what happens next."""
        return "--until", str(min(STEPS, len(self.lines()) + self.random.randint(3, 10)))

    def moment(self, started: Started) -> None:
        """Waits for a random one: some time from the start on, or until so many steps were logged."""
        begun = time.monotonic()
        if self.random.random() < 0.4:
            wait, steps = self.random.uniform(0, 2 * self.bench.seconds), None
        else:
            wait, steps = LIMIT, self.random.randint(min(len(self.lines()), STEPS), STEPS)
        while started.poll() is None and time.monotonic() - begun < wait:
            if steps is not None and len(self.lines()) >= steps:
                break
            time.sleep(0.005)

    def lines(self) -> list[str]:
        path = self.run / "metrics.jsonl"
        try:
            return path.read_text().splitlines()
        except OSError:
            return []

    def begin(self) -> None:
        """Sees to it that there are some checkpoints."""
        if len(self.checkpoints()) < 2:
            self.expect(self.start("--until", str(self.random.randrange(2 * EVERY + 1, STEPS))).end(), (0,))

    def checkpoints(self) -> list[Path]:
        """The finished ones, oldest first."""
        return sorted(path.parent for path in self.run.glob("checkpoints/step-*/manifest.json"))

    def expect(self, end: End, codes: tuple[int, ...], told: str = "") -> End:
        """Holds an end to what it may be: no traceback, and where the run stopped itself, one message in four parts."""
        if end.code not in codes:
            raise Wrong(f"exit code {end.code}, expected {codes}: {end.err[-3000:]}")
        if "Traceback" in end.err:
            raise Wrong(f"a traceback: {end.err[-4000:]}")
        if end.code in (2, 3):
            if end.err.count("trellis: ") != 1 or not all(f"\n  {p}:" in end.message for p in ("seen", "where", "fix")):
                raise Wrong(f"not one message in four parts: {end.err[-2000:]}")
            if told not in end.message:
                raise Wrong(f"not told `{told}`: {end.message}")
        return end

    def finish(self) -> None:
        """Goes on to the end, undisturbed, and holds the run against the one that nothing happened to."""
        self.expect(self.start().end(), (0,))
        found, wanted = measured(self.run), self.bench.measured
        if self.torn:
            wanted = {step: wanted.get(step) for step in found}
        if found != wanted:
            raise Wrong(f"other measures: {found} where undisturbed {wanted}")
        if [path.name for path in self.checkpoints()][-1:] != [f"step-{STEPS:08d}"]:
            raise Wrong(f"no checkpoint of the last step, but {self.checkpoints()}")
        shutil.rmtree(self.folder)
