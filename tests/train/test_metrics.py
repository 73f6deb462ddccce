"""The lines of a run: their keys, their rates, where they go, what is shown."""

import io
import json
import math
import os
import pty
import sys
import types

import pytest

from trellis.errors import UserError
from trellis.train.drain import Record
from trellis.train.metrics import Meter, Work, memory_bytes
from trellis.train.progress import Progress
from trellis.train.trackers import JsonLines, open_trackers, read_lines


def record(step, start, end, loss=1.5, **values):
    return Record(
        step=step,
        values={"loss": loss, **values},
        dispatched=start,
        idle_from=start,
        done=end,
        waited=(start, start + 0.25),
    )


def test_an_mfu_over_one_has_the_peak_measured_again_and_says_so():
    """Products measured on a busy machine: 800 FLOP/s, where a step of 100 tokens of 10 FLOPs takes a second."""
    peaks, waited = iter([4000.0, 900.0]), []
    work = Work(flops_per_token=10.0, noncausal_flops_per_token=12.0, peak_flops=800.0, measure_again=peaks.__next__)

    def line_of(meter):
        meter.add(record(1, 0.0, 1.0), 100)
        return meter.line(record(1, 0.0, 1.0))

    meter = Meter(tokens=0, work=work)
    line = line_of(meter)
    assert line["mfu"] == 1.25
    line, told = meter.corrected(line, lambda: waited.append(True))
    assert (line["mfu"], line["mfu_noncausal"], waited) == (0.25, 0.3, [True])
    assert told == (
        "peak     a step beat 800 FLOP/s, the peak that MFU was counted against; now 4.00 kFLOP/s, measured again"
    )
    assert line_of(meter)["mfu"] == 0.25  # later ones count against it too
    meter = Meter(tokens=0, work=work)  # what is measured again is still less than what the step did
    line, told = meter.corrected(line_of(meter), lambda: None)
    assert line["mfu"] == 1.0 and told.endswith("now 1.00 kFLOP/s, which the step did: measured again it is no higher")
    assert meter.corrected(line, lambda: None) == (line, "")
    meter = Meter(tokens=0, work=Work(flops_per_token=10.0, peak_flops=800.0))  # a published peak stays
    assert meter.corrected(line_of(meter), lambda: None)[1] == ""


def test_rates_are_over_the_steps_since_the_line_before():
    work = Work(flops_per_token=10.0, noncausal_flops_per_token=12.0, peak_flops=4000.0)
    meter = Meter(tokens=1000, work=work)
    meter.add(record(5, 0.0, 1.0), 100)
    meter.add(record(6, 1.0, 4.0), 100)
    line = meter.line(record(6, 1.0, 4.0, loss=0.5, learning_rate=0.1, grad_norm=2.0))
    memory = line.pop("memory_bytes")
    assert line == {
        "step": 6,
        "tokens": 1200,
        "loss": 0.5,
        "learning_rate": 0.1,
        "grad_norm": 2.0,
        "tokens_per_second": 50.0,
        "mfu": 0.125,
        "mfu_noncausal": 0.15,
        "seconds": 4.0,
        "step_seconds": 2.0,
        "data_wait_seconds": 0.25,
    }
    assert memory == pytest.approx(memory_bytes(), rel=0.5)
    meter.add(record(7, 4.0, 5.0), 100)
    assert meter.line(record(7, 4.0, 5.0))["tokens_per_second"] == 100.0
    # Over a second at least: rates are over steps of lines before, too, and the time is not.
    meter.add(record(8, 5.0, 5.25), 100)
    line = meter.line(record(8, 5.0, 5.25))
    assert (line["seconds"], line["step_seconds"]) == (0.25, 0.625)


def test_the_seconds_before_a_resume_are_in_the_line_after_it():
    meter = Meter(tokens=300, spent=2.5)
    meter.add(record(4, 0.0, 1.0), 100)
    assert meter.spent == 3.5, "which a checkpoint has that is saved now"
    line = meter.line(record(4, 0.0, 1.0))
    assert (line["seconds"], line["step_seconds"], meter.spent) == (3.5, 1.0, 0.0)


