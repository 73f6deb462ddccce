"""A run without a checkpoint starts over and says so, unless its checkpoints were finished: then they are missed.
One without metrics goes on and says so."""

import dataclasses
import io
import shutil

import jax
import pytest

from tests.train.toy import mesh_of, run_of, toy
from trellis.errors import UserError
from trellis.run.folder import IMPORTED
from trellis.train.loop import train
from trellis.train.progress import Progress
from trellis.train.timeline import last_saved
from trellis.train.trackers import read_lines

RUN = run_of(8, every=3)


@pytest.fixture
def mesh():
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize(
    "events, saved",
    [
        ("", None),
        ("started:0 checkpoint:3", None),
        ("started:0 checkpoint:3 started:0 checkpoint:3", None),
        ("started:0 checkpoint:3 stopped:0", None),
        ("started:0 checkpoint:3 evaluation:4 checkpoint:6", 3),
        ("started:0 checkpoint:3 checkpoint:6 started:0 stopped:0", 3),
        ("started:0 checkpoint:5 interrupted:5", 5),
        ("started:0 checkpoint:3 checkpoint:5 paused:5", 5),
        ("started:0 checkpoint:3 resumed:3", 3),
        ("started:0 checkpoint:3 checkpoint:8 finished:8 resumed:8 finished:8", 8),
    ],
)
def test_a_checkpoint_was_finished_if_the_next_was_begun_or_the_run_ended_in_order(events, saved):
    words = [event.split(":") for event in events.split()]
    assert last_saved([{"time": 0.0, "event": event, "step": int(step)} for event, step in words]) == saved


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path, mesh):
    train(*toy(mesh, RUN), tmp_path, until=5, progress=Progress(8, stream=io.StringIO()))
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="A run whose state was saved can continue only from a checkpoint") as error:
        train(*toy(mesh, RUN), tmp_path, progress=Progress(8, stream=io.StringIO()))
    assert error.value.seen == f"no checkpoint, where {tmp_path / 'timeline.jsonl'} tells of one after step 5"
    assert error.value.where == str(tmp_path / "checkpoints")
    assert error.value.fix == "bring its checkpoints back, or start anew with another --run-dir"
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 5, "nothing is lost"
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics")
    with pytest.raises(UserError, match="A run whose state was saved can continue only from a checkpoint"):
        train(*toy(mesh, RUN), tmp_path, progress=Progress(8, stream=io.StringIO()))
    (tmp_path / "metrics").rename(tmp_path / "metrics.jsonl")
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.move(tmp_path / "elsewhere", tmp_path / "checkpoints")
    assert train(*toy(mesh, RUN), tmp_path, progress=Progress(8, stream=io.StringIO())).step == 8


def test_an_import_that_was_cut_off_is_not_trained_from_chance(tmp_path, mesh):
    (tmp_path / IMPORTED).write_text("{}")
    with pytest.raises(UserError, match="An imported model must be whole before it is trained") as error:
        train(*toy(mesh, RUN), tmp_path, progress=Progress(8, stream=io.StringIO()))
    assert f"import it again: trellis import ... --to {tmp_path}" in error.value.fix
    assert not read_lines(tmp_path / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_says_that_it_starts_over(tmp_path, mesh):
    assembled, feed = toy(mesh, run_of(8))

    def batches(start):
        for index, batch in feed.batches(start):
            if index == 7:
                raise ValueError("something else")
            yield index, batch

    shown = [io.StringIO() for _ in range(2)]
    with pytest.raises(ValueError, match="something else"):
        train(assembled, dataclasses.replace(feed, batches=batches), tmp_path, progress=Progress(8, stream=shown[0]))
    made = len(read_lines(tmp_path / "metrics.jsonl"))
    train(assembled, feed, tmp_path, progress=Progress(8, stream=shown[1]))
    told = [f"starting over: {made} steps were made, and no checkpoint was finished" in s.getvalue() for s in shown]
    assert made > 0 and told == [False, True]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))


@pytest.mark.slow
def test_a_run_whose_metrics_are_gone_goes_on_and_says_so(tmp_path, mesh):
    shown = [io.StringIO() for _ in range(3)]
    for stream, until in zip(shown, (3, 5, 8), strict=True):
        train(*toy(mesh, RUN), tmp_path, until=until, progress=Progress(8, stream=stream))
        if until == 5:
            (tmp_path / "metrics.jsonl").unlink()
    told = [f"{tmp_path / 'metrics.jsonl'} has no line up to step 5: the curves" in s.getvalue() for s in shown]
    assert told == [False, False, True]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [6, 7, 8]
