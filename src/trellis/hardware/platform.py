"""This machine: the platforms that JAX looks for, the share of a GPU's memory that it takes, the processor's name."""

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from trellis.errors import UserError


def choose_platform() -> None:
    """Keeps JAX from looking for TPUs on a Linux machine without any: if libtpu is there, it would wait and complain.

    libtpu is installed for compiling programs ahead of time. A platform that the user chose stays.
    """
    config: Any = jax.config
    if config.jax_platforms or sys.platform != "linux" or find_spec("libtpu") is None or has_tpu():
        return
    gpu = any(find_spec(f"jax_{plugin}_plugin") for plugin in ("cuda12", "cuda13", "rocm7"))
    if not gpu:
        jax.config.update("jax_platforms", "cpu")
    elif any(Path("/dev").glob("nvidia[0-9]*")):
        jax.config.update("jax_platforms", "cuda,cpu")


def claim_gpu_memory() -> None:
    """Lets JAX have 95 % of a GPU's memory instead of 75, so that what fits by a plan does fit; a user's choice stays.

    The rest is for what JAX does not allocate itself: CUDA's own memory, libraries' workspaces, buffers of collectives.
    JAX reads the variable when it first looks at its devices.
    """
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.95"


def devices_of_jax(*platform: str) -> list[Any]:
    """`jax.devices`, of the platform that JAX prefers or of another one.

    Raises:
        UserError: there are none.
    """
    config: Any = jax.config
    try:
        return jax.devices(*platform)
    except (RuntimeError, AssertionError) as error:  # JAX asserts that some platform that it was told has one
        raise UserError(
            "JAX must have devices of the platform that it is to use.",
            seen=" ".join(str(error).split())[:300] or "none",
            where=f"JAX_PLATFORMS={config.jax_platforms or ''}",
            fix="set the environment variable JAX_PLATFORMS to cpu, or to nothing for JAX to choose; `trellis doctor` "
            "then shows what is there",
        ) from None


def has_tpu() -> bool:
    """Whether this host has TPUs."""
    return any(Path("/dev").glob("accel[0-9]*")) or Path("/dev/vfio/0").exists()


def processor(system: Path = Path("/proc/cpuinfo")) -> str:
    """The name of this machine's processor, with its family and model if the system gives them.

    Clouds name all of a vendor's alike: `AMD EPYC (family 25, model 17)` has AVX-512, `(family 25, model 1)` has not.

    Args:
        system: the file in which Linux describes it.
    """
    try:
        lines = system.read_text().splitlines()
    except OSError:
        return platform.processor()
    first = lines[: lines.index("")] if "" in lines else lines
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}
    which = [f"{name} {told[key]}" for key, name in (("cpu family", "family"), ("model", "model")) if key in told]
    name = told.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({', '.join(which)})" if which else name
