"""Deadlines: a step that does not end is detected, reported with what every process was doing, and ends the run."""

import contextlib
import faulthandler
import json
import os
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path

import jax

from trellis.checkpoints.checkpoints import LastGood
from trellis.figures.numbers import duration
from trellis.run.config import DeadlineRule
from trellis.train.drain import Record
from trellis.train.stopping import RunStopped, leave_at_once

# The median counts from the first number of steps on, and is taken over at most the second.
_FEWEST, _MOST = 3, 100
# How often a deadline is checked: this many times within it, and at least once in this many seconds.
_LOOKS, _LONGEST = 8, 15.0
# Anything that is not a step may take this many deadlines.
_PATIENCE = 10
# A process is slow if its devices have nothing to do for more than this share of a step's time.
_SLOW = 0.2
# Checks between the detection and the end, in which the other processes write what they know.
_GRACE = 4
# How many more of them the first process waits, so that the others can leave before it.
_LAST = 3


class Watchdog:
    """A thread that ends a run whose step takes longer than its deadline, a multiple of the median of the steps so far.

    Time is counted in turns of this thread, so none passes while a process is stopped or a machine sleeps. Anything
    that is not a step (evaluating, saving, compiling another step) may take ten deadlines. With several processes,
    `watch/` in the run's folder holds what each is doing, and, once a step is late, the Python stacks of each that can
    still write them.

    Args:
        rule: the run's rule.
        folder: the run's folder, which all processes see.
        last_good: gives words about the last good checkpoint.
        first_collective: words for a step's first collective, if it is known.
        noted: takes an event and its reason: "stopped", or "slow" if devices wait for one process of several.
    """

    def __init__(
        self,
        rule: DeadlineRule,
        folder: Path,
        last_good: Callable[[], LastGood],
        *,
        first_collective: str | None = None,
        noted: Callable[[str, str], None] = lambda event, why: None,
    ):
        self._rule, self._folder, self._last_good = rule, folder / "watch", last_good
        self._first, self._noted = first_collective, noted
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._paces: deque[float] = deque(maxlen=_MOST)  # seconds of the last steps, and those without work
        self._idle: deque[float] = deque(maxlen=_MOST)
        self._slow: list[int] = []
        self._lock = threading.RLock()
        self._finished = self._dispatched = self._ticks = 0
        self._spent, self._excused, self._doing = 0.0, True, "starts"
        self._compiles = True  # the first step, which is unlike the others
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if rule.factor is not None:
            self._calls = self._call()  # left by an earlier start of the run
            self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
            self._thread.start()

    def doing(self, what: str, *, dispatched: int | None = None) -> None:
        """Notes what the training loop does next, under the deadline.

        Args:
            what: a predicate, as in `waits for the batch of step 7`.
            dispatched: how many steps have been handed to the devices, if that changed.
        """
        with self._lock:
            self._doing, self._excused = what, False
            self._dispatched = self._dispatched if dispatched is None else dispatched

    @contextlib.contextmanager
    def excused(self, what: str) -> Generator[None]:
        """Within it, the run does something that is not a step."""
        with self._lock:
            before = self._doing, self._excused
            self._doing, self._excused, self._spent = what, True, 0.0
        try:
            yield
        finally:
            with self._lock:
                (self._doing, self._excused), self._spent = before, 0.0

    def finished(self, record: Record) -> None:
        """Notes that the devices finished a step, or what was added for it; the next step's deadline begins."""
        with self._lock:
            if record.step > self._finished and not self._compiles:
                self._paces.append(record.seconds)
                handed = (
                    record.waited[1] if record.waited else record.dispatched
                )  # a CPU may compute while it dispatches
                self._idle.append(max(0.0, handed - (record.idle_from or handed)))
            self._compiles = False
            self._finished, self._spent = record.step, 0.0

    def forget(self) -> None:
        """Leaves the steps so far out of the median, since those that follow are of another kind."""
        with self._lock:
            self._paces.clear()
            self._idle.clear()
            self._compiles = True

    @property
    def deadline(self) -> float | None:
        """Seconds that a step may take; None while too few steps have been made."""
        with self._lock:
            if self._rule.factor is None or len(self._paces) < _FEWEST:
                return None
            return max(self._rule.seconds, self._rule.factor * statistics.median(self._paces))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval()):
            if self._tick() or self._call() != self._calls:
                self._end()
                self._calls = self._call()
            if self._process == 0 and self._processes > 1 and self._ticks % _LOOKS == 0:
                self._name_slow(self._states())

    def _name_slow(self, states: dict[int, dict]) -> None:
        """Notes the processes whose devices wait for data, or for the next step. All other processes wait for these."""
        share = {p: state["idle"] / state["pace"] for p, state in states.items() if state.get("pace")}
        others = lambda p: statistics.median([idle for other, idle in share.items() if other != p] or [0.0])
        slow = [p for p, idle in share.items() if idle > _SLOW and idle > 2 * others(p)]
        if slow != self._slow and slow:
            told = [f"process {p} on {states[p]['host']} for {share[p]:.0%} of a step" for p in slow]
            self._noted("slow", f"devices wait for {', '.join(told)}")
        self._slow = slow

    def _interval(self) -> float:
        return min((self.deadline or self._rule.seconds) / _LOOKS, _LONGEST)

    def _tick(self) -> bool:
        """Takes one turn, and returns whether the step under way is late."""
        with self._lock:
            self._ticks += 1
            self._spent += self._interval()
            late = self.deadline is not None and self._spent > self.deadline * (_PATIENCE if self._excused else 1)
        if self._processes > 1:
            with self._lock:
                times = {"pace": _median(self._paces), "idle": _median(self._idle)}
            state = {"ticks": self._ticks, "dispatched": self._dispatched, "doing": self._doing, **times}
            self._write(f"process-{self._process}.json", json.dumps({**state, "host": platform.node()}))
        return late

    def _end(self) -> None:
        spent, deadline, step = self._spent, self.deadline, self._finished + 1
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            with open(self._folder / f"stacks-{self._process}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        found = ""
        if self._processes > 1:
            if self._call() == self._calls:
                self._write("late", f"{self._process} {self._ticks} {os.getpid()}")
            before = self._states()
            self._turn(_GRACE)
            found = f"; {self._who(before, self._states(), step)}"
            if self._process == 0:  # JAX's runtime runs in it, and its end would end the others
                self._turn(_LAST)
        if self._finished >= step:
            return  # the step was late, and the run continues
        median = duration(statistics.median(self._paces)) if self._paces else "unknown"
        last_good = self._last_good()
        error = RunStopped(
            "A step must end within its deadline.",
            seen=f"step {step} after {duration(spent)}, where the median is {median}"
            + (f" and the deadline {duration(deadline)}" if deadline else "")
            + f"; process {self._process} of {self._processes} {self._doing}{found}",
            where=f"{last_good.where}; Python stacks: {self._folder}",
            fix=f"check the stacks, then {last_good.again}; raise "
            "--deadline.factor or --deadline.seconds if steps do take so long",
        )
        self._noted("stopped", error.rule)
        leave_at_once(error)

    def _turn(self, turns: int) -> None:
        """Keeps reporting what this process does. A loop that fails meanwhile, as others leave, waits for the end."""
        for _ in range(turns):
            time.sleep(self._interval())
            self._tick()

    def _who(self, before: dict[int, dict], now: dict[int, dict], step: int) -> str:
        """Which processes are behind: those that no longer write, else those that handed over the fewest steps."""
        name = lambda p: f"process {p}" + (f" on {now[p]['host']}" if p in now else "")
        silent = [p for p in range(self._processes) if now.get(p, {}).get("ticks") == before.get(p, {}).get("ticks")]
        if silent:
            last = lambda p: f"{now[p]['doing']}" if p in now else "has written nothing"
            return "late: " + ", ".join(f"{name(p)}, which is silent (last: {last(p)})" for p in silent)
        least = min(state["dispatched"] for state in now.values())
        behind = [p for p, state in now.items() if state["dispatched"] == least]
        if len(behind) == self._processes:
            return "no process is behind the others: all wait for their devices"
        words = "late: " + ", ".join(f"{name(p)}, which {now[p]['doing']}" for p in behind)
        if least < step and self._first:
            words += f"; the others wait in step {step}, whose first collective is {self._first}"
        return words

    def _states(self) -> dict[int, dict]:
        found = {}
        for process in range(self._processes):
            with contextlib.suppress(OSError, ValueError):
                found[process] = json.loads((self._folder / f"process-{process}.json").read_text())
        return found

    def _call(self) -> str | None:
        """What the process that first noticed a late step wrote for the others."""
        try:
            return (self._folder / "late").read_text()
        except OSError:
            return None

    def _write(self, name: str, text: str) -> None:
        part = self._folder / f".{name}.{self._process}.part"
        with contextlib.suppress(OSError):  # a run does not end because a note failed
            self._folder.mkdir(exist_ok=True)
            part.write_text(text)
            os.replace(part, self._folder / name)


def _median(times: deque[float]) -> float:
    return statistics.median(times) if times else 0.0
