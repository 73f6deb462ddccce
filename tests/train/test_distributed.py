"""Several processes: how they are found, that they train as one, and how they end together."""

import json
import re
import signal
import socket
import sys
import time

import pytest

from tests.train import forks
from tests.train.small import GOOD
from trellis.errors import UserError
from trellis.train import distributed
from trellis.train.distributed import detect, initialize
from trellis.train.stopping import RunStopped, Signals, explain

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_GPUS_ON_NODE": "8",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
THREE = {"coordinator_address": "h:1", "num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate"}


@pytest.mark.parametrize(
    "env, options, expected",
    [
        ({}, {}, None),
        (SLURM, {}, {"cluster_detection_method": "slurm", "local_device_ids": list(range(8))}),
        ({**SLURM, "SLURM_NTASKS": "1"}, {}, None),
        ({**SLURM, "SLURM_GPUS_ON_NODE": ""}, {}, {"cluster_detection_method": "slurm"}),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3"},
            {},
            {"cluster_detection_method": "slurm", "local_device_ids": [3]},
        ),
        ({**OMPI, "OMPI_MCA_orte_hnp_uri": "x"}, {}, {"cluster_detection_method": "ompi"}),
        (OMPI, {"coordinator": "h:1"}, THREE),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {}, None),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, {}, {"cluster_detection_method": "k8s"}),
        ({"KUBERNETES_SERVICE_HOST": "h"}, {}, None),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, {"processes": 1}, None),
        (SLURM, {"processes": 1, "process": 0}, None),
        ({}, {"tpu": True}, {}),
        (SLURM, {"coordinator": "h:1", "processes": 2, "process": 1}, THREE),
    ],
)
def test_clusters_are_found(env, options, expected):
    assert detect(env, **{"tpu": False, **options}) == expected


@pytest.mark.parametrize(
    "env, options, rule, fix",
    [
        ({}, {"coordinator": "h:1"}, "must be set together", "add --distributed.processes, --distributed.process"),
        ({}, {"process": 1, "processes": 2}, "must be set together", "add --distributed.coordinator"),
        (
            {},
            {"coordinator": "h", "processes": 2, "process": 0},
            "must be an address and a port",
            "write it as HOST:PORT, with a port from 1 to 65535",
        ),
        ({}, {"coordinator": "h:65536", "processes": 2, "process": 1}, "must be an address and a port", "1 to 65535"),
        (
            {},
            {"coordinator": "h:1", "processes": 2, "process": 2},
            "must have a number from 0 to the number",
            "use 0 to 1",
        ),
        ({}, {"coordinator": "h:1", "processes": 1, "process": 0}, "must be 2 or more", "leave the options out"),
        ({}, {"coordinator": "h:1", "processes": 0, "process": 0}, "must be 2 or more", "leave the options out"),
        (OMPI, {}, "need an address at which they find each other", "with the host of rank 0"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, "must be whole numbers", "or unset OMPI_COMM_WORLD_RANK"),
        ({**SLURM, "SLURM_NTASKS": ""}, {}, "must be whole numbers", "or unset SLURM_NTASKS"),
    ],
)
def test_wrong_options_are_refused(env, options, rule, fix):
    with pytest.raises(UserError) as error:
        detect(env, **options)
    assert rule in error.value.rule and error.value.fix.endswith(fix)


def test_a_pod_that_finds_no_others_is_told_how_to_train_alone(monkeypatch):
    for name in ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match="must be able to reach process 0") as error:
        initialize()
    assert error.value.fix.startswith("for one pod use --distributed.processes 1; several need a headless service")
    assert not initialize(processes=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_in_use(host):
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match="needs a free port at which to wait for the others") as error:
            initialize(coordinator=address, processes=2, process=0)
    assert "in use" in error.value.seen and error.value.where == f"--distributed.coordinator {address}"


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_for_which_the_others_do_not_come_says_that_it_waits_and_then_ends(process):
    alone = forks.start("tests.train.test_distributed", free_address(), process, 1)
    _, err = alone.communicate(timeout=60)
    assert alone.returncode == 2, err
    waits, *message = err.splitlines()
    assert re.fullmatch(r"waits    for the other processes of the run at 127.0.0.1:\d+, 1 s at most", waits)
    assert message[:2] == [
        "trellis: All processes of a run must be able to reach process 0.",
        "  seen:  not all within 1 s",
    ]
    assert "check that all processes run, each with its own number" in message[3]


