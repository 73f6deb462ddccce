"""The benchmark of an accelerator at toy sizes: it ends, goes on where it stopped, and a row that fails is alone."""

import doctest
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from trellis.inspect import parse_program
from trellis.plan import quick_plan, target
from trellis.recipes import load_run

HERE = pathlib.Path(__file__).parents[2] / "benchmarks"
GPU_PROGRAM = """HloModule step

ENTRY %main (x: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %gemm.1 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %flash.2 = bf16[64,64]{1,0} custom-call(%gemm.1), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %sine.3 = bf16[64,64]{1,0} sine(%flash.2)
}
"""


@pytest.fixture
def accelerator(monkeypatch):
    """The driver as a module, with its folder on the path as when it is started."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE / "accelerator_rows"))
    import accelerator

    return accelerator


def start(folder: pathlib.Path, script=HERE / "accelerator.py") -> subprocess.Popen:
    command = [sys.executable, str(script), "--toy", "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def saved(folder: pathlib.Path) -> list[dict]:
    path = folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow(first=True)
def test_it_is_stopped_and_goes_on_to_its_end(tmp_path, accelerator):
    with start(tmp_path) as first:
        for line in first.stdout:
            if line.startswith("[3/"):  # two rows are saved, and the third has begun
                first.send_signal(signal.SIGTERM)
                break
        assert first.stdout.read().strip().endswith("stopped; the same command goes on")
    assert first.returncode == 130
    before = saved(tmp_path)
    assert [line["row"] for line in before] == ["machine", "check attention"]

    with start(tmp_path, pathlib.Path(__file__).with_name("forked.py")) as second:
        told = second.stdout.read()
    after = saved(tmp_path)
    failed = {line["row"]: line["why"] for line in after if line["outcome"] != "done"}
    assert second.returncode == 0 and not failed, failed
    assert [line["row"] for line in after] == [row.name for row in accelerator.all_rows(True, "1xH200")]
    assert after[:2] == before and "check attention ..." not in told

    step = next(line for line in after if line["row"] == "1b, search 1")["values"]
    assert step["tokens_per_second"] > 0 and step["mfu_noncausal"] > step["mfu"] > 0 and step["compiled_peak"] > 0
    assert sum(step["profile"]["kinds"].values()) > 0 and step["profile"]["kinds"]["products"] > 0
    table = (tmp_path / "table.txt").read_text()
    assert table in told and "seqax, published" in table and "explicit 84m" in table and "torch 1b" in table

    with start(tmp_path) as third:
        assert third.stdout.read().strip() == table.strip()
    assert saved(tmp_path) == after


@pytest.mark.slow
def test_a_row_that_fails_or_hangs_loses_itself_only(tmp_path, accelerator):
    options = ["--toy", "--on", "1xH200"]
    rows = {row.name: row for row in accelerator.all_rows(True, "1xH200")}
    (tmp_path / "rows.jsonl").write_text("")
    needs = accelerator.perform(rows["1b, search 1"], tmp_path, 100, options, "cpu")
    assert needs["outcome"] == "left out"
    assert needs["why"] == "needs what `plan 1b` finds, which did not end well"
    hangs = accelerator.perform(rows["machine"], tmp_path, 0.2, options, "cpu")
    assert (hangs["outcome"], hangs["why"], hangs["values"]) == ("too long", "ended after 0 s", {})


@pytest.mark.slow
def test_without_an_accelerator_there_is_nothing_to_measure(tmp_path):
    command = [sys.executable, str(HERE / "accelerator.py"), "--folder", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, saved(tmp_path)) == (2, [])
    assert "JAX finds no accelerator here" in done.stdout and done.stdout == (tmp_path / "told.txt").read_text()


def test_a_line_that_was_cut_off_is_no_row(tmp_path, accelerator):
    (tmp_path / "rows.jsonl").write_text('{"row": "machine", "outcome": "done"}\n{"row": "check lo')
    rows = accelerator.Rows(tmp_path)
    rows.add({"row": "check loss", "outcome": "failed"})
    rows.add({"row": "check loss", "outcome": "done"})
    assert saved(tmp_path) == [{"row": "machine", "outcome": "done"}, {"row": "check loss", "outcome": "done"}]


def test_time_in_which_a_device_has_nothing_to_do(tmp_path, accelerator):
    """A GPU's profile: kernels on two streams, one beside another, one behind a gap; the host's events do not count."""
    from profiles import operations_of, shares

    program, product, attention, other = parse_program(GPU_PROGRAM), "gemm.1", "flash.2", "sine.3"
    named = lambda pid, tid, what, name: {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
    ran = lambda tid, op, ts, dur, pid=1: {
        "ph": "X", "pid": pid, "tid": tid, "name": "kernel", "ts": ts, "dur": dur, "args": {"hlo_op": op},
    }  # fmt: skip
    events = [
        named(1, 0, "process_name", "/device:GPU:0"), named(2, 0, "process_name", "/host:CPU"),
        named(1, 5, "thread_name", "Stream #5(Compute)"), named(1, 6, "thread_name", "Stream #6"),
        named(1, 7, "thread_name", "XLA Ops"), named(2, 8, "thread_name", "python"),
        ran(5, product, 0, 50), ran(6, attention, 40, 20), ran(5, other, 80, 20), ran(7, product, 0, 100),
        ran(8, "x", 0, 999, 2),
    ]  # fmt: skip
    with gzip.open(tmp_path / "perfetto_trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = shares(operations_of(tmp_path / "perfetto_trace.json.gz"), program)
    assert found["seconds"] == pytest.approx(100e-6)
    assert found["idle"] == pytest.approx(0.2)
    assert found["kinds"] == pytest.approx({"products": 0.5, "attention": 0.2, "elementwise": 0.2})


def test_examples_in_its_docstrings(accelerator):
    import experts
    import profiles
    import steps
    import texts

    for module in (accelerator, experts, profiles, steps, texts):
        tried = doctest.testmod(module)
        assert tried.attempted and not tried.failed


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1b", "2b", "270m", "540m"])
def test_steps_of_recipes_have_room_on_one_device(accelerator, size):
    from accelerator_rows.rows import recipe

    given, where = recipe(size).given, target("1xH100")
    plan = quick_plan(load_run(given["recipe"], given["options"]), where)
    assert plan.memory.peak < 0.95 * where.chip.hbm_bytes


def test_kernels_of_a_command_buffer_are_told_apart_by_what_they_are_called(tmp_path, accelerator):
    """XLA names all of them after the buffer; its own kernels are called like their operations, libraries' are not."""
    from profiles import operations_of, shares

    named = lambda tid, what, name: {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": {"name": name}}
    ran = lambda name, ts: {"ph": "X", "pid": 1, "tid": 5, "name": name, "ts": ts, "dur": 10,
                            "args": {"hlo_op": "command_buffer_1"}}  # fmt: skip
    kernels = ("sine_3", "nvjet_sm90_tst_128x256", "cudnn_flash_bprop", "memcpy32_post", "something_else")
    events = [named(0, "process_name", "/device:GPU:0"), named(5, "thread_name", "Stream #5(Compute)")]
    events += [ran(name, 10 * i) for i, name in enumerate(kernels)]
    with gzip.open(tmp_path / "perfetto_trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = shares(operations_of(tmp_path / "perfetto_trace.json.gz"), parse_program(GPU_PROGRAM))
    kinds = ("elementwise", "products", "attention", "copies", "outside of the program")
    assert found["kinds"] == pytest.approx(dict.fromkeys(kinds, 0.2)) and found["idle"] == pytest.approx(0)
