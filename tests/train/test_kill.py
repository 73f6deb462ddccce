"""A run that is killed again and again ends like one that is not."""

import json
import random
import time

import pytest

from tests.train import forks

STEPS = 80


def start(folder, *more):
    return forks.start("tests.train.toy", folder, "--steps", STEPS, *more)


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def unfinished(folder):
    """Checkpoints that are being written, or that a kill left so."""
    return [path for path in folder.glob("checkpoints/step-*") if not (path / "manifest.json").exists()]


@pytest.mark.slow
def test_killed_four_times_the_run_ends_with_the_same_loss_to_the_bit(tmp_path):
    whole = finish(start(tmp_path / "whole"))
    folder, chance = tmp_path / "killed", random.Random(5)
    slow = ("--every", "2", "--pause", "0.01")
    cut_off = 0
    for kill in range(4):
        process = start(folder, *slow)
        seen, target = len(lines(folder)), (kill + 1) * STEPS // 8
        deadline = time.monotonic() + 60
        while len(lines(folder)) < max(seen, target) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        while kill % 2 and not unfinished(folder) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)  # every second kill falls into a save
        process.kill()
        process.communicate(timeout=60)
        cut_off += bool(unfinished(folder))
        assert process.returncode == -9, f"kill {kill} came after the end"
    assert cut_off >= 2, "no kill left a checkpoint unfinished"
    killed = finish(start(folder, *slow))
    assert killed["step"] == whole["step"] == STEPS
    assert killed["loss"] == whole["loss"] and killed["validation_loss"] == whole["validation_loss"]
    assert killed["tokens"] == whole["tokens"]
    curves = [[json.loads(line)["loss"] for line in lines(tmp_path / name)] for name in ("whole", "killed")]
    assert curves[0] == curves[1]
    events = [json.loads(line)["event"] for line in (folder / "timeline.jsonl").read_text().splitlines()]
    assert events.count("resumed") >= 3


@pytest.mark.slow
def test_sigterm_exits_143_and_a_bad_loss_exits_3(tmp_path):
    process = start(tmp_path / "term", "--pause", "0.05")
    deadline = time.monotonic() + 60
    while len(lines(tmp_path / "term")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    made = len(lines(tmp_path / "term"))
    assert (tmp_path / "term" / "checkpoints" / f"step-{made:08d}" / "manifest.json").exists()

    process = start(tmp_path / "bad", "--spoil-at", "9")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "Traceback" not in err and "last good checkpoint: " in err and "step-00000008" in err
