"""Sequences that become longer in a run: one program for each length, and the same bits wherever it was stopped."""

import json

import jax
import pytest

from tests.train.small import curve, last_line, started, trellis
from trellis.checkpoints.checkpoints import Checkpoints
from trellis.run.folder import open_run
from trellis.train.assemble import assemble
from trellis.train.corpus import open_corpus
from trellis.train.trackers import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

LENGTHS = "[{step: 3, length: 32, rope_theta: 2e4, rope_scaling: {kind: linear, factor: 2.0}}]"
OPTIONS = ("--model.layers", 1, "--data.sequence_length", 8, "--batch_size", 8, "--steps", 5, "--lengths", LENGTHS)
ONE = ("--layout.preset", "single")
CONTEXT = ("--layout.preset", "auto", "--devices", 4, "--mesh.data", 2, "--mesh.context", 2)


def run(capsys, run_file, folder, *options):
    code, out, err = trellis(capsys, "train", run_file, "--run-dir", folder, *OPTIONS, *options)
    assert code == 0, err
    return out + err


@pytest.fixture(scope="module")
def whole(run_file, tmp_path_factory):
    """The folder of a run without a stop, and what it said."""
    folder = tmp_path_factory.mktemp("whole")
    process = started("train", run_file, "--run-dir", folder, *OPTIONS, *ONE)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder, out + err


def test_each_length_is_compiled_once(whole):
    folder, said = whole
    events = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "compiled"] == [0, 3]
    lengths = [(e["step"], e["sequence_length"], e["batch_size"]) for e in events if e["event"] == "length"]
    assert lengths == [(3, 32, 2)]
    assert "8 x 8 tokens from step 1 on" in said and "2 x 32 tokens from step 4 on" in said
    assert [line["tokens"] for line in read_lines(folder / "metrics.jsonl")] == [64 * n for n in range(1, 6)]
    about = json.loads((folder / "about.json").read_text())
    assert [entry["length"] for entry in about["lengths"]] == [8, 32] and len(about["structure"]) == 2
    assert "32 tokens a sequence from step 4 on" in (folder / "report.html").read_text()


def test_a_step_with_a_length_is_that_of_a_run_of_this_length(whole):
    folder = whole[0]
    run, fourth = open_run(folder), 3
    assembled = assemble(run.at(fourth), jax.devices()[:1])
    with Checkpoints(folder / "checkpoints", read_only=True) as saved:
        state = saved.restore(assembled.abstract, step=fourth).state
    batch = open_corpus(run).batches.batch(fourth)
    assert batch.shape == (2, 32)
    with assembled.layout:
        _, metrics = assembled.step(state, jax.device_put(batch, assembled.batch_sharding))
    assert float(metrics["loss"]) == pytest.approx(curve(folder)[fourth], rel=1e-6)


def test_stopped_within_and_between_lengths_it_ends_with_the_same_bits(whole, run_file, tmp_path, capsys):
    for until in (3, 4, 5):
        run(capsys, run_file, tmp_path, *ONE, "--until", until)
    assert curve(tmp_path) == curve(whole[0])
    assert last_line(tmp_path)["validation_loss"] == last_line(whole[0])["validation_loss"]


def test_on_slices_of_data_and_positions_the_curve_is_the_same(whole, run_file, tmp_path, capsys):
    run(capsys, run_file, tmp_path, *CONTEXT)
    assert curve(tmp_path) == pytest.approx(curve(whole[0]), rel=1e-4)


def test_what_comes_after_uses_the_length_and_the_frequencies_of_the_checkpoint(whole, tmp_path, capsys):
    folder = whole[0]
    for step, theta, scaling, positions in ((3, 10000.0, None, 8), (5, 20000.0, 2.0, 32)):
        to = tmp_path / str(step)
        code, _, err = trellis(capsys, "export", folder, "--to", to, "--step", step)
        assert code == 0, err
        config = json.loads((to / "config.json").read_text())
        found = (config["rope_theta"], (config["rope_scaling"] or {}).get("factor"), config["max_position_embeddings"])
        assert found == (theta, scaling, positions)
    code, out, err = trellis(capsys, "evaluate", folder, "--json", "--batches", 2, "--devices", 1)
    assert code == 0, err
    assert json.loads(out)["validation_loss"] == pytest.approx(last_line(folder)["validation_loss"], rel=1e-5)
