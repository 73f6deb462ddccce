"""Real runs through the command line: a folder, a report, evaluation, and refusals."""

import json

import pytest

from tests.train.small import trellis
from trellis.train.trackers import read_lines

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_a_run_from_its_first_step_to_its_report(run_file, tmp_path, capsys):
    folder = tmp_path / "run"
    code, out, err = trellis(capsys, "train", run_file, "--run-dir", folder, "--layout.preset", "single")
    assert code == 0, err
    for words in (
        "model    llama, 33.0k parameters",
        "tokens   1.54k to read",
        "devices  1 x cpu",
        "moves    nothing",
        f"folder   {folder}",
    ):
        assert words in out
    assert "step 6/6  loss " in err and "bits/byte" in err
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "run.yaml",
        "metrics.jsonl",
        "ledger.txt",
        "checkpoints",
        "samples.jsonl",
        "about.json",
        "report.html",
    }
    last = read_lines(folder / "metrics.jsonl")[-1]
    wanted = "step tokens loss learning_rate grad_norm tokens_per_second mfu step_seconds validation_loss bits_per_byte"
    assert set(wanted.split()) <= set(last) and last["mfu"] > 0
    assert (folder / "checkpoints" / "step-00000006" / "run.yaml").read_text() == (folder / "run.yaml").read_text()

    code, out, _ = trellis(capsys, "evaluate", folder, "--batches", 2, "--json")
    found = json.loads(out)
    assert code == 0 and found["step"] == 6
    assert found["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    # Every byte is a token here, but the ends of documents are tokens and no text.
    assert found["bits_per_byte"] == pytest.approx(found["validation_loss"] / 0.6931, rel=0.01)

    code, _, err = trellis(capsys, "train", run_file, "--run-dir", folder, "--optimizer.learning_rate", "0.5")
    assert code == 2
    assert "A run folder holds one run, and the command that started it resumes it." in err
    assert "learning_rate" in err and f"where: {folder / 'run.yaml'}" in err
    assert f"resume what is there: trellis train {folder / 'run.yaml'} --run-dir {folder}" in err


def test_a_run_does_not_pretend_to_write_to_a_bucket(run_file, capsys):
    code, _, err = trellis(capsys, "train", run_file, "--run-dir", "gs://bucket/run")
    assert code == 2
    assert "A run's folder lies in a file system." in err and "seen:  gs://bucket/run" in err
    assert "where: --run-dir" in err and "fix:   mount the bucket (gcsfuse, s3fs) and give the folder" in err
