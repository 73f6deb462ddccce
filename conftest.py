"""Eight CPU devices, strict promotion: set before JAX looks at its devices."""

import os

import jax

os.environ.setdefault("TRELLIS_CHECK", "1")  # annotations hold in every test
jax.config.update("jax_platforms", "cpu")  # also where a GPU, or libtpu for compiling ahead of time, is installed
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true", help="write golden files anew instead of comparing with them")
