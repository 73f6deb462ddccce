"""A step that does not end is found within its deadline, and every process says what it knows."""

import json
import signal
import time

import pytest

from tests.train.small import GOOD
from tests.train.test_distributed import lines, start, wait_for_lines
from trellis.run.config import DeadlineRule
from trellis.train import watchdog
from trellis.train.drain import Record
from trellis.train.watchdog import Watchdog

SECONDS = 3.0


@pytest.fixture
def ended(monkeypatch):
    """What a watchdog ended the process with."""
    found = []
    monkeypatch.setattr(watchdog, "leave_at_once", found.append)
    return found


def record(step: int, seconds: float) -> Record:
    return Record(step=step, values={}, dispatched=0.0, done=seconds, idle_from=0.0)


def watched(folder, factor=3.0, **more) -> Watchdog:
    """A watchdog of four steps, each of a tenth of a second."""
    rule = DeadlineRule(factor=factor, seconds=1.0)
    dog = Watchdog(rule, folder, lambda: GOOD, **more)
    for step in (5, 6, 7, 8):
        dog.finished(record(step, 90.0 if step == 5 else 0.1))
    return dog


def test_a_deadline_is_a_multiple_of_the_median_and_no_less_than_some_seconds(tmp_path):
    dog = watched(tmp_path)
    assert dog.deadline == 1.0, "the first step of a process compiles and does not count"
    for step in range(9, 13):
        dog.finished(record(step, 2.0))
    assert dog.deadline == 6.0
    dog.close()
    assert Watchdog(DeadlineRule(factor=None), tmp_path, lambda: GOOD).deadline is None
    assert not (tmp_path / "watch").exists()


def test_steps_of_another_kind_have_a_median_of_their_own(tmp_path):
    dog = watched(tmp_path)
    dog.forget()
    assert dog.deadline is None
    for step, seconds in ((9, 90.0), (10, 2.0), (11, 2.0), (12, 2.0)):
        dog.finished(record(step, seconds))
    assert dog.deadline == 6.0, "the first of them compiles and does not count"
    dog.close()


def test_a_late_step_ends_the_process_with_its_stacks(tmp_path, ended):
    noted = []
    dog = watched(tmp_path, noted=lambda *told: noted.append(told))
    dog.doing("waits for the batch of step 9")
    begun = time.monotonic()
    while not ended and time.monotonic() < begun + 20:
        time.sleep(0.05)
    dog.close()
    (error,) = ended[:1]
    assert time.monotonic() - begun > 0.9 and error.exit_code == 3
    assert error.rule == "A step must end within its deadline." and noted[0] == ("stopped", error.rule)
    assert error.seen.startswith("step 9 after 1") and "where the median is 0.1 s and the deadline 1 s" in error.seen
    assert error.seen.endswith("process 0 of 1 waits for the batch of step 9")
    assert error.where == f"last good checkpoint: c; Python stacks: {tmp_path / 'watch'}"
    assert error.fix.startswith(f"check the stacks, then {GOOD.again}; raise --deadline.factor or --deadline.seconds")
    assert "test_a_late_step_ends_the_process" in (tmp_path / "watch" / "stacks-0.txt").read_text()


def test_what_is_no_step_has_ten_deadlines_and_steps_that_come_none_to_pass(tmp_path, ended):
    dog = watched(tmp_path)
    with dog.excused("evaluates"):
        time.sleep(1.5)
    for step in range(9, 14):
        dog.doing(f"waits for the batch of step {step}")
        time.sleep(0.3)
        dog.finished(record(step, 0.1))
    dog.close()
    assert not ended