def test_a_process_that_waits_for_others_ends_by_ctrl_c():
    alone = forks.start("tests.train.test_distributed", free_address(), 1, 60)
    deadline = time.monotonic() + 30
    while "waits" not in alone.said("err") and time.monotonic() < deadline:
        time.sleep(0.01)
    alone.send_signal(signal.SIGINT)
    alone.communicate(timeout=10)
    assert alone.returncode == -signal.SIGINT


def test_a_process_that_joins_twice_is_told_how_to_start_them():
    address = free_address()
    processes = [forks.start("tests.train.test_distributed", address, process, 6) for process in (0, 1, 1)]
    ends = [process.communicate(timeout=60)[1] for process in processes]
    assert {process.returncode for process in processes} == {2}, ends
    assert any("seen:  JAX's runtime ended this process, for the reason above" in err for err in ends), ends


def test_a_lost_process_is_told_apart_from_an_error_of_its_own(monkeypatch):
    import jax

    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllReduce failed: Connection reset by peer\nmore")
    own = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes")
    assert explain(lost, GOOD) is lost, "one process has no peers"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = explain(lost, GOOD)
    assert isinstance(told, RunStopped) and told.exit_code == 3
    assert told.rule == "All processes of a run must keep running."
    assert told.seen == "process 0 of 2 lost another process: UNKNOWN: Gloo AllReduce failed: Connection reset by peer"
    assert told.where == "last good checkpoint: c"
    assert told.fix == "check the other processes' output, then start them all again"
    assert explain(own, GOOD) is own


def test_a_process_lost_while_a_checkpoint_is_written_is_found_behind_the_timeout_of_who_waited(monkeypatch):
    import jax

    barrier = jax.errors.JaxRuntimeError("INTERNAL: Barrier failed because: Task 1 heartbeat timeout.\nmore")
    waited = TimeoutError("Timed out while waiting for async_write_complete barrier.")
    waited.__cause__ = barrier
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = explain(waited, GOOD)
    assert isinstance(told, RunStopped) and told.where == "last good checkpoint: c"
    assert (
        told.seen == "process 0 of 2 lost another process: INTERNAL: Barrier failed because: Task 1 heartbeat timeout."
    )
    alone = TimeoutError("Timed out")
    assert explain(alone, GOOD) is alone


