"""The training loop: effects only. What a step computes is up to the step."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
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
from trellis.train.drain import Drain
from trellis.train.flops import costs
from trellis.train.guard import Guard
from trellis.train.lines import Lines, due
from trellis.train.metrics import Meter, Work
from trellis.train.pace import Pace
from trellis.train.profile import Profiler
from trellis.train.progress import Progress
from trellis.train.stopping import (
    RunStopped,
    Signals,
    StoppedTogether,
    explain,
    explained_abort,
    leave_at_once,
)
from trellis.train.timeline import Timeline
from trellis.train.together import wait_for_others
from trellis.train.trackers import open_trackers, read_lines
from trellis.train.watchdog import Watchdog

# How many steps may be dispatched before the first of them is finished. (More than 32 hang XLA on several CPU devices.)
_AHEAD = 4


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
        self._owed = False  # a sample after the last step of this start
        self._newest: Any = None
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
        self._meter = Meter(tokens=data["tokens"], spent=data.get("seconds", 0.0), work=work)
        self._lines = Lines(
            assembled,
            self._meter,
            self._progress,
            stop=self._stop,
            pace=self._pace,
            tokens=self._feed.tokens,
            validation_batches=None if self._feed.evaluate is None else self._feed.validation_batches,
            not_finite=tuple(data.get("not_finite", (0, ""))),
            last_good=lambda: _last_good(self._saved, others_live=True),
            settle=lambda: jax.block_until_ready(self._newest),
        )
        anew = "" if restored is not None else told_of_starting_over(self._folder)
        self._lines.note(f"resuming after step {start}, from {self._saved.path(start)}" if start else anew)
        if is_first():
            self._lines.note(told_of_no_lines(self._folder, start))
        del restored  # the step will donate its arrays
        self._timeline.add("resumed" if start else "started", start)
        self._lines.foretell(start)
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
                    kinds = run.logging.trackers
                    self._lines.trackers = open_trackers(kinds, self._folder, step=start, config=plain(run))
                for tracker in self._lines.trackers:
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
            lines=self._lines.logged,
            programs=self._programs,
            token_seconds=self._lines.token_seconds,
        )

    def _enter(self, phase: Assembled, state: Any, index: int) -> tuple[CompiledStep, Any]:
        """The step for sequences of one length, and the state for it. Measurements of steps start anew."""
        if self._drain is not None:
            self._lines.take(self._drain.flush(), certain=index)
            size, length = phase.abstract_batch(index).shape
            self._lines.note(f"from step {index + 1} on, sequences of {length:,} tokens, {size:,} in a step")
            self._timeline.add("length", index, sequence_length=length, batch_size=size)
            self._lines.forget_pace()
        if phase is not self._assembled and self._meter.work is not None:
            self._meter.work = dataclasses.replace(self._meter.work, **costs(phase))
        self._watch.forget()
        self._drain = Drain(max_ahead=_AHEAD, finished=self._watch.finished)
        self._open.callback(self._drain.close)
        self._guard = self._lines.guard = Guard(phase)
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
            state, metrics, replayed = self._hand_over(step, state, batch, made, waited)
            if profile.ends(index, metrics):
                with self._watch.excused("writes the profile"):
                    profile.close()
                self._drain.excuse()
            exit_code = self._signals.exit_code()
            last = made >= self._stop or exit_code is not None
            save = last or due(made, run.checkpoints.every)
            again = self._feed.again and functools.partial(self._feed.again, index)
            if compared := replayed | self._guard.digests(state, batch, made, save=save, again=again):
                self._drain.add(compared)
            if (evaluate := self._feed.evaluate) and (made >= run.steps or due(made, run.evaluation.every)):
                self._evaluate(evaluate, state, made, stops=exit_code is not None)
            self._lines.take(self._drain.poll(), certain=made - _AHEAD - 1)
            if save:
                # What is saved is known to be good: every loss up to it was checked, and its copies were compared.
                self._lines.take(self._drain.flush(), certain=made)
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

    def _hand_over(
        self, step: CompiledStep, state: Any, batch: Any, made: int, waited: tuple[float, float]
    ) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
        """Hands a step to the devices, and compiles it first if its batch has a new shape.

        Args:
            step: the step, which donates its state.
            state, batch: its arguments.
            made: how many steps will have been made after it.
            waited: when the wait for the batch began and ended.

        Returns:
            The state and the metrics to be, and digests of the same step on a copy, if it was made twice.
        """
        anew = not step.is_compiled(batch)
        self._watch.doing(f"hands over step {made}")
        with self._watch.excused("compiles the step") if anew else contextlib.nullcontext():
            if anew:
                self._compile(step, state, batch, made - 1)
            replayed = self._guard.replay(step, state, batch, made)
            handed = time.perf_counter()
            state, metrics = step(state, batch)
        self._watch.doing(f"waits for the devices, which have steps up to {made}", dispatched=made)
        self._newest = metrics
        self._drain.push(made, metrics, waited, handed)
        if anew and self._compiled is not None:
            with self._watch.excused("reads the compiled step"):
                last_good = lambda: _last_good(self._saved, others_live=True)
                self._lines.note(self._compiled(step.programs[-1], made - 1, last_good))
            self._drain.excuse()
        return state, metrics, replayed

    def _evaluate(self, evaluate: Callable, state: Any, made: int, stops: bool) -> None:
        """Evaluates a state, and writes a sample if the run asks for one and does not end here."""
        with self._watch.excused(f"evaluates after step {made}"):
            self._drain.add(evaluate(state, made))
        self._timeline.add("evaluation", made)
        if self._run.evaluation.sample and made < self._run.steps:
            self._owed = stops  # whoever sends a signal may not wait for a text
            if not self._owed:
                self._lines.take(self._drain.flush(), certain=made)  # trackers want steps in their order
                self._sample(state, made)
                self._drain.excuse()

    def _compile(self, step: CompiledStep, state: Any, batch: Any, index: int) -> None:
        """Compiles a step for batches of a new shape. The time counts neither for a step nor for the pace."""
        self._lines.take(self._drain.flush(), certain=index)
        began = time.perf_counter()
        step.compile(state, batch)
        seconds = time.perf_counter() - began
        wait_for_others(f"compiled step {index + 1}")
        self._lines.note(f"compiled the step in {duration(seconds)}")
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
                "not_finite": self._lines.not_finite,
                "text": dict(self._feed.text),
                "owed": self._owed,
            }
            new = self._saved.save(made, state, data=data)
        if new:
            self._timeline.add("checkpoint", made)

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
        self._lines.log(line)

    def _sample(self, state: Any, step: int) -> None:
        if self._feed.sample is None:
            return
        with self._watch.excused(f"samples after step {step}"):
            text = self._feed.sample(state)
        self._lines.sample(step, text)


def _last_good(saved: Checkpoints, others_live: bool) -> LastGood:
    """Words about the last good checkpoint; one under way is waited for if its processes are alive."""
    if others_live:
        with contextlib.suppress(Exception):
            saved.wait()
    return told_of_last_good(saved.folder)
