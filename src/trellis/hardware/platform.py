"""Which of this machine's platforms JAX looks for."""

import sys
from importlib.util import find_spec
from pathlib import Path

import jax


def choose_platform() -> None:
    """Keeps JAX from looking for TPUs on a Linux machine that has none: with libtpu there, it would wait and complain.

    libtpu is there where programs are compiled ahead of time. A platform that the user chose stays.
    """
    if jax.config.jax_platforms or sys.platform != "linux" or find_spec("libtpu") is None or has_tpu():
        return
    gpu = any(find_spec(f"jax_{plugin}_plugin") for plugin in ("cuda12", "cuda13", "rocm7"))
    if not gpu:
        jax.config.update("jax_platforms", "cpu")
    elif any(Path("/dev").glob("nvidia[0-9]*")):
        jax.config.update("jax_platforms", "cuda,cpu")


def has_tpu() -> bool:
    """Whether this host has TPUs."""
    return any(Path("/dev").glob("accel[0-9]*")) or Path("/dev/vfio/0").exists()
