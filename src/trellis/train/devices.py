"""The devices of a run: all accelerators of the machine, or a CPU split into several devices."""

import dataclasses
import math
from typing import Any

import jax

from trellis.cores import usable_cores
from trellis.errors import UserError
from trellis.hardware.platform import choose_platform, claim_gpu_memory, devices_of_jax
from trellis.mesh.platform import are_cpus, leave_threads
from trellis.run.config import Run

# The processors' caches and memory are shared: past this many devices a CPU gains nothing and compiles for longer.
_MOST_BY_DEFAULT = 8

_MORE = ', or ask for more before JAX first looks: jax.config.update("jax_num_cpu_devices", {})'


def find_devices(run: Run) -> list[Any]:
    """The devices that a run uses, `--devices` of them if that is given.

    On a CPU they are made here, which must happen before JAX has looked at its devices: call it first. A program that
    has runs of several sizes asks for enough before, by `jax.config.update("jax_num_cpu_devices", 8)`.

    Raises:
        UserError: there are fewer devices than asked for, or JAX has already looked; JAX finds no devices of the
            platform that it is told to use, or is told to compile nothing.
    """
    config: Any = jax.config
    if config.jax_disable_jit:
        raise UserError(
            "A run compiles its step.",
            seen="jax_disable_jit is on",
            where="the environment variable JAX_DISABLE_JIT, or jax.config",
            fix="leave it out",
        )
    choose_platform()
    claim_gpu_memory()
    count = run.devices or default_count(run, usable_cores())
    made = max(count, config.jax_num_cpu_devices)  # a program may have asked for more, to compare meshes
    if run.mesh.stage > 1 or made > usable_cores():
        leave_threads(made)
    try:
        jax.config.update("jax_num_cpu_devices", made)
    except RuntimeError:  # the backend already exists: what counts is how many devices it has
        pass
    devices = devices_of_jax()
    wanted = run.devices or (count if are_cpus(devices) or run.layout.preset == "single" else len(devices))
    if jax.process_count() > 1:
        if run.devices not in (None, here := jax.local_device_count()):
            raise UserError(
                "With several processes, each process must use all of its devices.",
                seen=f"devices={run.devices} where each process has {here} ({devices[0].device_kind})",
                where="--devices",
                fix="leave it out; whatever starts the processes sets which devices each of them has",
            )
        return devices
    if wanted > len(devices):
        raise UserError(
            "A run cannot use more devices than JAX has.",
            seen=f"devices={wanted} where JAX has {len(devices)} ({devices[0].device_kind})",
            where="--devices",
            fix=f"use {len(devices)} or fewer"
            + (_MORE.format(wanted) if are_cpus(devices) else "; set JAX_PLATFORMS=cpu to rehearse more on a CPU"),
        )
    return devices[:wanted]


def default_count(run: Run, cores: int) -> int:
    """One CPU device a core, or as many as the mesh and the batch can be divided over."""
    if run.layout.preset == "single":
        return 1
    return max(possible_counts(run, cores), default=1)


def possible_counts(run: Run, most: int) -> list[int]:
    """The numbers of CPU devices, up to `most`, that the mesh and the batch can be divided over."""
    sizes = dataclasses.asdict(run.mesh).values()
    known = math.prod(size for size in sizes if size != -1)
    if -1 not in sizes:
        return [known] if known <= most else []
    return [n for n in range(known, min(most, _MOST_BY_DEFAULT) + 1, known) if _divides(run, n // known)]


def _divides(run: Run, left: int) -> bool:
    """Whether batches and widths can be sliced if the mesh axis that takes what is left has this size."""
    mesh = {name: left if size == -1 else size for name, size in dataclasses.asdict(run.mesh).items()}
    parts = math.prod(mesh[name] for name in ("replica", "data", "data_y", "data_z", "expert", "expert_y"))
    batches = [(b.size, phase.run.parts) for phase in run.phases() for b in phase.run.batch_sizes()]
    return run.model.embed % left == 0 and all(size // of % parts == 0 for size, of in batches)
