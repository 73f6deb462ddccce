"""What is made of the numbers of steps when they arrive: the run's lines, its pace, and the check of its losses."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from trellis.checkpoints.checkpoints import LastGood
from trellis.train.assemble import Assembled
from trellis.train.distributed import is_first
from trellis.train.drain import Record
from trellis.train.guard import Guard
from trellis.train.metrics import Meter
from trellis.train.out_of_range import named_tensor
from trellis.train.pace import Pace, tokens_of
from trellis.train.progress import Progress
from trellis.train.stopping import LossNotFinite
from trellis.train.trackers import Tracker

# After this many steps past the first, a run's time is reported again if it is off by more than this share.
_PACED, _OFF = 3, 0.2
# Seconds. A shorter run is not worth a line.
_WORTH_TELLING = 20.0
_UNKNOWN = "takes    unknown until its first steps: no such step has been measured on this machine"
# The median of this many of the newest steps is kept for later runs.
_REMEMBERED = 100


class Lines:
    """Takes the records of steps as they come from the devices.

    Args:
        assembled: the run.
        meter: makes lines of records.
        progress: where the first process shows lines and notes.
        stop: the last step, whose line is always written.
        pace: how fast steps are expected to be.
        tokens: how many tokens the batch of a step has; None if all of them count in its loss.
        validation_batches: how many an evaluation reads; None without evaluations.
        not_finite: steps in a row before the first record whose loss was not finite, and words for what was first so.
        last_good: waits for a checkpoint under way; words about the newest.
        settle: waits for the steps that were handed to the devices.

    Attributes:
        logged: the lines so far.
        trackers: where they go beside progress.
        guard: compares the copies that arrive with records.
        not_finite: as the argument, by now.
    """

    def __init__(
        self,
        assembled: Assembled,
        meter: Meter,
        progress: Progress,
        *,
        stop: int,
        pace: Pace | None,
        tokens: Callable[[int], int] | None,
        validation_batches: int | None,
        not_finite: tuple[int, str],
        last_good: Callable[[], LastGood],
        settle: Callable[[], object],
    ):
        self._assembled, self._run, self._meter, self._progress = assembled, assembled.run, meter, progress
        self._stop, self._pace, self._tokens = stop, pace, tokens
        self._validation_batches, self._last_good, self._settle = validation_batches, last_good, settle
        self.logged: list[dict] = []
        self.trackers: list[Tracker] = []
        self.guard: Guard | None = None
        self.not_finite = not_finite
        self._unchecked: deque[Record] = deque()
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)
        self._made = 0  # steps of this start, of one length

    def take(self, records: Sequence[Record], certain: int) -> None:
        """Logs what came from the device, and checks the losses up to the step `certain`.

        Records arrive at different times on each process; those up to `certain` have arrived on all. Only these may
        stop the run, so that all processes stop at the same step.

        Raises:
            RunStopped: copies differ, or the loss was not finite more often in a row than is allowed.
        """
        for record in records:
            counted = int(record.values.pop("tokens"))
            record.counts = counted > 0
            self._meter.add(record, counted if self._tokens is None else self._tokens(record.step - 1))
            if "out_of_range" in record.values:
                record.first = named_tensor(self._assembled.abstract.model, record.values.pop("out_of_range"))
            self._learn(record)
            self._unchecked.append(record)
            evaluated = "validation_loss" in record.values
            if evaluated or due(record.step, self._run.logging.every) or record.step >= self._stop:
                line, better = self._meter.corrected(self._meter.line(record), self._settle)
                self.note(better)
                self.log(line)
        while self._unchecked and self._unchecked[0].step <= certain:
            self._check(self._unchecked.popleft())

    def log(self, line: dict) -> None:
        """Writes a line everywhere."""
        self.logged.append(line)
        for tracker in self.trackers:
            tracker.log(line)
        if is_first():
            self._progress.update(line)

    def sample(self, step: int, text: str) -> None:
        """Shows a text that the model wrote after a step, and gives it to the trackers."""
        self.note(text)
        for tracker in self.trackers:
            tracker.text("sample", step, text)

    def note(self, text: str) -> None:
        """Shows a text, if there is one."""
        if text and is_first():
            self._progress.note(text)

    def foretell(self, start: int) -> None:
        """Reports how long the run takes from a step on, if that is long enough to be worth a line."""
        stop = min([self._stop, *(first for first in self._assembled.later if first > start)])
        rule, left = self._run.evaluation, range(start + 1, stop + 1)
        if self._pace is None or not left:
            return
        evaluated = self._validation_batches is not None
        times = sum(due(step, rule.every) or step == self._run.steps for step in left) if evaluated else 0
        batches = times * (self._validation_batches or 0)
        if self._pace.seconds(self._run, start, stop, batches) < _WORTH_TELLING:
            return
        if not self._pace.measured:
            self.note(_UNKNOWN)
        else:
            told = self._pace.tell(self._run, start, stop, evaluations=times, validation_batches=batches)
            more = f"; from step {stop + 1} on sequences are longer" if stop < self._stop else ""
            self.note(f"takes    {told}{more}")

    def forget_pace(self) -> None:
        """Measures the pace anew: steps are of another length from here on."""
        self._pace, self._made = None, 0

    @property
    def token_seconds(self) -> float | None:
        """The median time of a step divided by its tokens, without the first steps; None after too few."""
        return statistics.median(self._paces) if len(self._paces) >= _PACED else None

    def _learn(self, record: Record) -> None:
        """Notes a step's pace, and reports it after the first few (the very first compiled) if it differs."""
        self._paces.append(record.seconds / tokens_of(self._run, record.step - 1, record.step))
        self._made += 1
        if self._made == 1:
            self._paces.clear()
        if self._made != 1 + _PACED or (found := self.token_seconds) is None:
            return
        told, self._pace = self._pace, Pace(token_seconds=found, basis="as the first steps did", measured=True)
        if told is None or not told.measured or abs(found / told.token_seconds - 1) > _OFF:
            self.foretell(record.step)

    def _check(self, record: Record) -> None:
        """Stops the run when copies differ, or the loss was not finite more often in a row than is allowed."""
        if self.guard is not None:
            self.guard.check(record.arrays, record.step, self._last_good)
        loss, norm = record.values["loss"], record.values.get("grad_norm", 0.0)
        finite = math.isfinite(norm) and (math.isfinite(loss) or not record.counts)
        times, first = self.not_finite
        times = 0 if finite else times + 1
        if times == 1 and record.first:
            first = f"; the first that was not finite: {record.first}, at step {record.step}"
        self.not_finite = times, first
        if times == 1 and self._run.skip_nonfinite:
            self.note(f"skipped  step {record.step}: loss {loss:.4f}, gradient norm {norm:.4g}")
        if times > self._run.skip_nonfinite:
            raise LossNotFinite(
                "The loss and the gradient must be finite.",
                seen=f"loss {loss}, gradient norm {norm} at step {record.step}, {times} in a row "
                f"(allowed: {self._run.skip_nonfinite}){first}",
                where=self._last_good().where,
                fix="continue with a larger --skip_nonfinite, which skips such steps, or start a new run with a "
                "lower learning rate or clip_norm",
            )


def due(step: int, every: int | None) -> bool:
    """Whether something that is done every so many steps is done after this one."""
    return every is not None and step % every == 0
