"""The training loop: effects only. What a step computes is up to the step."""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from trellis.checkpoints.checkpoints import Checkpoints, LastGood, told_of_last_good
from trellis.checkpoints.room import NoRoom
from trellis.errors import UserError
from trellis.figures.numbers import duration
from trellis.run.folder import check_as_saved
from trellis.run.schema import plain
from trellis.train.anew import told_of_no_lines, told_of_starting_over
from trellis.train.assemble import Assembled
from trellis.train.compilation import CompiledStep
from trellis.train.distributed import is_first
from trellis.train.drain import Drain, Record
from trellis.train.flops import costs
from trellis.train.guard import Guard
from trellis.train.metrics import Meter, Work
from trellis.train.out_of_range import named_tensor
from trellis.train.pace import Pace, tokens_of
from trellis.train.profile import Profiler
from trellis.train.progress import Progress
from trellis.train.stopping import (
    LossNotFinite,
    RunStopped,
    Signals,
    StoppedTogether,
    explain,
    explained_abort,
    leave_at_once,
)
from trellis.train.timeline import Timeline
from trellis.train.together import wait_for_others
from trellis.train.trackers import Tracker, open_trackers, read_lines
from trellis.train.watchdog import Watchdog

# How many steps may be dispatched before the first of them is finished. (More than 32 hang XLA on several CPU devices.)
_AHEAD = 4
# After this many steps past the first, a run's time is reported again if it is off by more than this share.
_PACED, _OFF = 3, 0.2
# Seconds. A shorter run is not worth a line.
_WORTH_TELLING = 20.0
_UNKNOWN = "takes    unknown until its first steps: no such step has been measured on this machine"
# The median of this many of the newest steps is kept for later runs.
_REMEMBERED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What goes into a run's steps, and what is made of their states.

    Attributes:
        batches: `batches(n)` yields `(n, batch), (n + 1, batch), ...`, and has a `close`, as generators and loaders do.
            The batch of a step depends on nothing else.
        tokens: how many tokens the batch of step `n` has; None if all of them count in its loss.
        again: reads the batch of step `n` once more, if a guard is to compare it with what the devices have.
        evaluate: from a state and the number of steps made to scalar arrays, still on the device, with
            `validation_loss` among them.
        validation_batches: how many batches that reads.
        sample: from a state to a text.
        text: what is known about everything that is read, in plain values; checkpoints contain it.
        check_text: takes a checkpoint's `text`, and refuses to resume from one that does not fit.
    """

    batches: Callable[[int], Any]
    tokens: Callable[[int], int] | None = None
    again: Callable[[int], Any] | None = None
    evaluate: Callable[[Any, int], dict[str, jax.Array]] | None = None
    validation_batches: int = 0
    sample: Callable[[Any], str] | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    check_text: Callable[[Mapping[str, Any]], None] = lambda before: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: the last state.
        step: how many steps were made, including those before a resume.
        exit_code: 0, or 128 and a signal's number: a checkpoint was written.
        lines: the lines of metrics that this process logged.
        programs: the compiled steps, one for each shape of a batch.
        token_seconds: the median time of a step divided by its tokens, for the last sequence length and without its
            first steps; None after too few.
    """

    state: Any
    step: int
    exit_code: int
    lines: list[dict]
    programs: list[Any]
    token_seconds: float | None


