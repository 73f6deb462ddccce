"""How long a run takes, told before it begins: from earlier runs, the peak of products, or a trial."""

import contextlib
import dataclasses
import io
import types

import jax
import jax.numpy as jnp
import pytest

from tests.train.toy import mesh_of, run_of, toy
from trellis.hardware.remembered import recall, remember
from trellis.recipes import tiny
from trellis.run.config import BatchSize, Evaluation
from trellis.train.loop import train
from trellis.train.metrics import Work
from trellis.train.pace import Pace, expected_pace, keep_pace, tokens_of, tried_pace, worth_a_trial
from trellis.train.progress import Progress

WORK = Work(flops_per_token=1e6, peak_flops=1e9)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A machine on which nothing was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trellis" / "measured"


def small(**changes):
    """What `Pace` asks of an assembled run."""
    assembled, _ = toy(mesh_of(2, 1), dataclasses.replace(tiny(), **changes))
    return assembled


def test_tokens_follow_the_batch_sizes():
    run = dataclasses.replace(tiny(), batch_size=(BatchSize(step=0, size=2), BatchSize(step=5, size=8)))
    assert [tokens_of(run, *part) // 64 for part in ((0, 20), (0, 5), (4, 6), (19, 20))] == [130, 10, 10, 8]


def test_a_run_is_expected_to_go_on_as_runs_before_it():
    first, other = small(), small(batch_size=16)
    guess = expected_pace(first, WORK)
    assert guess == Pace(token_seconds=1e6 / 0.5e9, basis="", measured=False)
    keep_pace(first, WORK, 4e-3)
    again = expected_pace(first, WORK)
    assert again == Pace(token_seconds=4e-3, basis=again.basis, measured=True) and "as in the run of" in again.basis
    # Another step takes as large a share of the peak, here a quarter: twice the FLOPs take twice as long.
    wider = expected_pace(other, dataclasses.replace(WORK, flops_per_token=2e6))
    assert wider.token_seconds == pytest.approx(8e-3) and not wider.measured
    # One that costs many times as much reaches another share of it.
    assert expected_pace(other, dataclasses.replace(WORK, flops_per_token=5e6)).token_seconds == 5e6 / 0.5e9
    assert expected_pace(small(precision=dataclasses.replace(first.run.precision, compute="bfloat16")), WORK) == guess
    assert expected_pace(other, Work(flops_per_token=1e6, peak_flops=None)) is None


def test_the_nearest_in_cost_counts():
    for size, flops, seconds in ((4, 1e5, 1e-3), (16, 1e8, 1e-1)):
        keep_pace(small(batch_size=size), dataclasses.replace(WORK, flops_per_token=flops), seconds)
    assert expected_pace(small(), dataclasses.replace(WORK, flops_per_token=2e5)).token_seconds == pytest.approx(2e-3)
    assert expected_pace(small(), dataclasses.replace(WORK, flops_per_token=5e7)).token_seconds == pytest.approx(5e-2)


def test_a_cache_that_is_broken_or_cannot_be_written_is_none(cache):
    cache.mkdir(parents=True)
    for text in ("{", "[]", '{"paces": 3}', '{"paces": {"somewhere": {}}}'):
        (cache / "machine.json").write_text(text)
        assert expected_pace(small(), WORK).token_seconds == 1e6 / 0.5e9
    remember("paces", "here", 1)
    assert recall("paces") == {"somewhere": {}, "here": 1}
    (cache / "machine.json").unlink()
    cache.rmdir()
    cache.write_text("a file, where the folder would be")
    keep_pace(small(), WORK, 1.0)
    assert recall("paces") == {}


def test_a_trial_is_for_long_runs_of_short_steps_that_nobody_measured():
    assembled = small(steps=1000)
    pace = Pace(token_seconds=0.1 / 512, basis="", measured=False)
    assert worth_a_trial(assembled, pace, 1000) and not worth_a_trial(assembled, pace, 100)
    assert not worth_a_trial(assembled, dataclasses.replace(pace, measured=True), 1000)
    assert not worth_a_trial(assembled, dataclasses.replace(pace, token_seconds=1.0), 1000)
    assert not worth_a_trial(assembled, None, 1000)


def test_a_trial_takes_the_fastest_of_steps_that_were_compiled():
    times = iter([0.0, 30.0, 30.0, 32.0, 32.0, 33.0, 33.0, 38.0])
    step = jax.jit(lambda state, batch: (state + batch, {"loss": state.sum()}), donate_argnums=0)
    batch = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assembled = types.SimpleNamespace(
        step=step,
        compiler_options={},
        layout=contextlib.nullcontext(),
        init=lambda: jnp.zeros(4),
        abstract_batch=lambda: batch,
        run=tiny(),
    )
    pace = tried_pace(assembled, clock=times.__next__)
    assert pace.measured and pace.step_seconds(tiny()) == 1.0 and next(times, None) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "measured", "told"),
    [(1.0, True, 2), (1.0, False, 2), (None, True, 1)],
    ids=["far off", "guessed", "not known"],
)
def test_a_run_tells_its_time_before_it_begins_and_again_where_that_was_wrong(
    tmp_path, monkeypatch, expected, measured, told
):
    monkeypatch.setattr("trellis.train.lines._WORTH_TELLING", 0.0)
    shown, mesh = io.StringIO(), mesh_of(2, 1)
    run = run_of(12, evaluation=Evaluation(every=4, batches=10**6))  # more than there are
    pace = expected and Pace(token_seconds=expected, basis="as was said" * measured, measured=measured)
    with jax.set_mesh(mesh):
        assembled, feed = toy(mesh, run)
        feed = dataclasses.replace(feed, validation_batches=3)
        outcome = train(assembled, feed, tmp_path, pace=pace, progress=Progress(12, stream=shown))
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("takes")]
    assert len(lines) == told and lines[-1].endswith("2 evaluations, as the first steps did")
    if not measured:
        assert lines[0] == "takes    unknown until its first steps: no such step has been measured on this machine"
    elif expected:  # 12 steps of 512 tokens, and of 3 evaluations of 3 batches a third
        assert lines[0] == "takes    about 2 h 08 min: 12 steps of 512 s and 3 evaluations, as was said"
        assert shown.getvalue().startswith(lines[0])
    assert 0 < outcome.token_seconds < 1.0
