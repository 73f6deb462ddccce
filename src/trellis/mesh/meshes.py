"""Meshes: devices arranged so that the axes that communicate least cross the slow links."""

import contextlib
import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, Sharding, SingleDeviceSharding

from trellis.choices import is_count
from trellis.errors import TrellisError
from trellis.mesh.platform import all_devices, are_cpus, platform_of_devices
from trellis.notation.shape import is_name
from trellis.notation.state import mode_of

# The axis that communicates least often comes first: gradients once a step, a stage's
# activations once a microbatch, weights once a layer, then what moves several times a layer.
OUTER_TO_INNER = (
    "replica", "stage", "data", "data_y", "data_z", "expert_y", "expert", "context_y", "context", "model",
)  # fmt: skip

_TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


class MeshError(TrellisError, ValueError):
    """A mesh that cannot be made from these devices."""


def same_mesh(mesh, other) -> bool:
    """Whether two meshes, concrete or abstract, have the same axes with the same sizes and types."""
    alike = lambda m: (m.axis_names, m.axis_sizes, m.axis_types)
    return mesh is other or alike(mesh) == alike(other)


def mesh_text(mesh) -> str:
    """A mesh as messages show it: `data=4, model=2`, and `auto` if its axes are left to the compiler."""
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{sizes}, auto" if mode_of(mesh) == "auto" else sizes


ALONE = "alone"
"""The one axis, of size 1, of a mesh that has no other left: without any, JAX would not know what its devices are."""


def without_axis(mesh: Mesh, axis: str) -> Mesh:
    """The devices that are first along one mesh axis, as a mesh of the other axes."""
    at = mesh.axis_names.index(axis)
    left = [i for i in range(len(mesh.axis_names)) if i != at]
    first = mesh.devices.take([0], at)
    if not left:
        return Mesh(first, (ALONE,), axis_types=mesh.axis_types)
    names, types = (tuple(values[i] for i in left) for values in (mesh.axis_names, mesh.axis_types))
    return Mesh(first.squeeze(at), names, axis_types=types)


@contextlib.contextmanager
def on_another(mesh: Mesh) -> Generator[None]:
    """Traces what is inside for another mesh, of another size, whatever mesh is in force."""
    nothing = jax.sharding.AbstractMesh((), ())  # JAX goes from one size to another only by way of no mesh
    with jax.sharding.use_abstract_mesh(nothing), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def make_mesh(devices: Sequence | None = None, *, axis_type: str = "explicit", **sizes: int) -> Mesh:
    """Arranges devices in a mesh with the given axes.

    Axes with the usual names are ordered outermost first, as in
    `OUTER_TO_INNER`; others follow in the order written. If the devices belong
    to several slices or hosts, the outermost axes are the ones that cross them.

    >>> dict(make_mesh(model=2, data=4).shape)
    {'data': 4, 'model': 2}

    Args:
        devices: the devices to use; all of them if not given.
        axis_type: "explicit" (shardings are in the types) or "auto".
        **sizes: axis sizes. One of them may be -1: it takes what is left.

    Raises:
        MeshError: the sizes do not multiply to the number of devices, or the
            axes cannot be divided over the slices or hosts.
    """
    devices = list(all_devices() if devices is None else devices)
    if axis_type not in _TYPES:
        raise MeshError(
            f"a mesh axis must be 'explicit' or 'auto', got axis_type={axis_type!r}, in make_mesh: pass one of the two"
        )
    sizes = _resolve(sizes, len(devices))
    names = outer_to_inner(sizes)
    shape = [sizes[name] for name in names]
    return Mesh(arrange(devices, names, shape), tuple(names), axis_types=(_TYPES[axis_type],) * len(names))


def outer_to_inner(names: Iterable[str]) -> list[str]:
    """Mesh axes in the order of a mesh, those without a usual name last."""
    return sorted(names, key=lambda n: OUTER_TO_INNER.index(n) if n in OUTER_TO_INNER else len(OUTER_TO_INNER))


