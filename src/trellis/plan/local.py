"""This machine's own devices as a target, with peaks that are measured and not published."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .hardware import Chip, Target, chips

_TPU_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "v7x"}


def local_target(devices: Sequence[Any], *, measured: "Peaks | None" = None) -> Target:
    """The devices that are here.

    Known accelerators are taken from the table. CPUs have no published peaks: give `measured`, or get a placeholder
    of 100 GFLOP/s and 10 GB/s that is only good for memory.
    """
    device = devices[0]
    if device.platform == "cpu":
        return Target(
            name=f"{len(devices)} CPU devices",
            chip=_cpu(measured, len(devices)),
            shape=(1, len(devices)),
            wrap=(False, False),
        )
    known = chips()
    name = _TPU_KINDS.get(device.device_kind)
    if name is None:
        words = device.device_kind.lower().replace("nvidia ", "").split()
        name = next((word.split("-")[0] for word in words if word.split("-")[0] in known), None)
    chip = known[name] if name else _cpu(measured, len(devices))
    hosts = len({d.process_index for d in devices})
    if chip.kind == "gpu":
        return Target(name=device.device_kind, chip=chip, shape=(hosts, len(devices) // hosts), wrap=(False, False))
    count = len(devices) // chip.devices_per_chip
    return Target(
        name=device.device_kind, chip=chip, shape=(count, *[1] * (chip.torus - 1)), wrap=(False,) * chip.torus
    )


class Peaks(tuple):
    """Measured `(float32 product FLOP/s, bfloat16 product FLOP/s, vector operations/s, memory B/s)` of a machine."""

    __slots__ = ()


def _cpu(measured: Peaks | None, count: int) -> Chip:
    f32, bf16, vector, memory = measured or (100e9, 100e9, 10e9, 10e9)
    return Chip(
        name="cpu",
        kind="gpu",
        bf16_flops=bf16 / count,
        fp8_flops=bf16 / count,
        float32_share=f32 / bf16,
        hbm_bytes=_host_memory() / count,
        hbm_bandwidth=memory / count,
        link_bandwidth=memory / count / 2,
        network_bandwidth=memory / count / 2,
        vector_flops=vector / count,
        matmul_efficiency=1.0,
        attention_efficiency=1.0,
        tile=1,
        overlap=(),
        source="measured on this machine" if measured else "a placeholder",
    )


def _host_memory() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 16 * 2**30


def _rate(fn, *args, work: float, repeats: int = 5) -> float:
    jitted = jax.jit(fn)
    jax.block_until_ready(jitted(*args))
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(jitted(*args))
        best = min(best, time.perf_counter() - started)
    return work / best


@functools.cache
def measure_peaks(size: int = 1024) -> Peaks:
    """Measures this machine on one device: products, elementwise operations, and memory. Takes about a second."""
    a32 = jnp.ones((size, size), jnp.float32)
    a16 = a32.astype(jnp.bfloat16)
    flops = 2.0 * size**3
    f32 = _rate(lambda a: a @ a, a32, work=flops)
    bf16 = _rate(lambda a: a @ a, a16, work=flops)
    wide = jnp.ones((4096, 4096), jnp.float32)
    memory = _rate(lambda x: x + 1.0, wide, work=2.0 * wide.nbytes)
    small = jnp.ones((256, 1024), jnp.float32)
    vector = _rate(lambda x: jnp.exp(jnp.exp(x * 1e-3) * 1e-3), small, work=2.0 * 12 * small.size)
    return Peaks((f32, bf16, vector, memory))
