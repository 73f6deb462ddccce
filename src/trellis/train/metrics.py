"""From the device's numbers to the line that a run writes for a step."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax

from trellis.figures.numbers import flop_rate
from trellis.train.drain import Record

# A compiled step returns its metrics in alphabetical order; a line begins with what people look for.
_FIRST = ("loss", "learning_rate", "grad_norm")
# A rate is taken over this many seconds at least, even if the steps since the line before took less.
_AT_LEAST = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a token costs, and what the devices could do.

    Attributes:
        flops_per_token: floating-point operations of training on one token, with attention counted causally.
        noncausal_flops_per_token: the same with all of attention counted, as many do; None leaves it out.
        peak_flops: the dense peak of all devices together, per second; None if it is not known.
        measure_again: measures the peak once more, if it is a measured and not a published one.
    """

    flops_per_token: float
    noncausal_flops_per_token: float | None = None
    peak_flops: float | None
    measure_again: Callable[[], float | None] | None = None

    def utilisation(self, tokens_per_second: float | None) -> dict[str, float | None]:
        """The model's FLOPs per second over the peak, from 0 to 1: `mfu`, and `mfu_noncausal` if that is counted."""
        counted = {"mfu": self.flops_per_token, "mfu_noncausal": self.noncausal_flops_per_token}
        known = {name: flops for name, flops in counted.items() if flops is not None}
        if not tokens_per_second or not self.peak_flops:
            return dict.fromkeys(known)
        return {name: tokens_per_second * flops / self.peak_flops for name, flops in known.items()}


class Meter:
    """Turns records into lines: rates over the steps since the line before, and over a second at least.

    Steps of a few milliseconds end faster than their ends can be told apart: a rate is right only over many of them.

    Args:
        tokens: how many tokens the run had seen before the first record.
        spent: the seconds of steps before the first record that are in no line: those between the last line and the
            checkpoint from which the run resumes.
        work: what a token costs; None leaves `mfu` empty. It may change between lines; rates then cover only the steps
            since the change.
    """

    def __init__(self, *, tokens: int, spent: float = 0.0, work: Work | None = None):
        self.tokens, self.spent = tokens, spent
        self._work = work
        self._steps: deque[tuple[int, float, float]] = deque()  # tokens, seconds, seconds without a batch
        self._new = 0  # steps since the line before, or the resume; `spent` has their seconds

    def add(self, record: Record, tokens: int) -> None:
        """Counts a step over `tokens` tokens."""
        self.tokens += tokens
        self._steps.append((tokens, record.seconds, record.data_wait))
        self._new += 1
        self.spent += record.seconds

    @property
    def work(self) -> Work | None:
        """What a token costs."""
        return self._work

    @work.setter
    def work(self, work: Work | None) -> None:
        self._work = work
        self._steps.clear()
        self._new = 0

    def line(self, record: Record) -> dict[str, float | int | None]:
        """The line of the step that was added last. A value that is not a finite number becomes None.

        Keys: `step`, `tokens` (so far), the step's metrics, `seconds` (of the steps since the line before, waiting
        included), and of the steps that the rates are over: `tokens_per_second`, `mfu` and `mfu_noncausal` (0 to 1),
        `step_seconds` (waiting included), `data_wait_seconds` (a step's share of the time that the device had no
        batch); `memory_bytes` is what the fullest device of this process holds, or the process itself if the devices do
        not say.
        """
        seconds = sum(step[1] for step in self._steps)
        while len(self._steps) > self._new and seconds - self._steps[0][1] >= _AT_LEAST:
            seconds -= self._steps.popleft()[1]
        rate = sum(step[0] for step in self._steps) / seconds if seconds > 0 else None
        line: dict[str, float | int | None] = {"step": record.step, "tokens": self.tokens}
        line.update({name: record.values[name] for name in _FIRST if name in record.values})
        line.update(record.values)
        line.update(
            tokens_per_second=rate,
            **(self._work.utilisation(rate) if self._work else {"mfu": None}),
            seconds=self.spent,
            step_seconds=seconds / len(self._steps) or None,
            data_wait_seconds=sum(step[2] for step in self._steps) / len(self._steps),
            memory_bytes=memory_bytes(),
        )
        self._new, self.spent = 0, 0.0
        return {name: value if value is None or math.isfinite(value) else None for name, value in line.items()}

    def corrected(self, line: dict, settle: Callable[[], object]) -> tuple[dict, str]:
        """A line whose MFU is over 1 with a better peak, and a report of that; any other line as it is, and "".

        On a busy machine the peak may be measured too low. When a step beats it, it is measured again, and taken to be
        at least what the step reached.

        Args:
            line: as `line` made it.
            settle: waits until the devices have nothing else to do.
        """
        work, rate = self._work, line["tokens_per_second"]
        if work is None or work.measure_again is None or not work.peak_flops or (line["mfu"] or 0.0) <= 1.0:
            return line, ""
        settle()
        reached, measured = rate * work.flops_per_token, work.measure_again() or 0.0
        self._work = work = replace(work, peak_flops=max(reached, measured))
        before = f"a step beat {flop_rate(reached / line['mfu'])}, the peak that MFU was counted against"
        how = "measured again" if measured > reached else "which the step did: measured again it is no higher"
        return line | work.utilisation(rate), f"peak     {before}; now {flop_rate(work.peak_flops)}, {how}"


def memory_bytes() -> int | None:
    """The bytes that the fullest device of this process holds; on a CPU, those of the process; None if unknown."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    held = [s["bytes_in_use"] for s in stats if s and "bytes_in_use" in s]
    if held:
        return max(held)
    try:
        with open("/proc/self/status") as file:
            found = [line.split()[1] for line in file if line.startswith("VmRSS:")]
    except OSError:
        return None
    return int(found[0]) * 1024 if found else None
