"""Fits a recipe to hardware that it was not written for: what the user did not choose changes, and is reported."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence

from trellis.errors import UserError
from trellis.hardware.chips import Target
from trellis.hardware.described import described_devices
from trellis.run.config import BatchSize, Run
from trellis.run.layouts import AXES, MeshSizes, make_layout
from trellis.run.on_mesh import batch_parts

DATA_AXES = ("data", "data_y", "data_z")
# The others, in the order in which they take their devices.
_OTHERS = ("model", "context", "context_y", "expert", "expert_y", "stage", "replica")


def adapt(run: Run, target: Target, given: Collection[str]) -> tuple[Run, list[str]]:
    """A run whose mesh fills the target and whose batch gives every device a row.

    A mesh that does not fill it keeps its sizes of all axes but those of data, as far as they divide the target; data
    parallelism takes the rest, on a TPU along each side of the torus. The batch grows to the next multiple of the
    devices along its mesh axes, times microbatches, times the parts of `interleave`. What the user gave stays, and is
    an error if it does not divide.

    Args:
        run: the run.
        target: the hardware.
        given: dotted names of the fields that the user set.

    Returns:
        The run, and a sentence for each change.

    Raises:
        UserError: the user set the number of devices, which the target determines, or sizes of mesh axes that do not
            divide it.
    """
    if "devices" in given and run.devices is not None:
        fix = "leave it out"
        if target.chip.kind == "gpu" and target.shape[0] == 1:
            fix += f", or use --on {run.devices}x{target.name.rpartition('x')[2]}"
        seen = f"{run.devices} devices on {target.name}"
        raise UserError(
            "The number of devices cannot be set: the target determines it.", seen=seen, where="--devices", fix=fix
        )
    notes = []
    if not any(name.startswith("mesh") for name in given) or _sizes(run.mesh, target) is None:
        fitted = fitted_mesh(run.mesh, target, _fixed(run.mesh, given))
        if _sizes(fitted, target) != _sizes(run.mesh, target):
            notes.append(
                f"mesh {_words(run.mesh)} -> {_words(fitted)} so that it fills {target.name}; "
                f"--mesh.{_first(fitted)} N and the like set it"
            )
            run = dataclasses.replace(run, mesh=fitted)
    if "batch_size" not in given:
        parts = _parts(run, target) * _shrinks(run)
        grown = tuple(BatchSize(step=b.step, size=-(-b.size // parts) * parts) for b in run.batch_sizes())
        if grown != run.batch_sizes():
            before, after = (" then ".join(str(b.size) for b in sizes) for sizes in (run.batch_sizes(), grown))
            micro = " in each microbatch" if run.parts > 1 else ""
            notes.append(
                f"batch_size {before} -> {after} so that every device has a row{micro}; --batch_size N sets it"
            )
            run = dataclasses.replace(run, batch_size=grown[0].size if isinstance(run.batch_size, int) else grown)
    return run, notes


def _fixed(mesh: MeshSizes, given: Collection[str]) -> list[str]:
    """The mesh axes whose sizes the user gave: those of options, or all that a file's mesh slices over."""
    sizes = {name: size for name, size in dataclasses.asdict(mesh).items() if size != -1}
    if any(f"mesh.{name}" in given for name in AXES):
        return [name for name in sizes if f"mesh.{name}" in given]
    return [name for name, size in sizes.items() if size > 1] if "mesh" in given else []


def fitted_mesh(mesh: MeshSizes, target: Target, fixed: Sequence[str] = ()) -> MeshSizes:
    """A recipe's mesh on a target that it was not written for. Data axes that fill its sides stay as they are, and so
    do axes whose size is fixed.

    >>> from trellis.hardware.chips import target
    >>> fitted = fitted_mesh(MeshSizes(model=8), target("v5p:8x8x8"))
    >>> fitted.data, fitted.data_y, fitted.model
    (8, 8, 8)
    >>> fitted_mesh(MeshSizes(data=8, data_y=2, data_z=4), target("v6e:8x8")).data_z
    4
    >>> fitted_mesh(MeshSizes(data=16, data_y=2, data_z=2), target("v6e:8x8")).data
    16
    >>> fitted_mesh(MeshSizes(data=4, data_y=4, data_z=4), target("v6e:8x8")).data
    8
    """
    if _fills_sides(mesh, target):
        return mesh
    if (found := _fitted(mesh, target, fixed)) is None:
        name = next((name for name in fixed if name in DATA_AXES), fixed[-1])
        sizes = range(1, target.num_devices + 1)
        able = [str(n) for n in sizes if _fitted(dataclasses.replace(mesh, **{name: n}), target, fixed)]
        listed = f"--mesh.{name} {' or '.join(filter(None, (', '.join(able[:-1]), *able[-1:])))}"
        raise UserError(
            "The sizes of the mesh axes must multiply to the number of devices.",
            seen=f"{' '.join(f'{axis}={getattr(mesh, axis)}' for axis in fixed)}, devices={target.num_devices}",
            where=f"mesh.{name}",
            fix=f"use {listed if able else f'sizes that multiply to {target.num_devices}'}",
        )
    return found