def _resolve(sizes: dict[str, int], count: int) -> dict[str, int]:
    shown = " ".join(f"{name}={size}" for name, size in sizes.items())
    if not sizes:
        raise MeshError("a mesh needs at least one axis, got none, in make_mesh: write make_mesh(data=-1)")
    if bad := [n for n in sizes if not is_name(n)]:
        raise MeshError(
            f"a mesh axis needs a name that is valid in a type, got {bad[0]!r}, in make_mesh: use letters, digits and "
            "underscores"
        )
    if bad := [n for n, s in sizes.items() if not is_count(s) and (s != -1 or not isinstance(s, int | np.integer))]:
        raise MeshError(
            f"a mesh axis must have a positive integer size, or -1 for the remaining devices, got {shown}, in "
            f"make_mesh: correct '{bad[0]}'"
        )
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise MeshError(f"at most one mesh axis can have size -1, got {shown}, in make_mesh: give '{free[1]}' a size")
    known = math.prod(size for size in sizes.values() if size != -1)
    if free and count % known == 0:
        return {name: count // known if size == -1 else size for name, size in sizes.items()}
    if known != count or free:
        raise MeshError(
            f"the axes of a mesh must multiply to the number of devices, got {shown} "
            f"({'at least ' if free else ''}{known}) for {count} devices, in make_mesh: {_suggest(sizes, count)}"
        )
    return dict(sizes)


def _suggest(sizes: dict[str, int], count: int) -> str:
    first = next(iter(sizes))
    rest = math.prod(s for n, s in sizes.items() if n != first and s != -1)
    if count % rest == 0:
        return f"'{first}={count // rest}' fits, or use {rest} x n devices"
    return f"choose sizes that multiply to {count}, or pass devices=jax.devices()[:n]"


def sharding_of(leaf: Any) -> Sharding:
    """The sharding of an array, or the one that its type says; one device of this process if there is none."""
    found = getattr(leaf, "sharding", None)
    return found if found is not None else SingleDeviceSharding(jax.local_devices()[0])


def arrange(devices: list, names: list[str], shape: list[int]) -> np.ndarray:
    """The devices as an array of the mesh's shape, with slices (or hosts) along the outermost axes."""
    key = "slice_index" if len({getattr(d, "slice_index", 0) for d in devices}) > 1 else "process_index"
    one_torus = key == "process_index" and platform_of_devices(devices) == "tpu"
    groups = 1 if one_torus else len({getattr(d, key, 0) for d in devices})
    if groups == 1:
        if are_cpus(devices):
            return np.array(devices).reshape(shape)
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    across, left = [], groups
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    if left != 1:
        raise MeshError(
            "the outermost axes of a mesh must divide evenly over its "
            f"{'slices' if key == 'slice_index' else 'hosts'}, got {dict(zip(names, shape, strict=True))} for "
            f"{groups} of them, in make_mesh: make the size of '{names[0]}' a multiple of {groups}"
        )
    if platform_of_devices(devices) == "tpu":
        within = [size // part for size, part in zip(shape, across, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    # Hosts in order, then the devices of a host in order: [across..., within...] -> interleaved.
    ordered = np.array(sorted(devices, key=lambda d: (getattr(d, key), d.id)))
    within = [size // part for size, part in zip(shape, across, strict=True)]
    axes = [i + side * len(shape) for i in range(len(shape)) for side in (0, 1)]
    return ordered.reshape(across + within).transpose(axes).reshape(shape)


def without_axes(mesh, axes: frozenset[str]) -> jax.sharding.AbstractMesh:
    """A mesh without some of its axes."""
    named = [each for each in zip(mesh.shape.items(), mesh.axis_types, strict=True) if each[0][0] not in axes]
    sizes, kinds = tuple(size for (_, size), _ in named), tuple(kind for _, kind in named)
    return jax.sharding.AbstractMesh(sizes, tuple(name for (name, _), _ in named), kinds)
