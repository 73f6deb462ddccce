"""Seconds of compiled programs on a device, and what they are held against."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_of(fn: Callable, *args: Any, at_least: float = 1.0) -> float:
    """Median seconds of a call, over five groups of calls that are dispatched together.

    Args:
        fn: under `jax.jit`.
        *args: its arguments.
        at_least: seconds that all groups take together.
    """
    jax.block_until_ready(fn(*args))

    def group(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        jax.block_until_ready(out)
        return (time.perf_counter() - started) / calls

    calls = max(1, min(1000, round(at_least / 5 / max(group(1), 1e-9))))
    return statistics.median(group(calls) for _ in range(5))


def products_dtype() -> str:
    """The type that kernels are tried in: XLA's CPU cannot run all of them in bfloat16."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def step_times(step: Callable[[], Any], *, seconds: float, fewest: int = 5, most: int = 40) -> list[float]:
    """Seconds of each of several steps that are dispatched one behind the other, as in training.

    Args:
        step: dispatches one and returns something of it.
        seconds: how long to go on.
        fewest: steps at least.
        most: steps at most.
    """
    jax.block_until_ready(step())  # what compiles or wakes up has done so
    times, before = [], step()
    jax.block_until_ready(before)
    at = time.perf_counter()
    waiting = step()
    while len(times) < fewest or (sum(times) < seconds and len(times) < most):
        ahead = step()  # the device is never out of work while the host waits
        jax.block_until_ready(waiting)
        now = time.perf_counter()
        times.append(now - at)
        at, waiting = now, ahead
    jax.block_until_ready(waiting)
    return times
