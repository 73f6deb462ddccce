"""What a run shows while it trains: one line that rewrites itself on a terminal, plain lines elsewhere."""

import itertools
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from trellis.figures.numbers import count, duration, size
from trellis.figures.terminal import sparkline
from trellis.files import unread

_PAUSE = 10  # times the second longest time between two lines


class Progress:
    """Shows a curve of the loss, and with it loss, tokens per second, MFU, memory and time left.

    Args:
        total: the run's number of steps.
        stop: the step that it pauses after, if not the last.
        stream: where to write; the default is stderr.
        every: seconds between two lines if the stream is not a terminal. Evaluations and the last step are always
            shown, even if a run ends early.
    """

    def __init__(self, total: int, *, stop: int | None = None, stream: TextIO | None = None, every: float = 10.0):
        self._total, self._stream, self._every = total, stream or sys.stderr, every
        self._stop = total if stop is None else stop
        self._tty = self._stream.isatty()
        # The time left follows from the last hundred lines, but only from those since the last compilation, which is
        # not part of the pace.
        self._times: deque[tuple[int, float, float]] = deque(maxlen=100)  # step, when it came, how long it took
        self._shown: float | None = None
        self._losses: list[float | None] = []
        self._bar = self._unshown = ""

    def update(self, line: Mapping[str, float | int | None]) -> None:
        """Shows a line of metrics, as `Meter.line` makes it."""
        now = time.monotonic()
        self._times.append((int(line["step"]), now, line.get("seconds") or 0.0))
        self._losses.append(line.get("loss"))
        text = self.describe(line)
        if self._tty:
            self._bar = self._draw(text)
            self._write("\r\x1b[K" + self._bar)
        due = self._shown is None or now - self._shown >= self._every
        if not self._tty and (due or "validation_loss" in line or int(line["step"]) >= self._stop):
            self._shown, self._unshown = now, ""
            self._write(text + "\n")
        elif not self._tty:
            self._unshown = text
        elif "validation_loss" in line:
            self.note(text)

    def describe(self, line: Mapping[str, float | int | None]) -> str:
        """The line in words: `step 20/100  loss 3.21  1.20k tok/s  MFU 31.0 %  1.20 GiB  left 2 min 10 s`."""
        parts = [f"step {line['step']}/{self._total}"]
        loss = line.get("loss")
        parts.append(
            f"loss {loss:.4f}"
            if loss is not None
            else "no token counts"
            if line.get("grad_norm") == 0
            else "loss not finite"
        )
        if line.get("validation_loss") is not None:
            parts.append(f"validation {line['validation_loss']:.4f}")
        if line.get("bits_per_byte") is not None:
            parts.append(f"{line['bits_per_byte']:.4f} bits/byte")
        if line.get("tokens_per_second") is not None:
            parts.append(f"{count(line['tokens_per_second'])} tok/s")
        if (mfu := line.get("mfu")) is not None:
            more = line.get("mfu_noncausal")
            beside = f" ({100 * more:.1f} % non-causal)" if more is not None else ""
            parts.append(f"MFU {100 * mfu:.1f} %{beside}")
        if line.get("memory_bytes") is not None:
            parts.append(size(line["memory_bytes"]))
        left = self._left(int(line["step"]))
        if left is not None:
            parts.append(f"left {duration(left)}")
        return "  ".join(parts)

    def note(self, text: str) -> None:
        """Writes a line of its own, above the bar."""
        self._write(f"\r\x1b[K{text}\n{self._bar}" if self._tty else text + "\n")

    def forget(self) -> None:
        """Makes the time left follow from later lines only: the steps are different now."""
        self._times.clear()

    def close(self) -> None:
        """Leaves the last line standing."""
        if self._bar or self._unshown:
            self._write(self._unshown + "\n")
            self._bar = self._unshown = ""

    def _write(self, text: str) -> None:
        """A run goes on if nobody reads: a Ctrl-C that also ended `tee` saves, and so does one without a terminal."""
        with unread(self._stream):
            self._stream.write(text)
            self._stream.flush()

    def _left(self, step: int) -> float | None:
        """Seconds at the pace of the lines so far. One that took ten times as long as any other was a pause: a laptop
        that slept, or a run that was stopped and continued. Lines that come together, as after a compilation, take no
        less than their steps did."""
        pairs = itertools.pairwise(self._times)
        spans = sorted((end - start, last - first, own) for (first, start, _), (last, end, own) in pairs)
        if len(spans) > 1 and spans[-1][0] > _PAUSE * spans[-2][0]:
            spans.pop()
        between, steps, own = (sum(part) for part in zip(*spans)) if spans else (0.0, 0, 0.0)
        return (self._stop - step) * max(between, own) / steps if steps > 0 and step < self._stop else None

    def _draw(self, text: str) -> str:
        """The line, after the curve of the loss so far if there is room for it."""
        width = shutil.get_terminal_size().columns - 1
        room = min(30, width - len(text) - 2)
        return f"{sparkline(self._losses, room)}  {text}" if room >= 5 else text[:width]
