"""This machine as a target: its rates are measured and its operations cost something each."""

import dataclasses
import os
import time

import jax
import pytest

from trellis.hardware import local
from trellis.hardware.chips import chips
from trellis.hardware.local import free_memory, left_by_limit, local_target
from trellis.hardware.measure import CACHED, Machine, measure_machine
from trellis.inspect.work import Piece
from trellis.named import stacked
from trellis.plan.prepared import prepare
from trellis.plan.quick import plan_of
from trellis.plan.roofline import filled, waves, work_line
from trellis.recipes import load_run

MADE_UP = Machine(100e9, 50e9, 128.0, 20e9, 10e9, 40e9, 1e-6)


def piece(**fields):
    base = dict(kind="product", flops=2.0 * 64 * 128 * 64, vector=0.0, num_bytes=1e3, times=3, direction="forward",
                source="here.py:1", what="", dims=(64, 128, 64), dtype="float32")  # fmt: skip
    return Piece(**(base | fields))


@pytest.mark.slow
def test_rates_are_positive_and_products_faster_than_elementwise_work():
    found = measure_machine(time.process_time)
    assert all(value >= 0 for value in found) and min(found.float32, found.vector, found.memory, found.launch) > 0
    assert found.float32 > found.memory / 4  # a product of 1024 does more than one operation for each float it reads
    assert found.launch < 1e-3


def test_a_cpu_shares_its_rates_among_its_devices():
    one, two = (local_target(jax.devices()[:n], measured=MADE_UP) for n in (1, 2))
    assert one.chip.bf16_flops == 50e9 and two.chip.bf16_flops == 25e9
    assert one.chip.float32_share == 2.0
    assert two.chip.hbm_bandwidth == one.chip.hbm_bandwidth / 2
    assert local_target(jax.devices()[:1]).chip.source == "a placeholder"


def test_short_sums_reach_less_and_each_operation_takes_time():
    chip = local_target(jax.devices()[:1], measured=MADE_UP).chip
    line = work_line(piece(), chip)
    assert filled(128, chip) == 0.5
    assert line.seconds == pytest.approx(3 * (2.0 * 64 * 128 * 64 / 50e9 + 1e-6))


def test_small_work_stays_in_the_cache():
    chip = dataclasses.replace(local_target(jax.devices()[:1], measured=MADE_UP).chip, launch_seconds=0.0)
    small, large = (
        work_line(piece(kind="elementwise", flops=0.0, num_bytes=size, times=1), chip) for size in (CACHED, CACHED + 1)
    )
    assert small.seconds == pytest.approx(0.65 * CACHED / 40e9, rel=1e-3)
    assert large.seconds == pytest.approx(0.65 * CACHED / 10e9, rel=1e-3)


def test_work_without_traffic_takes_no_time():
    assert work_line(piece(kind="elementwise", flops=0.0, num_bytes=0.0), chips()["v5p"]).seconds == 0.0


def test_waves_of_tiles():
    a100 = chips()["a100"]
    assert waves((128 * 108, 512, 128), 1.0, a100) == 1.0
    assert waves((128 * 54, 512, 128), 3.0, a100) == pytest.approx(2 * 108 / 162)
    assert waves((100, 512, 100), 1.0, a100) == 1.0  # cut along the sum
    assert waves((128 * 109, 512, 128), 1.0, chips()["v5e"]) == 1.0


@pytest.mark.slow
def test_what_is_computed_again_on_a_cpu_is_made_once_where_layers_are_written_out(monkeypatch):
    """XLA's CPU compiler merges equal operations; those in loops it cannot."""
    options = {"model.layers": "2", "remat.policy": "full", "layout.preset": "single", "batch_size": "8"}
    run, target = load_run("tiny", options), local_target(jax.devices()[:1], measured=MADE_UP)
    for written_out, passes in (
        (True, {"forward", "backward", "update"}),
        (False, {"forward", "recomputed", "backward", "update"}),
    ):
        monkeypatch.setattr(stacked, "written_out", lambda length, x, weights=None, answer=written_out: answer)
        plan = plan_of(prepare(run, target, jax.devices()[:1]), target)
        assert {piece.direction for piece in plan.work} == passes


NEW = {"memory.max": "3000\n", "memory.current": "2500\n", "memory.stat": "anon 1900\ninactive_file 400\n"}
OLD = {
    "memory.limit_in_bytes": "3000\n",
    "memory.usage_in_bytes": "2500\n",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (NEW, 900),
        (OLD, 800),
        (NEW | {"memory.max": "max\n"}, None),
        (NEW | {"memory.max": "soon\n"}, None),
        ({}, None),
    ],
)
def test_a_container_s_limit_leaves_what_is_not_used_yet(files, left, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert left_by_limit(tmp_path) == left
    monkeypatch.setattr(local, "_GROUPS", (tmp_path,))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_memory() == left if left is not None else 0 < free_memory() < total


def test_a_limit_below_what_is_used_leaves_nothing(tmp_path, monkeypatch):
    for name, text in (NEW | {"memory.max": "1000\n"}).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(local, "_GROUPS", (tmp_path,))
    assert free_memory() == 0
