"""Where a computation will run, asked while it is traced."""

from typing import Any

import jax

from trellis.cores import usable_cores


def platform_of(x: jax.Array) -> str:
    """The platform, "cpu", "cuda", "tpu" or another, that a value being traced will live on.

    A mesh says it, also one of devices that are not here (ahead-of-time compilation); without a mesh it is JAX's
    default backend.
    """
    platform = getattr(_device(x), "platform", None) or jax.default_backend()
    return {"gpu": "cuda"}.get(platform, platform)


def device_kind_of(x: jax.Array) -> str:
    """What their makers call the devices that a value being traced will live on, as in "NVIDIA B200"."""
    return getattr(_device(x), "device_kind", None) or jax.devices()[0].device_kind


def _device(x: jax.Array) -> Any:
    """What is known of the devices of a value's mesh, or of the mesh in force; None without one."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


def unrolls_loops(x: Any) -> bool:
    """Whether a loop over layers runs faster written out: on a CPU, unless it only rehearses a larger machine.

    More devices than processors are a rehearsal, where the time to compile counts for more.

    Args:
        x: an array, or a tree of them, that goes through the loop.
    """
    leaves = jax.tree.leaves(x)
    if not leaves or platform_of(leaves[0]) != "cpu":
        return False
    mesh = jax.typeof(leaves[0]).sharding.mesh
    return mesh.empty or not rehearses(mesh)


def rehearses(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    """Whether a mesh of CPU devices has more of them than the machine has processors."""
    return mesh.size > usable_cores()