def train(
    assembled: Assembled,
    feed: Feed,
    folder: str | Path,
    *,
    until: int | None = None,
    work: Work | None = None,
    pace: Pace | None = None,
    progress: Progress | None = None,
    compiled: Callable[[Any, int, Callable[[], LastGood]], str] | None = None,
    first_collective: str | None = None,
) -> Outcome:
    """Trains until the last step or a signal; resumes from the folder's newest checkpoint.

    Args:
        assembled: the run on its devices.
        feed: its batches, its evaluation, its samples.
        folder: the run's folder. It gets `metrics.jsonl`, `timeline.jsonl`, `checkpoints/`, and `samples.jsonl` and
            `profile/` on request; a `run.yaml` in it is copied into each checkpoint.
        until: pause after this step, with a checkpoint; None trains to the end.
        work: what a token costs at the first of the run's sequence lengths, for MFU.
        pace: how fast steps are expected to be, which is reported before the first.
        progress: where progress is shown; the default is stderr.
        compiled: takes a compiled program, the number of steps before it, and a function that names the last good
            checkpoint, and returns what to report about the program. It is called while the devices make the program's
            first step.
        first_collective: words for the first collective of a step, for the message of a step that does not end.

    Raises:
        RunStopped: the loss was not finite too often, copies of the state differed, the compiled step does not do what
            its types say, or memory did not suffice. The message names the last good checkpoint. (A step past its
            deadline ends the process, with the same exit code.)
    """
    folder = Path(folder)
    run_file = folder / "run.yaml"
    copy = (run_file,) if run_file.exists() else ()
    rule = assembled.run.checkpoints
    keep = {"keep_latest": rule.keep_latest, "keep_every": rule.keep_every}
    with (
        Checkpoints(folder / "checkpoints", copy=copy, **keep) as saved,
        Signals() as signals,
        explained_abort(lambda: _last_good(saved, others_live=False)),
    ):
        try:
            loop = _Loop(assembled, feed, folder, saved, signals, until, compiled, pace)
            return loop.go(work, progress, first_collective)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # the second
                saved.leave()
            told = explain(error, _last_good(saved, others_live=jax.process_count() == 1))
            if jax.process_count() > 1 and not isinstance(told, StoppedTogether):
                leave_at_once(told)
            if told is error:
                raise
            raise told from error


