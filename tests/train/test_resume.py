"""A run goes on where it stopped, on the same mesh to the bit and on any other along the same curve.

Two devices slice the vocabulary of 257 on every mesh here and pad it to 258. Sums are made in another order on another
mesh: the losses of these few steps stay within 1e-4 of one device's.
"""

import json
import shutil
import socket

import jax
import numpy as np
import pytest

from tests.train.small import VOCAB, curve, last_line, started, trellis
from trellis.checkpoints.checkpoints import Checkpoints
from trellis.run.folder import open_run
from trellis.train.assemble import assemble

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

SINGLE = ("--layout.preset", "single", "--checkpoints.every", "2")
FSDP = ("--layout.preset", "fsdp", "--devices", "8", "--mesh.data", "4", "--mesh.data_y", "2")
FSDP += ("--layout.params.embed", "data", "--layout.params.vocab", "data_y")
TENSOR = ("--layout.preset", "tensor", "--devices", "4", "--mesh.data", "2", "--mesh.model", "2")
ALL = ("--layout.preset", "hybrid", "--devices", "8", "--mesh.data", "2", "--mesh.context", "2", "--mesh.model", "2")


def finish(*words):
    process = started(*words)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory):
    """The folder of a run of eight steps without a stop."""
    folder = tmp_path_factory.mktemp("one") / "run"
    finish("train", run_file, "--run-dir", folder, "--steps", 8, *SINGLE)
    return folder


def parts(capsys, run_file, folder, *legs):
    """Trains to a step on a layout, then to the next one on the next."""
    for until, options in legs:
        words = ("train", run_file, "--run-dir", folder, "--steps", 8, "--until", until, *options)
        code, _, err = trellis(capsys, *words)
        assert code == 0, err


def padding(folder, step, count):
    """The largest of the optimizer's moments in the vocabulary's padding, and outside it."""
    run = open_run(folder)
    assembled = assemble(run, jax.devices()[:count])
    with Checkpoints(folder / "checkpoints", read_only=True) as saved:
        state = saved.restore(assembled.abstract, step=step, resizable={"vocab": VOCAB}).state
    assert state.model.embedding.shape["vocab"] > VOCAB
    moments = [np.abs(x) for x in jax.tree.leaves(state.optimizer) if x.ndim == 2 and x.shape[0] > VOCAB]
    assert len(moments) == 2
    return [x[VOCAB:].max() for x in moments], [x[:VOCAB].max() for x in moments]


def test_on_the_same_mesh_to_the_bit(run_file, one_device, tmp_path):
    for until in (3, 8):
        finish("train", run_file, "--run-dir", tmp_path, "--steps", 8, "--until", until, *SINGLE)
    assert curve(tmp_path) == curve(one_device)


def test_one_device_to_eight(run_file, one_device, tmp_path, capsys):
    parts(capsys, run_file, tmp_path, (3, SINGLE), (8, ALL))
    assert curve(tmp_path) == pytest.approx(curve(one_device), rel=1e-4)
    unseen, seen = padding(tmp_path, 8, 8)
    assert max(unseen) == 0 < min(seen)


def test_fsdp_to_tensor_and_back_to_one(run_file, one_device, tmp_path, capsys):
    parts(capsys, run_file, tmp_path, (3, FSDP), (6, TENSOR), (8, SINGLE))
    assert curve(tmp_path) == pytest.approx(curve(one_device), rel=1e-4)
    with open(tmp_path / "checkpoints" / "step-00000006" / "manifest.json") as file:
        rows = json.load(file)["entries"]["model/embedding"]["shape"][0]
    assert rows == 258


@pytest.mark.parametrize("least", ["16", "128"], ids=["factored", "whole"])
def test_adafactor_goes_on_with_another_padding(run_file, tmp_path, capsys, least):
    rule = ("--optimizer", "adafactor", "--optimizer.learning_rate", "0.05", "--optimizer.min_factored_size", least)
    alone, parted = tmp_path / "alone", tmp_path / "parted"
    parts(capsys, run_file, alone, (8, (*SINGLE, *rule)))
    parts(capsys, run_file, parted, (3, (*SINGLE, *rule)), (6, (*FSDP, *rule)), (8, (*TENSOR, *rule)))
    assert curve(parted) == pytest.approx(curve(alone), rel=1e-5)


def test_stores_that_moved_are_read_where_they_are(run_file, one_device, tmp_path, capsys):
    """With the same tokens; others are refused, also those of validation."""
    first, then = tmp_path / "first", tmp_path / "then"
    shutil.copytree(run_file.parent, first)
    words = ("--run-dir", tmp_path / "run", "--steps", 8, *SINGLE)
    at = lambda train, validation: ("--data.source.path", train, "--data.source.validation", validation)
    finish("train", run_file, "--until", 3, *words, *at(first / "train", first / "validation"))
    first.rename(then)
    code, _, err = trellis(capsys, "train", tmp_path / "run")
    assert code == 2 and f"no such folder\n  where: {first / 'train'}\n" in err
    for train, validation, where in (("validation", "validation", "validation"), ("train", "train", "train")):
        code, _, err = trellis(capsys, "train", tmp_path / "run", *at(then / train, then / validation))
        assert code == 2 and "A resumed run must read the same tokens as before." in err
        assert f"\n  where: {then / where}\n" in err
    assert open_run(tmp_path / "run").data.source.path == str(first / "train"), "what is refused changes nothing"
    finish("train", tmp_path / "run", *at(then / "train", then / "validation"))
    assert curve(tmp_path / "run") == pytest.approx(curve(one_device), rel=1e-4)


def test_what_was_padded_for_a_mesh_is_cut_off_on_export(run_file, tmp_path, capsys):
    parts(capsys, run_file, tmp_path / "run", (2, FSDP))
    assert last_line(tmp_path / "run")["step"] == 2
    unseen, seen = padding(tmp_path / "run", 2, 8)
    assert len(unseen) == 2 and max(unseen) == 0 < min(seen)
    code, _, err = trellis(capsys, "export", tmp_path / "run", "--to", tmp_path / "hf", "--dtype", "float32")
    assert code == 0, err
    from safetensors.numpy import load_file

    assert load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"].shape == (VOCAB, 32)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == VOCAB


def test_two_processes_to_one(run_file, one_device, tmp_path, capsys):
    """Each process has two devices, reads its rows of the batch and writes its part of the checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ("train", run_file, "--run-dir", tmp_path, "--steps", 8, "--until", 4, "--layout.preset", "fsdp_tensor")
    words += ("--devices", 2, "--mesh.model", 2, "--distributed.coordinator", address, "--distributed.processes", 2)
    both = [started(*words, "--distributed.process", process) for process in (0, 1)]
    ends = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert manifest["processes"] == 2 and manifest["entries"]["model/embedding"]["shape"][0] == 258
    parts(capsys, run_file, tmp_path, (8, SINGLE))
    assert curve(tmp_path) == pytest.approx(curve(one_device), rel=1e-4)
