"""The matrix-product peak that utilisation (MFU) is measured against: published for accelerators, measured on a CPU."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Dense bfloat16 peaks in TFLOP/s of one JAX device, by the start of its `device_kind`; the longest start that fits
# counts. Sources: cloud.google.com/tpu/docs/system-architecture-tpu-vm and the generations' pages (a chip of v2, v3
# and v7x is two devices); NVIDIA's data sheets of the A100, H100, H200, GH200, Blackwell (HGX B200 and GB200), L4, L40S
# and A10 (figures without sparsity); AMD's of the MI250X (a package is two devices), MI300X and MI325X.
_PEAKS = {
    "TPU v2": 22.5,
    "TPU v3": 61.5,
    "TPU v4": 275.0,
    "TPU v4 lite": 138.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU7x": 1153.5,
    "TPU v7x": 1153.5,
    "NVIDIA A100": 312.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA GH200": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA B300": 2250.0,
    "NVIDIA GB300": 2500.0,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI325X": 1307.4,
}


def published_peak(device_kind: str) -> float | None:
    """The dense bfloat16 peak of one device, in FLOP/s; None where it is not in the table.

    >>> published_peak("NVIDIA H200") / 1e12, published_peak("cpu")
    (989.0, None)
    """
    fitting = [start for start in _PEAKS if device_kind.startswith(start)]
    return _PEAKS[max(fitting, key=len)] * 1e12 if fitting else None


def measure_matmul_peak(dtype: Any = "float32", devices: Sequence[Any] | None = None, size: int = 1024) -> float:
    """FLOP/s that square matrix products reach on all given devices at once: the best of several tries.

    Takes about a second. CPU devices of one machine share its cores, so their peak is that of all together.

    Args:
        dtype: of the factors and the product.
        devices: the default is every device of this process.
        size: the factors are "{size} {size}".
    """
    devices = jax.local_devices() if devices is None else devices
    dtype = jnp.dtype(dtype)
    factors = [jax.device_put(jnp.ones((size, size), dtype), device) for device in devices]
    product = jax.jit(lambda x: jnp.matmul(x, x))
    jax.block_until_ready([product(x) for x in factors])  # compiles
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready([product(x) for x in factors])
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 * len(devices) / min(seconds)


def matmul_peak(devices: Sequence[Any], dtype: Any) -> float | None:
    """The peak of all devices together in FLOP/s: the published one, or measured where these are CPUs.

    None for accelerators that are not in the table: a utilisation against a guess would mislead.
    """
    published = published_peak(devices[0].device_kind)
    if published is not None:
        return published * len(devices)
    if devices[0].platform != "cpu":
        return None
    here = [d for d in devices if d.process_index == jax.process_index()]
    return measure_matmul_peak(dtype, here) * jax.process_count()