@pytest.mark.parametrize("before, stops_at", [(0, 1), (3, 4)])
def test_a_signal_stops_all_processes_of_a_start_also_one_that_comes_before_its_first_step(
    monkeypatch, before, stops_at
):
    """A resumed run asks after its steps 14, 15, ..., and JAX's service does not know of steps before a signal."""
    import jax
    from jax.experimental import multihost_utils

    service = {"call": 0, "stop": None}

    def reached(number):
        service["call"] = number
        return service["stop"] == number

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    signals = Signals()
    assert [signals.exit_code() for _ in range(before)] == [None] * before
    service["stop"] = service["call"] + 1  # as the service chooses it when a process gets the signal
    assert [signals.exit_code() for _ in range(3)] == [143] * 3 and service["call"] == stops_at


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start(folder, *more, pause=0.03, each=None):
    """The toy as two processes of four CPU devices each; `each` has options of single ones."""
    words = ("tests.train.toy", folder, "--data", 4, "--pause", pause, *more)
    words += ("--coordinator", free_address(), "--processes", 2, "--process")
    own = {0: (), 1: (), **(each or {})}
    return [forks.start(*words, process, *own[process]) for process in (0, 1)]


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_lines(folder, count):
    deadline = time.monotonic() + 120
    while len(lines(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_train_as_one_stop_as_one_and_go_on_as_one(tmp_path):
    both = tmp_path / "both"
    processes = start(both, "--steps", "4000", "--every", "3")
    wait_for_lines(both, 8)
    processes[1].terminate()
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [143, 143], ends[0][1]
    last = [json.loads(out.splitlines()[-1]) for out, _ in ends]
    made = last[0]["step"]
    assert made == last[1]["step"] >= 8 and last[0]["loss"] == last[1]["loss"]
    folder = both / "checkpoints" / f"step-{made:08d}"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["processes"] == 2
    for process in (0, 1):
        part = sum(size for name, (size, _) in manifest["files"].items() if f"/ocdbt.process_{process}/" in name)
        assert part > 1.5 * 64 * 64 * 4, "each process wrote about half of four matrices, compressed"
    for name in ("both", "one"):  # one process of two devices goes on; another trains from the start
        words = ("--devices", 2, "--model", 1, "--steps", made + 4)
        process = forks.start("tests.train.toy", tmp_path / name, *words)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    curves = [[line["loss"] for line in lines(tmp_path / name)] for name in ("both", "one")]
    # Eight devices sum in another order than two: a few float32 roundings over some twenty steps.
    assert len(curves[0]) == made + 4 and curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [(1,), (0, 1)])
def test_an_interrupt_of_one_process_or_of_all_saves_before_all_end(tmp_path, interrupted):
    processes = start(tmp_path, "--steps", "4000")
    wait_for_lines(tmp_path, 8)
    for number in interrupted:
        processes[number].send_signal(signal.SIGINT)
    ends = [process.communicate(timeout=120) for process in processes]
    expected = [130 if number in interrupted else 143 for number in (0, 1)]
    assert [process.returncode for process in processes] == expected, ends[0][1]
    made = [json.loads(out.splitlines()[-1])["step"] for out, _ in ends]
    assert made[0] == made[1] >= 8
    assert (tmp_path / "checkpoints" / f"step-{made[0]:08d}" / "manifest.json").exists()


@pytest.mark.slow
def test_a_second_interrupt_ends_a_process_of_several_at_once(tmp_path):
    processes = start(tmp_path, "--steps", "4000", pause=3.0)  # nobody looks for a signal before the next step
    wait_for_lines(tmp_path, 1)
    processes[1].send_signal(signal.SIGINT)
    time.sleep(0.2)
    processes[1].send_signal(signal.SIGINT)
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [3, 130], ends
    assert not any((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
def test_when_one_process_is_killed_the_other_leaves_and_names_the_last_good_checkpoint(tmp_path):
    processes = start(tmp_path, "--steps", "4000")
    wait_for_lines(tmp_path, 10)
    processes[1].kill()
    _, err = processes[0].communicate(timeout=60)
    processes[1].communicate(timeout=60)
    assert processes[0].returncode == 3, err
    assert "All processes of a run must keep running." in err and "last good checkpoint: " in err


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_that_falls_silent_ends_the_others_and_they_name_the_last_good_checkpoint(tmp_path, silent):
    """A machine that hangs closes no connection: its heartbeat stops, and JAX's runtime ends the process that waits."""
    processes = start(tmp_path, "--steps", "4000")
    wait_for_lines(tmp_path, 10)
    processes[silent].send_signal(signal.SIGSTOP)
    other = processes[1 - silent]
    try:
        _, err = other.communicate(timeout=100)
    finally:
        processes[silent].kill()
        processes[silent].communicate(timeout=60)
    assert other.returncode == 3, err
    assert "All processes of a run must keep running." in err and "last good checkpoint: " in err
    # Which of the two finds it first, the heartbeat or the connection, is theirs to say.
    assert any(
        f"process {1 - silent} of 2 {how}" in err for how in ("was ended by JAX's runtime", "lost another process")
    )


@pytest.mark.slow
def test_both_processes_find_a_bad_loss_at_the_same_step(tmp_path):
    """Metrics reach each process when they reach it; the run still ends everywhere at once, and nobody hangs."""
    processes = start(tmp_path, "--steps", "100", "--every", "3", "--spoil-at", "13", pause=0)
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [3, 3]
    for _, err in ends:
        assert "at step 14, 1 in a row (allowed: 0)" in err and "step-00000012" in err


def main() -> int:
    """One process of three, which only joins the others."""
    distributed._TOLD_AFTER = 0.0
    initialize(coordinator=sys.argv[1], processes=3, process=int(sys.argv[2]), timeout_seconds=int(sys.argv[3]))
    return 0
