"""Measures what a CPU can do: the rates that a plan for this machine is made from."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Machine(NamedTuple):
    """Rates of this machine's CPU, for all devices that share it together."""

    float32: float
    """FLOP/s of large float32 products."""
    bfloat16: float
    """FLOP/s of large bfloat16 products."""
    fill: float
    """Terms of a product's sum that its start and end cost: sums of this many terms reach half of the rate."""
    vector: float
    """Elementwise operations a second; an exponential counts as 12."""
    memory: float
    """Bytes a second to and from memory."""
    cache: float
    """Bytes a second if everything fits into `CACHED` bytes."""
    launch: float
    """The least seconds that one operation takes."""


CACHED = 2 << 20


def measure_machine(clock: Callable[[], float] = time.perf_counter) -> Machine:
    """Measures one CPU device; takes a few seconds.

    Args:
        clock: seconds. `time.process_time` measures what this process alone used, which with one core of a busy machine
            is what it would take on a quiet one.
    """
    square = lambda a: a @ a
    large, small = 1024, 128
    rate32 = _rate(square, _ones(large, large), work=2.0 * large**3, clock=clock)
    rate16 = _rate(square, _ones(large, large, dtype="bfloat16"), work=2.0 * large**3, clock=clock)
    short = _rate(
        lambda a, b: a @ b, _ones(large, small), _ones(small, large), work=2.0 * large**2 * small, clock=clock
    )
    wide, narrow = _ones(4096, 4096), _ones(CACHED // 16)
    memory = _rate(lambda x: x + 1.0, wide, work=2.0 * wide.nbytes, clock=clock)
    cache = _rate(lambda x: x + 1.0, narrow, work=2.0 * narrow.nbytes, clock=clock, calls=50)
    numbers = _ones(256, 1024)
    vector = _rate(lambda x: jnp.exp(jnp.exp(x * 1e-3) * 1e-3), numbers, work=2.0 * 12 * numbers.size, clock=clock)
    launch = 1 / _rate(_chain, _ones(8, 8), work=float(_LINKS), clock=clock, calls=20)
    # rate(n) = rate * n / (n + fill), from n = large and n = small
    ratio = min(short / rate32, 0.99)
    fill = max((small - ratio * small) / (ratio - small / large), 0.0) if ratio > small / large else float(large)
    whole = (large + fill) / large
    return Machine(rate32 * whole, rate16 * whole, fill, vector, memory, cache, launch)


_LINKS = 64


def _chain(x):
    """Tiny products, which are not fused with one another."""
    for _ in range(_LINKS):
        x = x @ x
    return x


def _ones(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.full(shape, 1e-2, dtype)


def _rate(fn: Callable, *args: Any, work: float, clock: Callable[[], float], calls: int = 1) -> float:
    """`work` over the seconds of the fastest of seven tries."""
    jitted = jax.jit(fn)
    jax.block_until_ready(jitted(*args))
    best = float("inf")
    for _ in range(7):
        started = clock()
        for _ in range(calls):
            out = jitted(*args)
        jax.block_until_ready(out)
        best = min(best, (clock() - started) / calls)
    return work / max(best, 1e-9)
