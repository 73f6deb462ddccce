"""The physical links that a mesh axis runs over, and how fast a collective over it can be.

On a torus the mesh says where the devices of each axis are: on whole sides, which may be rings, or on parts of sides,
which are lines. On GPU nodes the last axes stay inside a host. The first axes cross hosts or slices.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from trellis.errors import UserError
from trellis.hardware.chips import Target
from trellis.hardware.described import described_devices
from trellis.inspect.rows import Row
from trellis.mesh.meshes import arrange
from trellis.mesh.platform import scattered_tiles

# The share of the published rate that a collective reaches: TPU torus links 45 of 50 GB/s (the scaling book's one-way
# rates); NCCL's bus bandwidth on NVSwitch about 360 of 450 GB/s.
EFFICIENCY = {"tpu": 0.9, "gpu": 0.8, "cpu": 0.8}
NETWORK_EFFICIENCY = 0.8
# The two cores of a v7x chip are joined six times as fast as one torus link (Google's TPU7x page).
CORE_TO_CORE = 6
HOP_SECONDS = 1e-6
LAUNCH_SECONDS = {"tpu": 2e-6, "gpu": 12e-6, "cpu": 12e-6}


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one mesh axis on one kind of link.

    Attributes:
        size: devices along it.
        where: "torus", "NVLink", "core" or "network".
        bandwidth: bytes a second that a device can receive over it, all links together, at the efficiency above. If its
            devices are several links apart, that many groups share the links.
        ring: whether it is a closed ring.
        side: the side of the torus that it is on; None elsewhere.
        apart: links from one device to the next.
    """

    size: int
    where: str
    bandwidth: float
    ring: bool = False
    side: int | None = None
    apart: int = 1

    @property
    def one_way(self) -> float:
        """The bandwidth if all devices send in one direction; a closed ring has as much again in the other."""
        return self.bandwidth / 2 if self.ring else self.bandwidth

    def __str__(self) -> str:
        if self.side is None:
            return f"{self.size} over {self.where}"
        apart = f" ({self.apart} links apart)" if self.apart > 1 else ""
        return f"{'ring' if self.ring else 'line'} of {self.size} on side {self.side}{apart}"


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """The links of every axis of a mesh on a target."""

    target: Target
    parts: Mapping[str, tuple[Segment, ...]]

    def bandwidth(self, axes: Sequence[str], kind: str = "all-gather") -> float:
        """The bytes a second that a device sends in a collective over these mesh axes together.

        Gathers and reductions use several sides of the torus at once, so their rates add. If the group crosses slices
        or hosts, each device brings its share through the network and the fast links pass it on: the rate is the
        network's times the devices of the group in one slice or host, at most the fast links' rate.

        In an all-to-all everything that a device sends is for one other device only. So all that leaves its host or
        slice goes through its own share of the network, and each side of a torus carries what crosses its middle (the
        scaling book's all-to-all; on sides of more than four chips it is slower than a gather of the same number of
        bytes). A permute is as fast as its slowest link.

        Args:
            axes: mesh axes.
            kind: the kind of collective, as in `trellis.program.moves`.
        """
        parts = _joined([part for axis in axes for part in self.parts.get(axis, ()) if part.size > 1])
        near = [part for part in parts if part.where != "network"]
        far = [part.bandwidth for part in parts if part.where == "network"]
        if not parts:
            return math.inf
        if kind == "permute":
            return min(part.one_way for part in parts)
        if kind == "all-to-all":
            devices = math.prod(part.size for part in parts)
            return (devices - 1) / devices / max(_crossing(part, devices) for part in parts)
        fast = sum(part.bandwidth for part in near) or math.inf
        return min(fast, far[0] * math.prod(part.size for part in near)) if far else fast

    def seconds(self, wire_bytes: float, axes: Sequence[str], kind: str = "all-gather") -> float:
        """Time of one collective in which each device sends `wire_bytes`: bytes over rate, plus hops and a launch."""
        parts = [part for axis in axes for part in self.parts.get(axis, ()) if part.size > 1]
        if not parts:
            return 0.0
        hops = sum(part.size // 2 if part.ring else part.size - 1 for part in parts if part.side is not None)
        return wire_bytes / self.bandwidth(axes, kind) + LAUNCH_SECONDS[self.target.chip.kind] + hops * HOP_SECONDS

    def scatters_as_reduce(self, axes: Sequence[str]) -> bool:
        """Whether a reduce-scatter over these axes together becomes an all-reduce and a slice: twice the bytes.

        libtpu 0.0.42 does this if the group is a whole slice, or several, of a v4, v5e, v5p or v6e torus of several
        sides; over a part of it, and on v7x, it scatters.
        """
        if self.target.chip.kind != "tpu" or self.target.chip.devices_per_chip > 1:
            return False
        parts = [part for axis in axes for part in self.parts.get(axis, ()) if part.side is not None]
        whole = math.prod(part.size for part in parts) == math.prod(self.target.shape)
        return whole and self.sides(axes) > 1

    def sides(self, axes: Sequence[str]) -> int:
        """How many sides of a torus these axes together are along."""
        parts = [part for axis in axes for part in self.parts.get(axis, ())]
        return len({part.side for part in parts if part.side is not None and part.size > 1})

    def scatters_alone(self, row: Row) -> bool:
        """Whether it is a reduce-scatter that nothing runs beside, whatever options say (`scattered_tiles`)."""
        fills = scattered_tiles(self.target.chip.device_kind)
        if row.kind != "reduce-scatter" or fills == 1:
            return False
        if self.scatters_as_reduce(row.axes) or self.crosses_network(row.axes):
            return False
        ways = math.prod(part.size for axis in row.axes for part in self.parts.get(axis, ()))
        return row.tiles % (ways * fills) > 0

    def crosses_network(self, axes: Sequence[str]) -> bool:
        """Whether a collective over these axes leaves a slice or a host."""
        return any(part.where == "network" for axis in axes for part in self.parts.get(axis, ()))

    def describe(self, axis: str) -> str:
        """The links of one axis in words, as in `ring of 16 on side 0`."""
        return ", ".join(map(str, self.parts.get(axis, ()))) or "no links (size 1)"


def _joined(parts: Sequence[Segment]) -> list[Segment]:
    """The segments on one side of a torus, or inside one host, joined into one."""
    places: dict[tuple, list[Segment]] = {}
    for part in parts:
        places.setdefault((part.where, part.side), []).append(part)
    joined = []
    for along in places.values():
        near = max(along, key=lambda part: part.one_way)
        size, ring = math.prod(part.size for part in along), any(part.ring for part in along)
        joined.append(dataclasses.replace(near, size=size, ring=ring, bandwidth=near.one_way * (2 if ring else 1)))
    return joined


def _crossing(part: Segment, devices: int) -> float:
    """The seconds that these links take for each byte of an array that each of `devices` devices sends to all, an equal
    part to each. On a side of a torus, half of the devices send half of theirs across the middle. Links inside a host
    carry only what stays in it.
    """
    sent = {"torus": part.size**2 // 4 / part.size, "NVLink": (part.size - 1) / devices}
    return sent.get(part.where, (part.size - 1) / part.size) / part.bandwidth


def check_tiles(mesh: Mapping[str, int], target: Target) -> None:
    """Refuses a mesh that does not fill the target.

    Raises:
        UserError: it does not; the message names shapes that do.
    """
    size = math.prod(mesh.values())
    if size == target.num_devices:
        return
    first = next(iter(mesh), "data")
    others = math.prod(size for axis, size in mesh.items() if axis != first)
    if target.num_devices % max(others, 1) == 0:
        fitting = [{**mesh, first: target.num_devices // others}]
    else:
        axes = list(mesh)[:2] if len(mesh) > 1 else [first, "model"]
        count = target.num_devices
        fitting = [{axes[0]: count // part, axes[1]: part} for part in (1, 2, 4, 8) if count % part == 0]
    shown = ", or ".join(" ".join(f"{axis}={n}" for axis, n in shape.items()) for shape in fitting)
    written = " ".join(f"{axis}={n}" for axis, n in mesh.items()) or "no axes"
    raise UserError(
        "The sizes of the mesh axes must multiply to the number of devices.",
        seen=f"{written} ({size}) on {target.name} ({target.num_devices} devices)",
        where="mesh",
        fix=f"use {shown}",
    )


def links_of(mesh: Mapping[str, int], target: Target) -> Links:
    """Puts a mesh on a target.

    >>> from trellis.hardware.chips import target
    >>> links_of({"data": 16, "model": 16}, target("v5e:16x16")).describe("model")
    'ring of 16 on side 0'

    Raises:
        UserError: the mesh does not fill the target.
    """
    check_tiles(mesh, target)
    chip = target.chip
    if not mesh:  # a program of one device that names no mesh
        return Links(target, {})
    if chip.torus:
        return Links(target, _on_torus(tuple(mesh.items()), target))
    parts: dict[str, list[Segment]] = {axis: [] for axis in mesh}
    left = target.shape[1]
    for axis in reversed(list(mesh)):
        inside = math.gcd(mesh[axis], left)
        left //= inside
        if inside > 1:
            parts[axis].append(Segment(inside, "NVLink", chip.link_bandwidth * EFFICIENCY[chip.kind]))
        if mesh[axis] > inside:
            network = chip.network_bandwidth * NETWORK_EFFICIENCY
            parts[axis].append(Segment(mesh[axis] // inside, "network", network))
    return Links(target, {axis: tuple(p) for axis, p in parts.items()})


@functools.lru_cache(maxsize=1024)
def _on_torus(mesh: tuple[tuple[str, int], ...], target: Target) -> dict[str, tuple[Segment, ...]]:
    """The links along each axis, by where the devices of this mesh are."""
    chip, parts = target.chip, {}
    rate = chip.link_bandwidth * EFFICIENCY[chip.kind]
    devices = arrange(described_devices(target), [axis for axis, _ in mesh], [size for _, size in mesh])
    for number, (axis, size) in enumerate(mesh):
        group = np.moveaxis(devices, number, 0).reshape(size, -1)[:, 0]
        slices, cores = (len({getattr(device, of) for device in group}) for of in ("slice_index", "core_on_chip"))
        near = {device.coords for device in group if device.slice_index == group[0].slice_index}
        found = [Segment(cores, "core", rate * CORE_TO_CORE)] if cores > 1 else []
        for side, count, apart in _sides(near, target.shape):
            ring = count * apart == target.shape[side] and target.wrap[side]
            found.append(Segment(count, "torus", rate * (2 if ring else 1) / apart, ring, side, apart))
        if slices > 1:
            found.append(Segment(slices, "network", chip.network_bandwidth * NETWORK_EFFICIENCY))
        parts[axis] = tuple(found)
    return parts


def _sides(places: Collection[tuple[int, ...]], shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """The sides of a torus that some of its chips are along, how many on each, and how many links apart.

    >>> _sides([(0, 0), (0, 2), (1, 0), (1, 2)], (2, 4))
    [(0, 2, 1), (1, 2, 2)]
    """
    on = [sorted({place[side] for place in places}) for side in range(len(shape))]
    if math.prod(map(len, on)) != len(places):  # JAX bends a ring through a small slice: they take turns along a side
        longest = max(range(len(shape)), key=lambda side: on[side][-1] - on[side][0])
        return [(longest, len(places), max(shape[longest] // len(places), 1))]
    return [(side, len(at), at[1] - at[0]) for side, at in enumerate(on) if len(at) > 1]
