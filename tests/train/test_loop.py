"""The loop: one compilation, no waiting for the device, resuming to the bit, and every way to stop."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train.toy import mesh_of, run_of, toy
from trellis.checkpoints.checkpoints import Checkpoints
from trellis.errors import UserError
from trellis.run import config
from trellis.run.config import Evaluation
from trellis.train import loop
from trellis.train.compilation import CompiledStep, use_persistent_cache
from trellis.train.drain import Drain
from trellis.train.loop import Feed, train
from trellis.train.progress import Progress
from trellis.train.stopping import LossNotFinite, RunStopped
from trellis.train.trackers import read_lines

EVERY = run_of(12, every=3, evaluation=Evaluation(every=5))


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The same small programs are compiled in every test: keep them."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    use_persistent_cache(tmp_path_factory.mktemp("compiled"))
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture
def mesh():
    mesh = mesh_of(2, 2)
    with jax.set_mesh(mesh):
        yield mesh


def quiet():
    return Progress(12, stream=io.StringIO())


def raw(tree):
    keys = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return [np.asarray(x) for x in jax.tree.leaves(keys)]


def losses(folder):
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_that_is_asked_to_samples_at_each_evaluation(tmp_path, mesh, monkeypatch):
    run = dataclasses.replace(EVERY, evaluation=dataclasses.replace(EVERY.evaluation, sample=True))
    told: list[int] = []
    noted = types.SimpleNamespace(
        log=lambda line: told.append(line["step"]), text=lambda _, step, __: told.append(step), close=lambda: None
    )
    opened = loop.open_trackers
    with monkeypatch.context() as patched:
        patched.setattr(loop, "open_trackers", lambda *args, **how: [*opened(*args, **how), noted])
        train(*toy(mesh, run), tmp_path)
    assert told == sorted(told), "Weights & Biases drops what is of an earlier step than it has heard of"
    samples = [(sample["step"], sample["text"]) for sample in read_lines(tmp_path / "samples.jsonl", str)]
    assert samples == [(step, f"a sample after {step} steps") for step in (5, 10, 12)]
    train(*toy(mesh, run), tmp_path / "paused", until=5)
    assert [sample["step"] for sample in read_lines(tmp_path / "paused" / "samples.jsonl", str)] == [5]


def signalled(feed: Feed, at: int, number: int) -> Feed:
    """A feed that sends its own process a signal before the batch of an index."""

    def batches(start):
        for index, batch in feed.batches(start):
            if index == at:
                os.kill(os.getpid(), number)
            yield index, batch

    return dataclasses.replace(feed, batches=batches)


@pytest.mark.slow
def test_a_run_that_a_signal_ends_at_an_evaluation_samples_there_when_it_goes_on(tmp_path, mesh):
    """Whoever sent the signal may not wait for a text, and the samples are those of a run without one all the same."""
    run = dataclasses.replace(EVERY, evaluation=dataclasses.replace(EVERY.evaluation, sample=True))
    assembled, feed = toy(mesh, run)
    outcome = train(assembled, signalled(feed, 4, signal.SIGTERM), tmp_path, progress=quiet())
    assert (outcome.exit_code, outcome.step) == (143, 5) and not (tmp_path / "samples.jsonl").exists()
    train(assembled, feed, tmp_path, until=7, progress=quiet())
    train(assembled, feed, tmp_path, progress=quiet())
    samples = [(sample["step"], sample["text"]) for sample in read_lines(tmp_path / "samples.jsonl", str)]
    assert samples == [(step, f"a sample after {step} steps") for step in (5, 10, 12)]


@pytest.mark.slow
def test_a_run_writes_its_folder(tmp_path, mesh):
    (tmp_path / "run.yaml").write_text("steps: 12\n")
    shown = io.StringIO()
    outcome = train(*toy(mesh, EVERY), tmp_path, progress=Progress(12, stream=shown))
    assert (outcome.step, outcome.exit_code) == (12, 0)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines == outcome.lines
    assert [line["step"] for line in lines] == list(range(1, 13))
    expected = (
        "step tokens loss learning_rate grad_norm tokens_per_second mfu seconds step_seconds data_wait_seconds "
        "memory_bytes"
    )
    assert list(lines[0]) == expected.split()
    assert lines[-1]["tokens"] == 12 * 16
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 10, 12]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "checkpoints" / "step-00000012" / "run.yaml").read_text() == "steps: 12\n"
    (sample,) = read_lines(tmp_path / "samples.jsonl", str)
    assert sample == {"step": 12, "name": "sample", "text": "a sample after 12 steps"}
    assert "a sample after 12 steps" in shown.getvalue()
    events = [json.loads(line)["event"] for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert events[:2] == ["started", "compiled"] and events[-1] == "finished" and events.count("checkpoint") == 4


@pytest.mark.slow
def test_a_run_compiles_its_step_once_and_nothing_later(tmp_path, mesh):
    compiled, at_step = [], {}

    def count(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    assembled, feed = toy(mesh, dataclasses.replace(EVERY, evaluation=Evaluation(every=1)))

    def batches(start):
        for index, batch in feed.batches(start):
            at_step[index] = len(compiled)
            yield index, batch

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        outcome = train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=quiet())
        at_end = len(compiled)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(outcome.programs) == 1
    assert at_step[1] > at_step[0], "the counter counts: the step and the evaluation were compiled"
    assert at_step[11] == at_step[1], "after the first step nothing is compiled"
    # The sample reads one number off the state: that is the only program after the last step.
    assert at_end <= at_step[11] + 1


@pytest.mark.slow
def test_a_batch_of_another_size_is_one_more_compilation(tmp_path, mesh):
    assembled, feed = toy(mesh, EVERY)

    def batches(start):
        for index, batch in feed.batches(start):
            rows = 8 if index < 4 else 16
            yield index, jax.device_put(np.asarray(batch)[:rows], batch.sharding)

    outcome = train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=quiet())
    assert len(outcome.programs) == 2


@pytest.mark.slow
def test_no_process_begins_a_step_that_another_compiles(tmp_path, mesh, monkeypatch):
    done, compile = [], CompiledStep.compile
    monkeypatch.setattr(CompiledStep, "compile", lambda *args: done.append("compiles") or compile(*args))
    monkeypatch.setattr(CompiledStep, "__call__", lambda step, *args: done.append("step") or step.programs[-1](*args))
    monkeypatch.setattr("trellis.train.loop.wait_for_others", done.append)
    train(*toy(mesh, run_of(2)), tmp_path, progress=quiet())
    assert done == ["compiles", "compiled step 1", "step", "step"]


@pytest.mark.slow
def test_the_loop_never_waits_for_the_device_in_order_to_log(tmp_path, mesh):
    """The first step ends only when the fourth batch is asked for: a loop that waited for its metrics would hang."""
    opened = threading.Event()
    everywhere = NamedSharding(mesh, P())
    assembled, feed = toy(mesh, run_of(6, evaluation=Evaluation(every=1)))

    def wait(x):
        if not opened.wait(60):
            raise TimeoutError("the loop waited for the first step")
        return np.asarray(x)

    @jax.jit
    def step(state, batch):
        state, metrics = assembled.step(state, batch)
        loss = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere), metrics["loss"])
        return state, {**metrics, "loss": loss}

    def batches(start):
        for index, batch in feed.batches(start):
            if index == 3:
                opened.set()
            yield index, batch

    waiting = dataclasses.replace(assembled, step=step)
    outcome = train(waiting, dataclasses.replace(feed, batches=batches), tmp_path, progress=quiet())
    assert outcome.step == 6 and len(outcome.lines) == 6


@pytest.mark.slow
def test_resuming_gives_the_same_state_and_lines_to_the_bit(tmp_path, mesh):
    whole = train(*toy(mesh, EVERY), tmp_path / "whole", progress=quiet())
    folder = tmp_path / "parts"
    for steps in (5, 9, 12):
        parts = train(*toy(mesh, dataclasses.replace(EVERY, steps=steps)), folder, progress=quiet())
    for a, b in zip(raw(whole.state), raw(parts.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert losses(folder) == losses(tmp_path / "whole")
    assert parts.lines[-1]["tokens"] == whole.lines[-1]["tokens"] == 192


@pytest.mark.slow
def test_the_time_of_steps_between_a_line_and_a_checkpoint_is_kept(tmp_path, mesh):
    rare = dataclasses.replace(EVERY, steps=12, logging=dataclasses.replace(EVERY.logging, every=6))
    assembled, feed = toy(mesh, rare)
    feed = dataclasses.replace(feed, evaluate=None)

    assert train(assembled, signalled(feed, 8, signal.SIGTERM), tmp_path, progress=quiet()).step == 9
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000009" / "manifest.json").read_text())
    train(assembled, feed, tmp_path, progress=quiet())
    before, after = read_lines(tmp_path / "metrics.jsonl")[-2:]
    assert (before["step"], after["step"]) == (6, 12)
    assert after["seconds"] > manifest["data"]["seconds"] > 0, "steps 7 to 9, and then 10 to 12"


@pytest.mark.slow
def test_resuming_on_another_mesh_goes_on_along_the_same_curve(tmp_path, mesh):
    train(*toy(mesh, EVERY), tmp_path / "whole", progress=quiet())
    train(*toy(mesh, dataclasses.replace(EVERY, steps=5)), tmp_path / "moved", progress=quiet())
    other = mesh_of(8, 1)
    with jax.set_mesh(other):
        outcome = train(*toy(other, EVERY), tmp_path / "moved", progress=quiet())
    assert outcome.state["params"]["w1"].sharding.mesh.shape == {"data": 8, "model": 1}
    # Sums over eight devices are taken in another order: a few float32 roundings over seven steps.
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_a_checkpoint_and_the_same_command_resumes(tmp_path, mesh, number, code):
    assembled, feed = toy(mesh, EVERY)

    before = signal.getsignal(number)
    outcome = train(assembled, signalled(feed, 7, number), tmp_path, progress=quiet())
    assert (outcome.exit_code, outcome.step) == (code, 8)
    assert (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").exists()
    assert not (tmp_path / "samples.jsonl").exists(), "an unfinished run has no sample"
    assert signal.getsignal(number) is before
    again = train(assembled, feed, tmp_path, progress=quiet())
    whole = train(assembled, feed, tmp_path / "whole", progress=quiet())
    assert again.exit_code == 0
    for a, b in zip(raw(again.state), raw(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_the_checkpoint_under_way(tmp_path, mesh, monkeypatch):
    assembled, feed = toy(mesh, run_of(12))
    go, finish, finished = threading.Event(), Checkpoints._finish, []

    def slow(*args):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        finished.append(go.wait(9))
        finish(*args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sys, "unraisablehook", sys.unraisablehook)  # is set by the second one
        patched.setattr(Checkpoints, "_finish", slow)
        train(assembled, signalled(feed, 7, signal.SIGINT), tmp_path, progress=quiet())
    assert not finished
    go.set()
    next(thread for thread in threading.enumerate() if thread.name == "checkpoint 8").join()
    assert train(assembled, feed, tmp_path, progress=quiet()).step == 12


@pytest.mark.slow
def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed(tmp_path, mesh):
    assembled, feed = toy(mesh, EVERY)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = train(assembled, signalled(feed, 7, signal.SIGHUP), tmp_path, progress=quiet())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (outcome.exit_code, outcome.step) == (0, 12)


@pytest.mark.slow
def test_a_finished_run_is_not_trained_on(tmp_path, mesh):
    train(*toy(mesh, EVERY), tmp_path, progress=quiet())
    outcome = train(*toy(mesh, EVERY), tmp_path, progress=quiet())
    assert (outcome.step, outcome.exit_code, outcome.programs) == (12, 0, [])
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 12


@pytest.mark.slow
def test_a_run_that_was_paused_where_it_ends_now_is_evaluated(tmp_path, mesh):
    train(*toy(mesh, EVERY), tmp_path, progress=quiet(), until=7)
    before = read_lines(tmp_path / "metrics.jsonl")
    ends = dataclasses.replace(EVERY, steps=7)
    for _ in range(2):
        train(*toy(mesh, ends), tmp_path, progress=quiet())
        *others, last = read_lines(tmp_path / "metrics.jsonl")
        assert others == before[:-1] and last.items() >= before[-1].items() and last["validation_loss"] > 0
    train(*toy(mesh, ends), tmp_path / "whole", progress=quiet())
    assert last["validation_loss"] == read_lines(tmp_path / "whole" / "metrics.jsonl")[-1]["validation_loss"]
    events = (tmp_path / "timeline.jsonl").read_text()
    assert events.count('"evaluation"') == 2  # after steps 5 and 7


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(tmp_path, mesh):
    with pytest.raises(LossNotFinite, match="The loss and the gradient must be finite") as error:
        train(*toy(mesh, EVERY, spoil_at=7), tmp_path, progress=quiet())
    assert error.value.exit_code == 3
    assert error.value.seen.startswith("loss nan, gradient norm ")
    assert error.value.seen.endswith("at step 8, 1 in a row (allowed: 0)")
    assert error.value.where == f"last good checkpoint: {tmp_path / 'checkpoints' / 'step-00000006'}"
    assert error.value.fix.startswith("continue with a larger --skip_nonfinite, which skips such steps, or start")
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000006"
    last = json.loads((tmp_path / "timeline.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "stopped" and last["why"].startswith("The loss and the gradient must be finite")


@pytest.mark.slow
def test_a_step_of_which_no_token_counts_is_no_loss_that_is_no_number(tmp_path, mesh):
    shown = Progress(12, stream=io.StringIO())
    assert train(*toy(mesh, EVERY, prompt_at=7), tmp_path, progress=shown).step == 12
    assert shown.describe({"step": 8, "loss": None, "grad_norm": 0.0}).startswith("step 8/12  no token counts")
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["loss"] is None] == [8]
    assert lines[7]["tokens"] == lines[6]["tokens"] and lines[8]["tokens"] > lines[7]["tokens"]


@pytest.mark.slow
def test_compiling_for_a_larger_batch_is_no_time_of_a_step(tmp_path, mesh, monkeypatch):
    assembled, feed = toy(mesh, EVERY)
    double = lambda x: jax.device_put(np.tile(np.asarray(x), (2, 1)), x.sharding)
    batches = lambda start: ((n, x if n < 7 else double(x)) for n, x in feed.batches(start))
    compiled = CompiledStep._compiled
    monkeypatch.setattr(CompiledStep, "_compiled", lambda *given: (time.sleep(1.5), compiled(*given))[1])
    shown = io.StringIO()
    progress = Progress(12, stream=shown, every=0.0)
    train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=progress)
    assert shown.getvalue().count("compiled the step in ") == 2
    assert all(line["seconds"] < 1.2 for line in read_lines(tmp_path / "metrics.jsonl"))
    left = [float(s) for s in re.findall(r"step (?:9|10)/12 .* left ([\d.]+) s", shown.getvalue())]
    assert len(left) == 2 and max(left) < 1.2


@pytest.mark.slow
def test_tokens_that_were_read_and_do_not_count_are_in_the_metrics_too(tmp_path, mesh):
    assembled, feed = toy(mesh, EVERY, prompt_at=7)
    train(assembled, dataclasses.replace(feed, tokens=lambda step: 100 + step), tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["tokens"] for line in lines] == [sum(100 + step for step in range(n)) for n in range(1, 13)]
    assert [line["step"] for line in lines if line["loss"] is None] == [8]


@pytest.mark.slow
def test_some_steps_in_a_row_may_be_skipped_and_the_first_is_told(tmp_path, mesh):
    shown = io.StringIO()
    with pytest.raises(LossNotFinite, match=r"3 in a row \(allowed: 2\)") as error:
        run = dataclasses.replace(EVERY, skip_nonfinite=2)
        train(*toy(mesh, run, spoil_at=7), tmp_path, progress=Progress(12, stream=shown))
    assert "at step 10" in error.value.seen
    assert re.findall("skipped .*, ", shown.getvalue()) == ["skipped  step 8: loss nan, "]
    assert read_lines(tmp_path / "metrics.jsonl")[7]["loss"] is None


@pytest.mark.slow
def test_a_resumed_run_has_skipped_as_many_steps_in_a_row_as_before(tmp_path, mesh):
    run = dataclasses.replace(EVERY, skip_nonfinite=2)
    train(*toy(mesh, run, spoil_at=7), tmp_path, progress=quiet(), until=9)
    with pytest.raises(LossNotFinite, match=r"3 in a row \(allowed: 2\)") as error:
        train(*toy(mesh, run, spoil_at=7), tmp_path, progress=quiet())
    assert "at step 10" in error.value.seen


@pytest.mark.slow
def test_out_of_memory_stops_the_run_with_advice(tmp_path, mesh):
    assembled, feed = toy(mesh, EVERY)

    def batches(start):
        for index, batch in feed.batches(start):
            if index == 4:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes\nmore")
            yield index, batch

    with pytest.raises(RunStopped, match="A step must fit in the memory of its devices") as error:
        train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=quiet())
    assert error.value.exit_code == 3
    assert error.value.seen == "RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"
    assert error.value.where.endswith("step-00000003")
    assert "`trellis memory`" in error.value.fix


@pytest.mark.slow
def test_held_out_data_that_go_away_are_told_likewise(tmp_path, mesh):
    assembled, feed = toy(mesh, EVERY)

    def evaluate(state, made):
        raise UserError("A store exists.", seen="no such file", where="stores/held-out", fix="put it back")

    with pytest.raises(RunStopped, match="A store exists") as error:
        train(assembled, dataclasses.replace(feed, evaluate=evaluate), tmp_path, progress=quiet())
    assert error.value.where.endswith("step-00000003") and "stores/held-out" in error.value.seen


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 4])
def test_data_that_go_away_are_told_with_the_last_good_checkpoint_once_there_are_steps(tmp_path, mesh, gone):
    assembled, feed = toy(mesh, EVERY)

    def batches(start):
        for index, batch in feed.batches(start):
            if index == gone:
                raise UserError("A store exists.", seen="no such file", where="stores/mine", fix="put it back")
            yield index, batch

    with pytest.raises(UserError, match="A store exists") as error:
        train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=quiet())
    told = (error.value.exit_code, error.value.seen, error.value.where, error.value.fix)
    if gone:
        good = f"last good checkpoint: {tmp_path}/checkpoints/step-00000003"
        fix = "put it back; then run the same command again, which continues after that checkpoint"
        assert told == (3, "no such file, at stores/mine", good, fix)
    else:
        assert told == (2, "no such file", "stores/mine", "put it back")


@pytest.mark.slow
def test_data_that_ends_early_is_an_error(tmp_path, mesh):
    assembled, feed = toy(mesh, EVERY)

    def batches(start):
        for index, batch in feed.batches(start):
            if index == 4:
                return
            yield index, batch

    with pytest.raises(UserError, match="The data must last as long as the run") as error:
        train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=quiet())
    assert error.value.seen == f"4 batches for 12 steps, at {tmp_path}"
    assert error.value.where.endswith("step-00000003")


@pytest.mark.slow
def test_writing_a_profile_is_no_time_of_a_step(tmp_path, mesh, monkeypatch):
    happened = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, create_perfetto_trace: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: happened.append("written"))
    monkeypatch.setattr(Drain, "excuse", lambda drain: happened.append("excused"))
    train(*toy(mesh, dataclasses.replace(EVERY, profile=config.Profile(start=2))), tmp_path, progress=quiet())
    assert happened[happened.index("written") :] == ["written", "excused"]


@pytest.mark.slow
def test_a_run_that_is_resumed_among_its_profiled_steps_records_the_others(tmp_path, mesh):
    run = dataclasses.replace(EVERY, steps=5, profile=config.Profile(start=2))
    traces = []
    for until in (2, 3, 5):
        train(*toy(mesh, run), tmp_path, until=until, progress=quiet())
        traces.append(any((tmp_path / "profile").rglob("perfetto_trace.json.gz")))
        shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    assert traces == [False, True, True]


@pytest.mark.slow
def test_a_profile_of_two_steps_opens_in_perfetto(tmp_path, mesh):
    import gzip

    run = dataclasses.replace(EVERY, steps=5, profile=config.Profile(start=2))
    train(*toy(mesh, run), tmp_path, progress=quiet())
    (trace,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("jit_step" in str(event.get("name", "")) + str(event.get("args", "")) for event in events)
