"""A sliced random matrix never exists whole on one device: the TPU compiler's memory says so."""

import jax
import pytest

import trellis as tr
from trellis.mesh.topology import slice_devices

ROWS, COLUMNS = 16384, 16384  # 1 GiB of float32


@pytest.mark.slow
def test_each_device_makes_its_own_slice():
    mesh = tr.make_mesh(slice_devices("v5e:4x4"), data=16)
    with tr.Layout(mesh, compute={"embed": "data"}):
        draw = lambda seed: tr.random.normal(jax.random.key(seed), {"embed": ROWS, "mlp": COLUMNS})
        seed = jax.ShapeDtypeStruct((), "uint32", sharding=jax.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        compiled = tr.named_jit(draw).lower(seed).compile()
    memory = compiled.memory_analysis()
    part = 4 * ROWS * COLUMNS // 16
    assert memory.output_size_in_bytes == part
    assert memory.temp_size_in_bytes <= part // 8
    assert not any(c in compiled.as_text() for c in ("all-gather", "all-reduce", "collective-permute", "all-to-all"))