def test_rates_begin_anew_where_a_token_costs_something_else():
    meter = Meter(tokens=0, work=Work(flops_per_token=10.0, peak_flops=4000.0))
    meter.add(record(1, 0.0, 8.0), 100)
    meter.work = Work(flops_per_token=20.0, peak_flops=4000.0)
    meter.add(record(2, 8.0, 9.0), 100)
    line = meter.line(record(2, 8.0, 9.0))
    assert (line["tokens"], line["tokens_per_second"], line["mfu"]) == (200, 100.0, 0.5)


def test_rates_of_short_steps_are_over_a_second():
    """Two steps whose ends were seen together do not make a rate of their own."""
    meter = Meter(tokens=0, work=None)
    ends = [0.0, 0.4, 0.8, 1.2, 1.599, 1.6, 3.6]
    rates = []
    for step, (start, end) in enumerate(zip(ends, ends[1:]), start=1):
        meter.add(record(step, start, end), 10)
        rates.append(meter.line(record(step, start, end))["tokens_per_second"])
    assert rates[:3] == pytest.approx([25, 25, 25])
    assert rates[4] == pytest.approx(40 / 1.2), "the last second's steps"
    assert rates[5] == pytest.approx(10 / 2.0), "a step that is long enough speaks for itself"


def test_what_is_not_finite_or_not_known_is_none():
    meter = Meter(tokens=0, work=Work(flops_per_token=10.0, peak_flops=None))
    meter.add(record(1, 0.0, 1.0), 10)
    line = meter.line(record(1, 0.0, 1.0, loss=math.nan))
    assert line["loss"] is None and line["mfu"] is None
    json.dumps(line, allow_nan=False)


def test_a_resumed_run_cuts_the_lines_past_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.log({"step": step, "loss": 1.0 / step})
    lines.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    again = JsonLines(path, step=2)
    again.log({"step": 3, "loss": None})
    again.close()
    assert read_lines(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": None}]
    JsonLines(path).close()
    assert read_lines(path) == [], "a run that begins anew keeps nothing"


def test_a_run_that_had_ended_has_its_sample_once(tmp_path):
    for text in ("a sample", "a sample", "another"):
        tracker = JsonLines(tmp_path / "metrics.jsonl", step=20)
        tracker.text("sample", 20, text)
        tracker.close()
    assert [line["text"] for line in read_lines(tmp_path / "samples.jsonl", str)] == ["a sample", "another"]


@pytest.mark.parametrize("broken", ["not json", "[]", '{"loss": 1.0}', '{"step": 2, "loss": "NaN"}'])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match="Every line of `metrics.jsonl` must be a JSON object with a step and") as error:
        JsonLines(path, step=1)
    assert error.value.where == f"{path}, line 2"


def test_trackers_have_known_names_and_are_installed(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="A tracker must have a known name") as error:
        open_trackers(["tensorbord"], tmp_path)
    assert error.value.fix == "did you mean `tensorboard`?"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="The package of a tracker must be installed") as error:
        open_trackers(["wandb"], tmp_path)
    assert error.value.fix == "pip install 'trellis[wandb]', or leave the tracker out"


