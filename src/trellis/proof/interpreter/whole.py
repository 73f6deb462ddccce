"""Programs that are not partitioned yet: whole arrays, and within a `shard_map` each device's parts of them.

Outside manual regions, a value is whole and the same on all devices. Shardy's custom calls cut it into parts where a
region begins, and put the parts together again, or sum them up, where it ends.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.values import NotInterpreted, Value

_MESHES = re.compile(r"xla\.sdy\.meshes=\{(\w+) = #sdy\.mesh<\[([^\]]*)\](, device_ids=)?")
_PENDING = re.compile(r"unreduced=\{([^}]*)\}")


def mesh_of(text: str) -> dict[str, int]:
    """The axes of a program's mesh, from its head; nothing if it names no mesh or numbers its devices differently.

    >>> mesh_of('HloModule f, frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["data"=2, "model"=4]>}}')
    {'data': 2, 'model': 4}
    """
    found = _MESHES.search(text[:200_000].replace("\\", ""))
    if found is None or found[3]:
        return {}
    return {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', found[2])}


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """For each dimension, the mesh axes that cut it, and those along which the array is a pending sum."""

    dims: tuple[tuple[str, ...], ...]
    pending: tuple[str, ...]


def _shardings(instruction: Instruction, name: str) -> tuple[list[_Sharding], list[str]]:
    """The shardings of a region's operands or results, by its manual axes only, and these."""
    text = instruction.attributes.replace("\\", "")
    found = re.search(rf'{re.escape(name)}="#sdy\.sharding_per_value<\[(.*?)\]>"', text)
    manual = re.search(r"manual_axes\{([^}]*)\}", text)
    if found is None or manual is None or '":(' in found[1]:
        raise NotInterpreted(f"the shardings of {instruction.name}")
    axes = re.findall(r'"([^"]+)"', manual[1])
    mine = lambda part: tuple(a for a in re.findall(r'"([^"]+)"', part) if a in axes)
    # Behind the dimensions may also stand axes that cut none, on purpose: `replicated={"data"}`.
    shardings = [
        _Sharding(tuple(mine(dim) for dim in re.findall(r"\{([^}]*)\}", dims)), mine("".join(_PENDING.findall(rest))))
        for dims, rest in re.findall(r"<@\w+, \[([^\]]*)\]([^<>]*)>", found[1])
    ]
    return shardings, axes


def _places(mesh: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Each device's place along each mesh axis."""
    sizes = tuple(mesh.values())
    return dict(zip(mesh, np.indices(sizes).reshape(len(sizes), -1)))


def _pieces(shape: Sequence[int], sharding: _Sharding, mesh: Mapping[str, int]) -> list[tuple[slice, ...]]:
    """Which part of an array each device has."""
    places, count = _places(mesh), math.prod(mesh.values())
    dims = []
    for size, axes in zip(shape, sharding.dims):
        at, parts = np.zeros(count, int), 1
        for axis in axes:
            at, parts = at * mesh[axis] + places[axis], parts * mesh[axis]
        dims.append([slice(p * (size // parts), (p + 1) * (size // parts)) for p in at])
    return list(zip(*dims)) if dims else [()] * count


def _first(mesh: Mapping[str, int], axes: Sequence[str]) -> np.ndarray:
    """The devices that are first along some axes."""
    places = _places(mesh)
    return np.all(np.stack([places[axis] == 0 for axis in axes]), axis=0) if axes else np.ones(1, bool)


def _teams(mesh: Mapping[str, int], axes: Sequence[str]) -> np.ndarray:
    """For each device the number of those that are where it is along all mesh axes but these.

    >>> _teams({"data": 2, "model": 2}, ["model"]).tolist()
    [0, 0, 1, 1]
    """
    number = np.zeros(math.prod(mesh.values()), int)
    for axis, place in _places(mesh).items():
        number = number if axis in axes else number * mesh[axis] + place
    return number


def _begin(instruction: Instruction, machine) -> Callable:
    (shardings, _), mesh = _shardings(instruction, "xla.sdy.in_shardings"), machine.mesh

    def one(x: np.ndarray, sharding: _Sharding, index: int) -> np.ndarray:
        if not any(sharding.dims) and not sharding.pending:
            return x
        parts = np.stack([x[min(d, len(x) - 1)][piece] for d, piece in enumerate(_pieces(x.shape[1:], sharding, mesh))])
        if not sharding.pending:
            return parts
        holds = _first(mesh, sharding.pending).reshape(-1, *[1] * (parts.ndim - 1))
        return np.where(holds, parts, np.zeros((), parts.dtype))

    return _each(one, shardings, machine, instruction)


def _end(instruction: Instruction, machine) -> Callable:
    (shardings, manual), mesh = _shardings(instruction, "xla.sdy.out_shardings"), machine.mesh
    kind = machine.type(instruction)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # Within another region, devices go on with their own along its axes: each of these teams puts its parts together.
    teams = _teams(mesh, manual)

    def one(x: np.ndarray, sharding: _Sharding, index: int) -> np.ndarray:
        shape = kinds[index].shape
        if len(x) == 1 and not any(sharding.dims) and not sharding.pending:
            return x
        rows = np.broadcast_to(x, (len(teams), *x.shape[1:]))
        cut = {axis for axes in sharding.dims for axis in axes}
        others = [axis for axis in manual if axis not in cut and axis not in sharding.pending]
        counts = np.broadcast_to(_first(mesh, others), len(rows))
        out = np.zeros((teams.max() + 1, *shape), x.dtype)
        for device, piece in enumerate(_pieces(shape, sharding, mesh)):
            if counts[device]:
                out[(teams[device], *piece)] += rows[device]
        alike = all(np.array_equal(row, out[0], equal_nan=row.dtype.kind in "fc") for row in out)
        return out[:1] if alike else out[teams]

    return _each(one, shardings, machine, instruction)


def _each(one: Callable, shardings: list[_Sharding], machine, instruction: Instruction) -> Callable:
    """Does the same for every operand, on all devices that there are."""
    kind = machine.type(instruction)

    def run(values, team) -> Value:
        if len(team) != machine.num_devices:
            raise NotInterpreted(f"{instruction.name} on some of the devices")
        found = tuple(one(v, sharding, index) for index, (v, sharding) in enumerate(zip(values, shardings)))
        return found if isinstance(kind, tuple) else found[0]

    return run


TARGETS: Mapping[str, Callable] = {
    "xla.sdy.GlobalToLocalShape": _begin,
    "xla.sdy.LocalToGlobalShape": _end,
}
