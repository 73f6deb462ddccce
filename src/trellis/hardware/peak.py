"""The matrix-product peak that utilisation (MFU) is measured against: published for accelerators, measured on a CPU."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from trellis.hardware.chips import published_peak
from trellis.mesh.platform import are_cpus

# The least seconds and tries of a measurement: a machine that is busy now may not be so a moment later.
_LONG, _TRIES = 0.3, 6


def measure_matmul_peak(dtype: Any = "float32", devices: Sequence[Any] | None = None, size: int = 1024) -> float:
    """The FLOP/s that square matrix products reach on all given devices at once: the best of several tries.

    Takes about a second. CPU devices of one machine share its cores, so their peak is that of all together.

    Args:
        dtype: the type of the factors. Sums are float32, as in a step: for a bfloat16 result XLA's CPU compiler
            converts the factors first and does not use the processor's bfloat16 instructions.
        devices: the default is every device of this process.
        size: the factors are "{size} {size}".
    """
    devices = jax.local_devices() if devices is None else devices
    with ThreadPoolExecutor(1) as outside:  # where no mesh is in force: on a mesh, single devices are refused
        seconds = outside.submit(_measured, jnp.dtype(dtype), devices, size).result()
    return 2.0 * size**3 * len(devices) / seconds


def _measured(dtype: Any, devices: Sequence[Any], size: int) -> float:
    """The seconds of a product on each device."""
    factors = [jax.device_put(jnp.ones((size, size), dtype), device) for device in devices]
    product = jax.jit(square)
    jax.block_until_ready([product(x) for x in factors])  # compiles
    seconds = []
    while len(seconds) < _TRIES or sum(seconds) < _LONG:
        start = time.perf_counter()
        jax.block_until_ready([product(x) for x in factors])
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def square(x: jax.Array) -> jax.Array:
    """A matrix times itself, in float32."""
    return jnp.matmul(x, x, preferred_element_type=jnp.float32)


def matmul_peak(devices: Sequence[Any], dtype: Any) -> float | None:
    """The peak of all devices together in FLOP/s: published, or measured if these are CPUs.

    None for accelerators that are not in the table: a utilisation against a guess would mislead.
    """
    published = published_peak(devices[0].device_kind)
    if published is not None:
        return published * len(devices)
    if not are_cpus(devices):
        return None
    here = [d for d in devices if d.process_index == jax.process_index()]
    return measure_matmul_peak(dtype, here) * jax.process_count()
