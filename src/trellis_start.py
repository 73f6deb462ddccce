"""The first lines of the `trellis` command, outside the package: nothing is imported before a process starts anew."""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

# Training on a CPU allocates and frees large buffers every step. Large pages, and an allocator that keeps freed memory
# instead of handing it back to the kernel, spare it the page faults.
_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"


def allocator_env(arguments: Sequence[str], env: Mapping[str, str], dev: pathlib.Path) -> dict[str, str] | None:
    """The environment that a process should be started with to train fast on a CPU; None where it is right already.

    It holds for glibc on Linux. TRELLIS_ALLOCATOR=default in the environment leaves everything as it is.

    Args:
        arguments: the command line; only `train` gains.
        env: the environment now.
        dev: the folder of device files, which shows accelerators.
    """
    accelerators = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd")
    on_cpu = env.get("JAX_PLATFORMS") == "cpu" or not any(any(dev.glob(pattern)) for pattern in accelerators)
    if sys.platform != "linux" or list(arguments[:1]) != ["train"] or not on_cpu or "TRELLIS_ALLOCATOR" in env:
        return None
    tunables = ":".join(filter(None, [env.get("GLIBC_TUNABLES"), _TUNABLES]))
    return {**env, "GLIBC_TUNABLES": tunables, "TRELLIS_ALLOCATOR": "large-pages"}


def main() -> int:
    """Starts the process anew where that helps, then hands over to `trellis.cli`."""
    if env := allocator_env(sys.argv[1:], os.environ, pathlib.Path("/dev")):
        os.execve(sys.executable, sys.orig_argv, env)  # the allocator reads its settings when a process starts

    from trellis.cli import main as command

    return command()
