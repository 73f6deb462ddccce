"""Ctrl-C in a callback of the garbage collection."""

import gc
import subprocess
import sys

import pytest

from trellis.interrupts import keep_interrupts


@pytest.fixture
def said(monkeypatch):
    """What Python's own hook was told; the hook of the tests is put back at the end."""
    told = []
    monkeypatch.setattr(sys, "__unraisablehook__", lambda dropped: told.append(dropped.exc_type))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    return told


def in_a_collection(fault):
    """Does something bad once, in a callback like JAX's own."""

    def callback(phase, _):
        gc.callbacks.remove(callback)
        fault()

    gc.callbacks.append(callback)
    gc.collect()


def ended(program: str) -> subprocess.CompletedProcess:
    """In a process of its own: what handles Ctrl-C in that of the tests is theirs."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)


@pytest.mark.slow
def test_ctrl_c_in_a_collection_is_delivered_after_it():
    program = """
import gc, signal, time
from trellis.interrupts import keep_interrupts

def callback(phase, _):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
keep_interrupts()
gc.callbacks.append(callback)
try:
    gc.collect()
    time.sleep(40)
except KeyboardInterrupt:
    print("interrupted")
"""
    end = ended(program)
    assert (end.returncode, end.stdout, end.stderr) == (0, "interrupted\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_of_what_else_is_dropped_python_tells(said, quiet):
    keep_interrupts(quiet)
    in_a_collection(lambda: 1 / 0)
    assert said == ([] if quiet else [ZeroDivisionError])


@pytest.mark.slow
def test_ctrl_c_at_the_exit_ends_at_once_with_the_exit_code():
    program = """
import atexit, signal, time
from trellis.interrupts import end_at_once_on_interrupt
atexit.register(time.sleep, 60)
atexit.register(signal.raise_signal, signal.SIGINT)
print("done", flush=True)
end_at_once_on_interrupt(3)
"""
    end = ended(program)
    assert (end.returncode, end.stdout, end.stderr) == (3, "done\n", "")


@pytest.mark.slow
def test_a_command_that_is_interrupted_ends_without_an_exit_of_pythons():
    """Which takes XLA's client from threads that still compute: one evaluation in four was aborted."""
    program = """
import atexit, sys
from trellis.commands import line

def run(*_):
    print("begun")
    raise KeyboardInterrupt

atexit.register(print, "exit")
line._run, sys.argv = run, ["trellis", "evaluate"]
line.main()
"""
    end = ended(program)
    assert (end.returncode, end.stdout, end.stderr) == (130, "begun\n", "")


@pytest.mark.slow
def test_a_command_ends_although_a_thread_waits_for_ever():
    program = """
import threading
from trellis.interrupts import end_within

threading.Thread(target=threading.Event().wait).start()
end_within(0.1, 3)
"""
    assert ended(program).returncode == 3