def test_wandb_goes_on_under_the_same_id_and_offline(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    fake = types.SimpleNamespace(init=lambda **kw: calls.append(kw) or Run(), Html=lambda text: text)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for _ in range(2):
        lines, tracker = open_trackers(["wandb"], tmp_path, config={"steps": 3})
        tracker.log({"step": 1, "loss": 2.0, "mfu": None})
        tracker.text("sample", 1, "a < b")
        tracker.close()
        lines.close()
    first, log, text, end, second = calls[:5]
    assert first["mode"] == "offline" and first["config"] == {"steps": 3} and first["resume"] == "allow"
    assert first["id"] == second["id"]

    (tmp_path / "wandb-id").write_text("")  # of a run that was killed between the file and what is in it
    open_trackers(["wandb"], tmp_path)[0].close()
    assert len(calls[-1]["id"]) == 8, "of an empty one, Weights & Biases makes an error"
    assert (log, text, end) == ((1, {"loss": 2.0}), (1, {"sample": "<pre>a &lt; b</pre>"}), "finish")


@pytest.mark.slow
def test_tensorboard_writes_events(tmp_path):
    json_lines, board = open_trackers(["tensorboard"], tmp_path)
    board.log({"step": 1, "loss": 2.0, "mfu": None})
    board.text("sample", 1, "hello")
    board.close()
    json_lines.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"loss" in content and b"hello" in content and b"mfu" not in content


class Terminal(io.StringIO):
    def isatty(self):
        return True


LINE = {
    "mfu_noncausal": 0.33,
    "step": 20,
    "loss": 3.21,
    "tokens_per_second": 1200.0,
    "mfu": 0.31,
    "memory_bytes": 3 << 30,
}


def test_progress_in_a_pipe_is_plain_lines():
    stream = io.StringIO()
    progress = Progress(100, stream=stream, every=1000.0)
    progress.update(LINE)
    progress.update({**LINE, "step": 30})
    progress.update({**LINE, "step": 40, "validation_loss": 3.5, "bits_per_byte": 1.25})
    progress.update({**LINE, "step": 100, "loss": None})
    progress.note("a note")
    progress.close()
    shown = stream.getvalue()
    assert "\r" not in shown and "\x1b" not in shown
    first, evaluated, last, note = shown.splitlines()
    assert first == "step 20/100  loss 3.2100  1.20k tok/s  MFU 31.0 % (33.0 % non-causal)  3.00 GiB", (
        "one line has no pace yet"
    )
    assert "validation 3.5000  1.2500 bits/byte" in evaluated and "  left " in evaluated
    assert last == "step 100/100  loss not finite  1.20k tok/s  MFU 31.0 % (33.0 % non-causal)  3.00 GiB"
    assert note == "a note"


@pytest.mark.parametrize("ends", [os.pipe, pty.openpty], ids=["`| tee`", "terminal"])
def test_a_run_whose_reader_is_gone_goes_on(ends):
    """As where Ctrl-C ends `tee` at once, before the run has saved, or where a terminal is closed."""
    reader, writer = ends()
    with open(writer, "w") as stream:
        progress = Progress(100, stream=stream, every=0.0)
        os.close(reader)
        progress.update(LINE)
        progress.note("a note")
        progress.update({**LINE, "step": 30})
        progress.close()


def test_a_run_that_pauses_shows_its_last_step():
    progress = Progress(100, stream=(stream := io.StringIO()), every=1000.0)
    progress.update(LINE)
    progress.update({**LINE, "step": 30})
    progress.close()
    progress.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 20/100", "step 30/100"]


def test_time_left_is_that_to_a_pause(monkeypatch):
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("trellis.train.progress.time.monotonic", lambda: next(clock))
    progress = Progress(100, stop=40, stream=(stream := io.StringIO()))
    for step in (20, 30, 40):
        progress.update({**LINE, "step": step})
    _, before, last = stream.getvalue().splitlines()
    assert before.startswith("step 30/100") and before.endswith("left 10 s")
    assert last.startswith("step 40/100") and "left" not in last


def test_lines_that_come_together_take_no_less_than_their_steps_did(monkeypatch):
    """As with a line a step, after a compilation that steps waited for."""
    clock = iter([0.0, 0.002, 0.004])
    monkeypatch.setattr("trellis.train.progress.time.monotonic", lambda: next(clock))
    progress = Progress(100, stream=(stream := io.StringIO()), every=0.0)
    for step in (10, 20, 30):
        progress.update({**LINE, "step": step, "seconds": 5.0})
    assert [line.partition("  left ")[2] for line in stream.getvalue().splitlines()] == ["", "40 s", "35 s"]


def test_a_laptop_that_slept_is_no_part_of_the_pace(monkeypatch):
    """What takes long again and again, as evaluations do, is."""
    clock = iter([0.0, 1.0, 3601.0, 3602.0, 3610.0, 3618.0])
    monkeypatch.setattr("trellis.train.progress.time.monotonic", lambda: next(clock))
    progress = Progress(100, stream=(stream := io.StringIO()), every=0.0)
    for step in (10, 20, 30, 40, 50, 60):
        progress.update({**LINE, "step": step})
    lefts = [line.partition("  left ")[2] for line in stream.getvalue().splitlines()]
    assert lefts == ["", "8 s", "7 s", "6 s", "17 s", "18 s"]


def test_progress_on_a_terminal_rewrites_its_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = Progress(100, stream=stream)
    for step, loss in ((25, 4.0), (50, 2.0), (100, 1.0)):
        progress.update({**LINE, "step": step, "loss": loss})
    progress.close()
    _, *bars = stream.getvalue().split("\r\x1b[K")
    assert [bar.split("  ")[0] for bar in bars] == ["▁", "█▁", "█▃▁"], "the curve of the loss so far"
    assert bars[-1].endswith("\n") and all(len(bar.rstrip()) < 120 for bar in bars)