def test_who_is_behind(tmp_path):
    dog = Watchdog(DeadlineRule(factor=None), tmp_path, lambda: GOOD, first_collective="the all-gather along data")
    dog._processes = 3
    state = lambda ticks, dispatched, doing: {
        "ticks": ticks, "dispatched": dispatched, "doing": doing, "host": f"n{dispatched}"
    }  # fmt: skip
    before = {0: state(1, 14, "a"), 1: state(1, 12, "b"), 2: state(1, 14, "c")}
    now = {0: state(3, 14, "a"), 1: state(3, 12, "waits for the batch of step 13"), 2: state(3, 14, "c")}
    assert dog._who(before, now, 13) == (
        "late: process 1 on n12, which waits for the batch of step 13; "
        "the others wait in step 13, whose first collective is the all-gather along data"
    )
    assert dog._who(before, now | {1: before[1]}, 13) == "late: process 1 on n12, which is silent (last: b)"
    assert dog._who({}, {0: now[0], 2: now[2]}, 13) == "late: process 1, which is silent (last: has written nothing)"
    assert dog._who(before, now | {1: state(3, 14, "b")}, 13) == (
        "no process is behind the others: all wait for their devices"
    )


def test_processes_that_devices_wait_for_are_named_once(tmp_path):
    noted = []
    dog = Watchdog(DeadlineRule(factor=None), tmp_path, lambda: GOOD, noted=lambda *told: noted.append(told))
    state = lambda idle: {"pace": 0.5, "idle": idle, "host": "n7"}
    states = {0: state(0.0), 1: state(0.2), 2: state(0.01), 3: {}}
    for _ in range(2):
        dog._name_slow(states)
    assert noted == [("slow", "devices wait for process 1 on n7 for 40% of a step")]
    dog._name_slow({0: state(0.3), 1: state(0.3), 2: state(0.3)})  # all of them: nobody waits for one
    assert len(noted) == 1
    for step, handed in ((1, 9.0), (2, 10.25), (3, 11.0)):
        dog.finished(Record(step=step, values={}, dispatched=handed, done=step + 10.0, idle_from=step + 8.0))
    assert list(dog._idle) == [0.25, 0.0]


@pytest.mark.slow
def test_a_stopped_process_is_named_by_the_other(tmp_path):
    # Between evaluations and without checkpoints: one that waits for a process ends by the runtime's own limit.
    processes = start(tmp_path, "--steps", "4000", "--every", "4000", "--deadline", str(SECONDS))
    wait_for_lines(tmp_path, 11)
    processes[1].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    try:
        _, err = processes[0].communicate(timeout=60)
        took = time.monotonic() - begun
    finally:
        processes[1].kill()
        processes[1].communicate(timeout=60)
    assert processes[0].returncode == 3, err
    assert "A step must end within its deadline.\n  seen:  step " in err and "no checkpoint was written yet" in err
    assert "; late: process 1 on " in err and "which is silent (last: " in err
    assert "loop.py" in (tmp_path / "watch" / "stacks-0.txt").read_text()
    assert took < 3 * SECONDS + 5


@pytest.mark.slow
def test_a_process_whose_loop_hangs_is_named_by_both(tmp_path):
    """Its heartbeat lives: JAX's runtime would wait for ever."""
    processes = start(tmp_path, "--steps", "4000", "--deadline", str(SECONDS), each={1: ("--stick-at", "15")})
    ends = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [3, 3], ends
    for _, err in ends:
        assert "A step must end within its deadline.\n  seen:  step 16 after " in err
        assert "; late: process 1 on " in err and ", which waits for the batch of step 16" in err
        assert "last good checkpoint: " in err
    assert 'tests/train/toy.py", line ' in (tmp_path / "watch" / "stacks-1.txt").read_text()
    assert lines(tmp_path)[-1]["step"] <= 15


@pytest.mark.slow
def test_a_slow_process_is_named(tmp_path):
    """Its batches take half a second, and the other's nothing."""
    processes = start(
        tmp_path, "--steps", "16", "--deadline", "2", "--every", "16", pause=0, each={1: ("--pause", "0.5")}
    )
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    events = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    slow = [event["why"] for event in events if event["event"] == "slow"]
    assert slow and slow[0].startswith("devices wait for process 1 on ")
