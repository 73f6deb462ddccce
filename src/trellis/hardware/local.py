"""This machine's own devices as a target, with measured rather than published peaks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trellis.hardware.chips import MEMORY_EFFICIENCY, Chip, Target, chip_of
from trellis.hardware.measure import CACHED, Machine
from trellis.mesh.platform import are_cpus

# Where a process in a container finds its own group's limit of memory, by version 2 or 1 of Linux's control groups.
_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


def local_target(devices: Sequence[Any], *, measured: Machine | None = None) -> Target:
    """The devices of this machine.

    Known accelerators are taken from the table. CPUs have no published peaks: give `measured`, or get a placeholder of
    100 GFLOP/s and 10 GB/s that is good only for memory.
    """
    device = devices[0]
    if are_cpus(devices):
        return Target(
            name=f"{len(devices)} CPU devices",
            chip=_cpu(measured, len(devices)),
            shape=(1, len(devices)),
            wrap=(False, False),
        )
    chip = chip_of(device.device_kind) or _cpu(measured, len(devices))
    hosts = len({d.process_index for d in devices})
    if not chip.torus:
        return Target(name=device.device_kind, chip=chip, shape=(hosts, len(devices) // hosts), wrap=(False, False))
    count = len(devices) // chip.devices_per_chip
    return Target(
        name=device.device_kind, chip=chip, shape=(count, *[1] * (chip.torus - 1)), wrap=(False,) * chip.torus
    )


# A placeholder for a CPU that was not measured: good only for memory.
_UNKNOWN = Machine(100e9, 100e9, 0.0, 10e9, 10e9, 10e9, 0.0)


def _cpu(measured: Machine | None, count: int) -> Chip:
    rates = measured or _UNKNOWN
    return Chip(
        name="cpu",
        kind="cpu",
        bf16_flops=rates.bfloat16 / count,
        fp4_flops=rates.bfloat16 / count,
        fp8_flops=rates.bfloat16 / count,
        int8_flops=rates.bfloat16 / count,
        float32_share=rates.float32 / rates.bfloat16,
        hbm_bytes=_host_memory() / count,
        hbm_bandwidth=rates.memory / MEMORY_EFFICIENCY / count,  # this is already what streaming code reaches
        link_bandwidth=rates.memory / count / 2,
        network_bandwidth=rates.memory / count / 2,
        host_bandwidth=rates.memory / count / 2,
        vector_flops=rates.vector / count,
        matmul_efficiency=1.0,
        attention_efficiency=1.0,
        whole_attention_efficiency=1.0,
        tile=1,
        fill=rates.fill,
        cache_bytes=CACHED,
        cache_bandwidth=rates.cache / count,
        launch_seconds=rates.launch,
        overlap=(),
        source="measured on this machine" if measured else "a placeholder",
    )


def free_memory() -> int:
    """The bytes that programs can still have before the system ends one; the whole memory if it does not say.

    Swap counts as memory. In a container with a limit it is what the limit leaves.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kibibytes = {line.partition(":")[0]: line.split()[1] for line in file}
        free = 1024 * (int(kibibytes["MemAvailable"]) + int(kibibytes.get("SwapFree", 0)))
    except (OSError, ValueError, KeyError):
        free = _host_memory()
    limits = [left for folder in _GROUPS if (left := left_by_limit(folder)) is not None]
    return max(0, min([free, *limits]))


def left_by_limit(folder: Path) -> int | None:
    """The bytes that a control group's limit leaves; None if it has none. Files that are only cached do not count.

    Args:
        folder: where Linux tells of the group, by version 1 or 2.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = ((folder / name).read_text().strip() for name in (limit, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return None if most == "max" else int(most) - int(now) + int(stat[cached])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _host_memory() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 16 * 2**30
