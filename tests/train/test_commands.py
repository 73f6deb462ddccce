"""Real runs through the command line: a folder, a report, resuming anywhere, evaluation, and refusals."""

import json

import jax
import pytest

from trellis import cli
from trellis.data import FileSource, find_files, tokenize
from trellis.train.trackers import read_lines

RUN = """
base: tiny
model: {{vocab: 257, embed: 32, mlp: 64}}
data:
  source: {{kind: store, path: {stores}/train, validation: {stores}/validation}}
  sequence_length: 32
precision: {{compute: float32}}
steps: 6
checkpoints: {{every: 3}}
evaluation: {{every: 3, batches: 2}}
logging: {{every: 1}}
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A run on a few kilobytes of text, each byte a token: 257 of them, which no mesh divides."""
    folder = tmp_path_factory.mktemp("stores")
    for split, texts in {"train": range(40), "validation": range(40, 50)}.items():
        files = []
        for number in texts:
            path = folder / f"{number}.txt"
            path.write_text(f"The number {number} times {number} is {number * number}, and so on.\n" * 12)
            files.append(str(path))
        tokenize(
            FileSource(files=find_files(files), format="text"),
            str(folder / split),
            use_bytes=True,
            workers=1,
            progress=False,
        )
    path = folder / "run.yaml"
    path.write_text(RUN.format(stores=folder))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    assert len(jax.devices()) == 8  # a first command would settle how many there are for all tests
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def trellis(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def losses(folder):
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


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


@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh_along_one_curve(run_file, tmp_path, capsys):
    """One device, then parameters sliced over eight, then tensors over two with a padded vocabulary, then one again."""
    stay, move = tmp_path / "stay", tmp_path / "move"
    single = ("--layout.preset", "single", "--checkpoints.every", "2")
    assert trellis(capsys, "train", run_file, "--run-dir", stay, "--steps", 8, *single)[0] == 0
    steps = [
        (2, single),
        (4, ("--layout.preset", "fsdp", "--mesh.data", "8", "--devices", "8")),
        (6, ("--layout.preset", "tensor", "--mesh.data", "2", "--mesh.model", "2", "--devices", "4")),
        (8, single),
    ]
    for last, options in steps:
        code, _, err = trellis(capsys, "train", run_file, "--run-dir", move, "--steps", 8, "--until", last, *options)
        assert code == 0, err
    paused = tmp_path / "paused"
    for last in (3, 8):
        assert trellis(capsys, "train", run_file, "--run-dir", paused, "--steps", 8, "--until", last, *single)[0] == 0
    assert losses(paused) == losses(stay), "on the same mesh, to the bit"
    assert len(losses(move)) == 8
    assert losses(move) == pytest.approx(losses(stay), rel=1e-4)
