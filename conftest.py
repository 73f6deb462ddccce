"""Eight CPU devices, strict promotion: set before JAX looks at its devices."""

import ctypes
import gc
import os

# Before JAX reads it, and for the processes that tests start: what LLVM does to a program's loops is not what the tests
# hold, and is half of the time that they take.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("TRELLIS_CHECK", "1")  # annotations hold in every test
jax.config.update("jax_platforms", "cpu")  # also where a GPU, or libtpu for compiling ahead of time, is installed
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true", help="write golden files anew instead of comparing with them")


def pytest_runtest_teardown(item, nextitem):
    """Lets go of compiled programs where a process has grown: eight of them are to fit a laptop."""
    if nextitem is not None and _resident() > 1.5e9:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    """Bytes of memory that this process has, where the system tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def names_in_docstrings(doctest_namespace):
    """Examples in docstrings have the names that everybody imports."""
    import trellis as tr
    from trellis import nn

    doctest_namespace |= {"jax": jax, "jnp": jnp, "np": np, "tr": tr, "nn": nn}
