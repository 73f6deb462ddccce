"""Where a computation will run, asked while it is traced, and of what kind devices are."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from trellis.cores import usable_cores
from trellis.mesh.topology import capability_of_kind

_THREADS = 8  # for each CPU device, since its collectives may hold some of them


def platform_of(x: jax.Array) -> str:
    """The platform, "cpu", "cuda", "tpu" or another, that a value being traced will live on.

    A mesh says it, even one of devices that are not here (ahead-of-time compilation). Without a mesh, it is JAX's
    default device, if one is set (`jax.default_device`), or backend.
    """
    config: Any = jax.config
    default = getattr(config.jax_default_device, "platform", config.jax_default_device)
    return _named(getattr(_device(x), "platform", None) or default or jax.default_backend())


def platform_of_devices(devices: jax.sharding.Mesh | Sequence[Any]) -> str:
    """The platform, "cpu", "cuda", "tpu" or another, of a mesh or of devices, which all share one."""
    first = devices.devices.flat[0] if isinstance(devices, jax.sharding.Mesh) else devices[0]
    return _named(first.platform)


def platform_of_abstract(device: Any) -> str:
    """The same of a mesh's abstract device, which is what JAX knows of its devices; empty for None."""
    return _named(getattr(device, "platform", ""))


def are_cpus(devices: jax.sharding.Mesh | Sequence[Any]) -> bool:
    """Whether a mesh or devices are a CPU's, which may stand in for a larger machine."""
    return platform_of_devices(devices) == "cpu"


def all_devices() -> list[Any]:
    """JAX's devices. If this is the first look at them, several of a CPU get threads for their collectives."""
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    asked: Any = jax.config
    if (count := max(asked.jax_num_cpu_devices, *map(int, forced), 1)) > 1:
        leave_threads(count)
    return jax.devices()


def leave_threads(devices: int) -> None:
    """Makes XLA's CPU client start with threads for several collectives of each device at once.

    Operations that do not wait for each other run at the same time, even those of two programs, and a collective keeps
    its thread until all devices have come. XLA starts as many threads as there are cores, or devices if these are more.
    So two collectives of some devices, as in a pipeline, may keep all of them while another device finds none, and
    after a minute XLA ends the process (JAX 0.10.2, docs/published-bugs.md, 35). The value of `NPROC` takes precedence.
    Call this before JAX looks at its devices.
    """
    os.environ.setdefault("NPROC", str(max(usable_cores(), _THREADS * devices)))


def rows_of_a_tile(devices: jax.sharding.Mesh | Sequence[Any]) -> int:
    """How many rows of an array devices keep together in memory: 8 on TPUs."""
    return 8 if platform_of_devices(devices) == "tpu" else 1


def _named(platform: str) -> str:
    """A GPU's platform by one of the names that JAX has for it."""
    return {"gpu": "cuda"}.get(platform, platform)


def adds_in_any_order(x: jax.Array) -> bool:
    """Whether devices add what is scattered to one place as it comes, so that sums have other bits each time: GPUs."""
    return platform_of(x) == "cuda"


def device_kind_of(x: jax.Array) -> str:
    """The maker's name for the devices that a value being traced will live on, as in "NVIDIA B200"."""
    return getattr(_device(x), "device_kind", None) or jax.devices()[0].device_kind


def cuda_capability_of(x: jax.Array) -> int:
    """The major compute capability of the GPUs that a value being traced will live on: 9 is Hopper; 0 if not known."""
    kind = device_kind_of(x)
    here = [getattr(device, "compute_capability", "0") for device in jax.devices() if device.device_kind == kind]
    return int(here[0].partition(".")[0]) if here else capability_of_kind(kind)


def scattered_tiles(device_kind: str) -> int:
    """Of how many tiles each device's share has to be a multiple for a reduce-scatter over a part of the mesh to run
    beside other work.

    libtpu 0.0.42 gives only such to a v6e's SparseCores. Any other is a fused operation, beside which nothing runs
    (benchmarks/results/experts_compiled.txt).
    """
    return 16 if device_kind.startswith("TPU v6") else 1


def _device(x: jax.Array) -> Any:
    """What is known of the devices of a value's mesh, or of the mesh in force; None without one."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


# The longest loops over layers that are written out. A loop copies all that it keeps for the backward pass into a stack
# and out of it, and each layer's parameters out of theirs. On an H200 these copies took 18 % of a step of 1B parameters
# that keeps everything, and 6 % of one that keeps what it must (benchmarks/results/accelerator_h200.txt). A compiler
# takes a second or two for each layer, which a run on several GPUs pays for all at once; there, the order of what they
# send matters, too: by the CUDA compiler's schedules a step of Llama 1B on 8 A100s takes 269 ms instead of 291 and 12.5
# GiB instead of 19.7, one of GPT-OSS on 8 B200s (12 turns) 795 instead of 813, one of Llama 8B on 8 H100s (32 turns,
# compiled in 32 s instead of 16) 1.59 s instead of 1.64 in the same 59.7 GiB, and one of Mixtral (32) 75.5 GiB instead
# of 51.9: weights of later layers are gathered as early as there is room. So more layers are written out if all of
# their weights, gathered, take a quarter of a GPU's memory.
_WRITTEN_OUT = {"cpu": (16, 16), "cuda": (64, 16)}  # on one device, and on several
_FEW_WEIGHTS = 10**10


def longest_written_out(x: Any, weights: Callable[[], float] | None = None) -> int:
    """How many turns at most a loop over layers may have to be faster written out; 0 if none is.

    On a CPU, unless it only rehearses a larger machine: more devices than processors are a rehearsal, for which the
    time to compile matters more. On GPUs, more of them on one that is alone, and on several if their weights are few.

    Args:
        x: an array, or a tree of them, that goes through the loop.
        weights: tells how many numbers all layers' parameters are; None: many.
    """
    leaves = jax.tree.leaves(x)
    if not leaves:
        return 0
    mesh, platform = jax.typeof(leaves[0]).sharding.mesh, platform_of(leaves[0])
    several = not mesh.empty and mesh.size > 1
    if several and platform == "cpu" and rehearses(mesh):
        return 0
    alone, beside = _WRITTEN_OUT.get(platform, (0, 0))
    few = several and alone > beside and weights is not None and weights() <= _FEW_WEIGHTS
    return beside if several and not few else alone


def rehearses(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
    """Whether a mesh of CPU devices has more of them than the machine has processors."""
    return mesh.size > usable_cores()