def _fitted(mesh: MeshSizes, target: Target, fixed: Sequence[str]) -> MeshSizes | None:
    """The mesh with its fixed sizes and with others that fill the target; None if there are none."""
    kept = {name: getattr(mesh, name) for name in fixed}
    left, odd = divmod(target.num_devices, math.prod(kept.values()))
    if odd:
        return None
    for name in _OTHERS:
        if name not in kept:
            size = getattr(mesh, name)
            kept[name] = left if size == -1 else math.gcd(size, left)
            left //= kept[name]
    if any(axis in fixed for axis in DATA_AXES):
        return dataclasses.replace(mesh, **{**dict.fromkeys(DATA_AXES, 1), **kept}) if left == 1 else None
    data = data_sizes(left, target)
    return dataclasses.replace(mesh, **kept, **{axis: data.get(axis, 1) for axis in DATA_AXES})


def _fills_sides(mesh: MeshSizes, target: Target) -> bool:
    """Whether each side of a torus is one of a mesh's data axes, or several that follow each other. If there are more
    axes than sides, one that begins with a side may end within the next."""
    sizes = _sizes(mesh, target)
    if target.chip.kind != "tpu" or target.num_slices > 1 or sizes is None or set(sizes) - set(DATA_AXES):
        return False
    left = [side for side in target.shape if side > 1]
    more, begun = len(sizes) > len(left), False
    for size in (sizes[axis] for axis in DATA_AXES if axis in sizes):
        if left and more and not begun and size > left[0] and size % left[0] == 0:
            size //= left.pop(0)
        if not left or left[0] % size:
            return False
        left[0] //= size
        begun = left[0] > 1
        left = left if begun else left[1:]
    return not left


def data_sizes(ways: int, target: Target) -> dict[str, int]:
    """`ways` devices of data parallelism, with one mesh axis along each side of the torus if they fill it.

    >>> from trellis.hardware.chips import target
    >>> data_sizes(256, target("v5e:16x16")), data_sizes(64, target("v5e:16x16"))
    ({'data': 16, 'data_y': 16}, {'data': 64})
    """
    if target.chip.kind == "tpu" and target.num_slices == 1 and target.chip.devices_per_chip == 1:
        for count in range(len(target.shape), 1, -1):
            for sides in itertools.combinations(target.shape, count):
                if math.prod(sides) == ways and all(side > 1 for side in sides):
                    return dict(zip(DATA_AXES, sides))
    return {"data": ways}


def _sizes(mesh: MeshSizes, target: Target) -> dict[str, int] | None:
    """The sizes of a mesh on a target; None if it does not fill it."""
    try:
        sizes = mesh.resolve(target.num_devices)
    except UserError:
        return None
    return {name: size for name, size in sizes.items() if size > 1}


def _parts(run: Run, target: Target) -> int:
    """How many equal parts a batch is cut into: devices along the mesh axes of `batch`, times microbatches, times the
    parts of each that run side by side."""
    parts = batch_parts(run, make_layout(run.mesh, run.layout, described_devices(target)))
    routing = getattr(run.model, "routing", None)
    return math.prod(parts.values()) * (1 if routing is None else routing.interleave)


def _shrinks(run: Run) -> int:
    """How many times fewer sequences a step has once they are longer and the step keeps its tokens."""
    longer = [entry.length for entry in run.lengths if entry.batch_size is None]
    return math.lcm(*(length // math.gcd(length, run.data.sequence_length) for length in longer))


def _words(mesh: MeshSizes) -> str:
    sizes = {name: size for name, size in dataclasses.asdict(mesh).items() if size != 1}
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size != -1) or "data=all"


def _first(mesh: MeshSizes) -> str:
    return next((name for name, size in dataclasses.asdict(mesh).items() if size > 1), "data")
