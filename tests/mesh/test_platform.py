"""How many threads XLA starts for the devices of a CPU."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.train import forks
from trellis.cores import usable_cores
from trellis.mesh.platform import leave_threads, platform_of


def test_several_collectives_of_each_device_have_a_thread(monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    leave_threads(4)
    assert int(os.environ["NPROC"]) == max(32, usable_cores())
    monkeypatch.setenv("NPROC", "3")
    leave_threads(8)
    assert os.environ["NPROC"] == "3"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("said", ["config", "flags"])
def test_a_mesh_of_ones_own_program_leaves_them(said, monkeypatch):
    """Two programs that wait for each other's threads wait for ever, and XLA ends the process after a minute."""
    for name in ("NPROC", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    process = forks.start("tests.mesh.test_platform", said)
    printed = process.communicate(timeout=60)[0].split()
    assert printed == ["3", str(max(24, usable_cores()))], process.said("err")


def test_without_a_mesh_the_default_device_says_where_a_value_will_live(monkeypatch):
    """A function for the host of a machine whose backend is a GPU gets the CPU's kernels."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert platform_of(jnp.ones(2)) == "cuda"
    with jax.default_device(jax.devices("cpu")[0]):
        assert platform_of(jnp.ones(2)) == "cpu"
    with jax.default_device("cpu"):
        assert platform_of(jnp.ones(2)) == "cpu"


def main() -> int:
    said = sys.argv[1]
    if said == "flags":
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
    else:
        jax.config.update("jax_num_cpu_devices", 3)
    print(tr.make_mesh(data=-1).size, os.environ.get("NPROC"))
    return 0
