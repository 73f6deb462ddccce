"""Devices that are only described, which is enough for meshes, layouts and tracing, not for compiling.

A quick plan needs no compiler and no plugin. These take the place of devices, with the coordinates, hosts and slices
that arrange a mesh.
"""

import dataclasses
import itertools
import math

from trellis.hardware.chips import Target


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
    """One device that is not here, with the attributes of a `jax.Device` that placement looks at."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    num_cores: int | None = None
    client: None = None

    def __repr__(self) -> str:
        return f"{self.device_kind}({self.id})"


def described_devices(target: Target) -> list[DescribedDevice]:
    """The devices of a target, slices one after the other, hosts within a slice."""
    chip = target.chip
    kind = chip.device_kind
    if chip.kind == "gpu":
        hosts, per_host = target.shape
        return [
            DescribedDevice(host * per_host + i, "cuda", kind, host, host, (0, 0, 0), i)
            for host in range(hosts)
            for i in range(per_host)
        ]
    shape = (*target.shape, *[1] * (3 - len(target.shape)))
    bounds = tuple(min(side, most) for side, most in zip(shape, (2, 2, 1)))
    hosts = tuple(side // bound for side, bound in zip(shape, bounds))
    devices = []
    for index in range(target.num_slices):
        for coords in itertools.product(*(range(side) for side in reversed(shape))):
            x, y, z = reversed(coords)
            host = (z // bounds[2] * hosts[1] + y // bounds[1]) * hosts[0] + x // bounds[0]
            process = index * math.prod(hosts) + host
            for core in range(chip.devices_per_chip):
                devices.append(DescribedDevice(len(devices), "tpu", kind, process, index, (x, y, z), core))
    return sorted(devices, key=lambda d: (d.slice_index, d.process_index, d.id))