class _Loop:
    """One run's loop with what it holds open."""

    def __init__(
        self,
        assembled: Assembled,
        feed: Feed,
        folder: Path,
        saved: Checkpoints,
        signals: Signals,
        until: int | None,
        compiled: Callable[[Any, int, Callable[[], LastGood]], str] | None,
        pace: Pace | None,
    ):
        self._assembled, self._run, self._feed, self._folder = assembled, assembled.run, feed, folder
        self._saved, self._signals, self._compiled, self._pace = saved, signals, compiled, pace
        self._stop = self._run.steps if until is None else min(self._run.steps, until)
        self._not_finite, self._first = 0, ""  # steps in a row, and words for what was first in them
        self._made, self._owed = 0, False  # steps of this start; a sample after the last of them
        self._newest: Any = None
        self._unchecked: deque[Record] = deque()
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)
        self._lines: list[dict] = []
        self._trackers: list[Tracker] = []
        self._programs: list[Any] = []
        self._drain: Drain | None = None
        self._timeline = Timeline(folder / "timeline.jsonl" if is_first() else None)

    def go(self, work: Work | None, progress: Progress | None, first_collective: str | None) -> Outcome:
        assembled, run = self._assembled, self._run
        restored = self._saved.restore(assembled.abstract, resizable={"vocab": run.model.vocab})
        start, data = (0, dict[str, Any](tokens=0)) if restored is None else (restored.step, restored.data)
        state = assembled.init() if restored is None else assembled.at(start - 1).takes(restored.state)
        if restored is not None:
            check_as_saved(run, self._folder, self._saved.path(start))
            self._feed.check_text(data.get("text", {}))
        self._progress = progress or Progress(run.steps, stop=self._stop)
        anew = "" if restored is not None else told_of_starting_over(self._folder)
        self._note(f"resuming after step {start}, from {self._saved.path(start)}" if start else anew)
        if is_first():
            self._note(told_of_no_lines(self._folder, start))
        del restored  # the step will donate its arrays
        self._not_finite, self._first = data.get("not_finite", (0, ""))
        self._timeline.add("resumed" if start else "started", start)
        self._foretell(start)
        self._meter = Meter(tokens=data["tokens"], spent=data.get("seconds", 0.0), work=work)
        try:
            with contextlib.ExitStack() as self._open:
                self._open.callback(self._progress.close)
                self._watch = Watchdog(
                    run.deadline,
                    self._folder,
                    lambda: _last_good(self._saved, others_live=False),
                    first_collective=first_collective,
                    noted=lambda event, why: self._timeline.add(event, None, why=why),
                )
                self._open.callback(self._watch.close)
                if is_first():
                    self._trackers = open_trackers(run.logging.trackers, self._folder, step=start, config=plain(run))
                for tracker in self._trackers:
                    self._open.callback(tracker.close)
                if data.get("owed") and start < run.steps:
                    self._sample(state, start)
                state, made, exit_code = self._steps(state, start)
                self._watch.close()
                if made >= run.steps:
                    self._sample(state, made)
            self._timeline.add("finished" if made >= run.steps else "interrupted" if exit_code else "paused", made)
        except Exception as error:
            self._timeline.add("stopped", None, why=str(error).splitlines()[0] if str(error) else type(error).__name__)
            if (told := self._stopped(error)) is error:
                raise
            raise told from error
        return Outcome(
            state=state,
            step=made,
            exit_code=exit_code,
            lines=self._lines,
            programs=self._programs,
            token_seconds=self._measured(),
        )

    def _enter(self, phase: Assembled, state: Any, index: int) -> tuple[CompiledStep, Any]:
        """The step for sequences of one length, and the state for it. Measurements of steps start anew."""
        if self._drain is not None:
            self._handle(self._drain.flush(), certain=index)
            size, length = phase.abstract_batch(index).shape
            self._note(f"from step {index + 1} on, sequences of {length:,} tokens, {size:,} in a step")
            self._timeline.add("length", index, sequence_length=length, batch_size=size)
            self._pace, self._made = None, 0
        if phase is not self._assembled and self._meter.work is not None:
            self._meter.work = dataclasses.replace(self._meter.work, **costs(phase))
        self._watch.forget()
        self._drain = Drain(max_ahead=_AHEAD, finished=self._watch.finished)
        self._open.callback(self._drain.close)
        self._guard = Guard(phase)
        return CompiledStep(phase.step, phase.compiler_options), phase.takes(state)

    def _steps(self, state: Any, start: int) -> tuple[Any, int, int]:
        """Trains from `start` to the end: the state, how many steps were made, and the exit code."""
        run, made = self._run, start
        profile = Profiler(self._folder / "profile", run.profile if is_first() else None)
        if start >= self._stop:
            if start == 0:  # only the first state was asked for
                self._save(state, start)
                self._saved.wait()
            elif start >= run.steps:
                self._measure_last(state, start)
            return state, start, 0
        batches = self._open.enter_context(contextlib.closing(self._feed.batches(start)))
        asked, phase = time.perf_counter(), None
        for index, batch in batches:
            waited = (asked, time.perf_counter())
            made = index + 1
            profile.before(index)
            if phase is not self._assembled.at(index):
                phase = self._assembled.at(index)
                with self._watch.excused("goes on to another length of sequences"):
                    step, state = self._enter(phase, state, index)
            anew = not step.is_compiled(batch)
            self._watch.doing(f"hands over step {made}")
            with self._watch.excused("compiles the step") if anew else contextlib.nullcontext():
                if anew:
                    self._compile(step, state, batch, index)
                replayed = self._guard.replay(step, state, batch, made)
                handed = time.perf_counter()
                state, metrics = step(state, batch)
            self._watch.doing(f"waits for the devices, which have steps up to {made}", dispatched=made)
            self._newest = metrics
            self._drain.push(made, metrics, waited, handed)
            if anew and self._compiled is not None:
                with self._watch.excused("reads the compiled step"):
                    last_good = lambda: _last_good(self._saved, others_live=True)
                    self._note(self._compiled(step.programs[-1], index, last_good))
                self._drain.excuse()
            if profile.ends(index, metrics):
                with self._watch.excused("writes the profile"):
                    profile.close()
                self._drain.excuse()
            exit_code = self._signals.exit_code()
            last = made >= self._stop or exit_code is not None
            save = last or _due(made, run.checkpoints.every)
            again = self._feed.again and functools.partial(self._feed.again, index)
            if compared := replayed | self._guard.digests(state, batch, made, save=save, again=again):
                self._drain.add(compared)
            if self._feed.evaluate is not None and (made >= run.steps or _due(made, run.evaluation.every)):
                with self._watch.excused(f"evaluates after step {made}"):
                    self._drain.add(self._feed.evaluate(state, made))
                self._timeline.add("evaluation", made)
                if run.evaluation.sample and made < run.steps:
                    self._owed = exit_code is not None  # whoever sends a signal may not wait for a text
                    if not self._owed:
                        self._handle(self._drain.flush(), certain=made)  # trackers want steps in their order
                        self._sample(state, made)
                        self._drain.excuse()
            self._handle(self._drain.poll(), certain=made - _AHEAD - 1)
            if save:
                # What is saved is known to be good: every loss up to it was checked, and its copies were compared.
                self._handle(self._drain.flush(), certain=made)
                self._save(state, made)
            if last:
                profile.close()
                with self._watch.excused(f"writes the checkpoint of step {made}"):
                    self._saved.wait()
                return state, made, exit_code or 0
            self._watch.doing(f"waits for the batch of step {made + 1}")
            asked = time.perf_counter()
        raise UserError(
            "The data must last as long as the run.",
            seen=f"{made - start} batches for {run.steps - start} steps",
            where=str(self._folder),
            fix="repeat the data, or train for fewer steps",
        )

    def _compile(self, step: CompiledStep, state: Any, batch: Any, index: int) -> None:
        """Compiles a step for batches of a new shape. The time counts neither for a step nor for the pace."""
        self._handle(self._drain.flush(), certain=index)
        began = time.perf_counter()
        step.compile(state, batch)
        seconds = time.perf_counter() - began
        wait_for_others(f"compiled step {index + 1}")
        self._note(f"compiled the step in {duration(seconds)}")
        self._timeline.add("compiled", index, seconds=seconds)
        self._programs.append(step.programs[-1])
        self._drain.excuse()
        self._progress.forget()

    def _stopped(self, error: Exception) -> Exception:
        """The error that ended the run between steps. If its data went away, the message says what was saved."""
        if self._newest is None or not isinstance(error, UserError) or isinstance(error, RunStopped | NoRoom):
            return error
        last_good = _last_good(self._saved, others_live=jax.process_count() == 1)
        return RunStopped(
            error.rule,
            seen=f"{error.seen}, at {error.where}",
            where=last_good.where,
            fix=f"{error.fix}; then {last_good.again}",
        )

    def _save(self, state: Any, made: int) -> None:
        with self._watch.excused(f"saves after step {made}"):
            data = {
                "tokens": self._meter.tokens,
                "seconds": self._meter.spent,
                "not_finite": (self._not_finite, self._first),
                "text": dict(self._feed.text),
                "owed": self._owed,
            }
            new = self._saved.save(made, state, data=data)
        if new:
            self._timeline.add("checkpoint", made)

    def _handle(self, records: Sequence[Record], certain: int) -> None:
        """Logs what came from the device, and checks the losses up to the step `certain`.

        Records arrive at different times on each process; those up to `certain` have arrived on all. Only these may
        stop the run, so that all processes stop at the same step.
        """
        for record in records:
            counted, read = int(record.values.pop("tokens")), self._feed.tokens
            record.counts = counted > 0
            self._meter.add(record, counted if read is None else read(record.step - 1))
            if "out_of_range" in record.values:
                record.first = named_tensor(self._assembled.abstract.model, record.values.pop("out_of_range"))
            self._learn(record)
            self._unchecked.append(record)
            evaluated = "validation_loss" in record.values
            if evaluated or _due(record.step, self._run.logging.every) or record.step >= self._stop:
                line, better = self._meter.corrected(self._meter.line(record), self._settle)
                self._note(better)
                self._lines.append(line)
                for tracker in self._trackers:
                    tracker.log(line)
                if is_first():
                    self._progress.update(line)
        while self._unchecked and self._unchecked[0].step <= certain:
            self._check(self._unchecked.popleft())

    def _foretell(self, start: int) -> None:
        """Reports how long the run takes from a step on, if that is long enough to be worth a line."""
        stop = min([self._stop, *(first for first in self._assembled.later if first > start)])
        rule, left = self._run.evaluation, range(start + 1, stop + 1)
        if self._pace is None or not left:
            return
        evaluated = self._feed.evaluate is not None
        times = sum(_due(step, rule.every) or step == self._run.steps for step in left) if evaluated else 0
        batches = times * self._feed.validation_batches
        if self._pace.seconds(self._run, start, stop, batches) < _WORTH_TELLING:
            return
        if not self._pace.measured:
            self._note(_UNKNOWN)
        else:
            told = self._pace.tell(self._run, start, stop, evaluations=times, validation_batches=batches)
            more = f"; from step {stop + 1} on sequences are longer" if stop < self._stop else ""
            self._note(f"takes    {told}{more}")

    def _settle(self) -> None:
        """Waits for the steps that were handed to the devices."""
        jax.block_until_ready(self._newest)

    def _learn(self, record: Record) -> None:
        """Notes a step's pace, and reports it after the first few (the very first compiled) if it differs."""
        self._paces.append(record.seconds / tokens_of(self._run, record.step - 1, record.step))
        self._made += 1
        if self._made == 1:
            self._paces.clear()
        if self._made != 1 + _PACED or (found := self._measured()) is None:
            return
        told, self._pace = self._pace, Pace(token_seconds=found, basis="as the first steps did", measured=True)
        if told is None or not told.measured or abs(found / told.token_seconds - 1) > _OFF:
            self._foretell(record.step)

    def _measured(self) -> float | None:
        return statistics.median(self._paces) if len(self._paces) >= _PACED else None

    def _check(self, record: Record) -> None:
        """Stops the run when copies differ, or the loss was not finite more often in a row than is allowed."""
        self._guard.check(record.arrays, record.step, lambda: _last_good(self._saved, others_live=True))
        loss, norm = record.values["loss"], record.values.get("grad_norm", 0.0)
        finite = math.isfinite(norm) and (math.isfinite(loss) or not record.counts)
        self._not_finite = 0 if finite else self._not_finite + 1
        if self._not_finite == 1 and record.first:
            self._first = f"; the first that was not finite: {record.first}, at step {record.step}"
        if self._not_finite == 1 and self._run.skip_nonfinite:
            self._note(f"skipped  step {record.step}: loss {loss:.4f}, gradient norm {norm:.4g}")
        if self._not_finite > self._run.skip_nonfinite:
            raise LossNotFinite(
                "The loss and the gradient must be finite.",
                seen=f"loss {loss}, gradient norm {norm} at step {record.step}, {self._not_finite} in a row "
                f"(allowed: {self._run.skip_nonfinite}){self._first}",
                where=_last_good(self._saved, others_live=True).where,
                fix="continue with a larger --skip_nonfinite, which skips such steps, or start a new run with a "
                "lower learning rate or clip_norm",
            )

    def _measure_last(self, state: Any, made: int) -> None:
        """Evaluates the last state of a run that was paused at the step that is its last now, if that was not done."""
        last = next(reversed(read_lines(self._folder / "metrics.jsonl")), {})
        last = last if last.get("step") == made else {"step": made, "tokens": self._meter.tokens}
        if self._feed.evaluate is None or "validation_loss" in last:
            return
        with self._watch.excused(f"evaluates after step {made}"):
            found = {name: float(value) for name, value in self._feed.evaluate(state, made).items()}
        self._timeline.add("evaluation", made)
        line = last | {name: value if math.isfinite(value) else None for name, value in found.items()}
        self._lines.append(line)
        for tracker in self._trackers:
            tracker.log(line)
        if is_first():
            self._progress.update(line)

    def _sample(self, state: Any, step: int) -> None:
        if self._feed.sample is None:
            return
        with self._watch.excused(f"samples after step {step}"):
            text = self._feed.sample(state)
        self._note(text)
        for tracker in self._trackers:
            tracker.text("sample", step, text)

    def _note(self, text: str) -> None:
        if text and is_first():
            self._progress.note(text)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _last_good(saved: Checkpoints, others_live: bool) -> LastGood:
    """Words about the last good checkpoint; one under way is waited for if its processes are alive."""
    if others_live:
        with contextlib.suppress(Exception):
            saved.wait()
    return told_of_last_good(saved.folder)
