"""Types as people read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trellis.named import named
from trellis.notation import parse, short_dtype, typeof


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.parametrize(
    ("dtype", "short"),
    [
        (jnp.float32, "f32"),
        (jnp.bfloat16, "bf16"),
        (jnp.float16, "f16"),
        (np.float64, "f64"),
        (jnp.int32, "i32"),
        (jnp.int8, "i8"),
        (jnp.uint32, "u32"),
        (jnp.uint8, "u8"),
        (jnp.bool_, "bool_"),
        (jnp.complex64, "c64"),
        (jnp.float8_e4m3fn, "f8_e4m3fn"),
    ],
)
def test_short_dtypes(dtype, short):
    assert short_dtype(dtype) == short


def test_arrays(mesh):
    spec = parse("batch/data pos embed +model").spec
    held = jax.ShapeDtypeStruct((8, 3, 16), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    assert typeof(held) == "bf16[8/data 3 16 +model]"
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec(("data", "model"))))
    assert typeof(x) == "f32[8/data/model 4]"
    assert typeof(named(x, "batch embed")) == "f32[batch/data/model=8 embed=4]"
    assert typeof(np.zeros((2, 3), np.int32)) == "i32[2 3]"
    assert typeof(jnp.float32(1)) == "f32[]"
    assert typeof(jax.random.key(0)) == "key[]"
    assert typeof(named(jnp.ones(2), "embed")) == "f32[embed=2]"
    copied = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, parse("a ~data").spec))
    assert typeof(copied) == "f32[4 ~data]"


def test_what_is_not_an_array():
    assert typeof(1.5) == "float[]"
    assert typeof(None) == "NoneType"
    assert typeof([1]) == "list"


def test_inside_manual_mode_types_are_whole_where_they_can_be(mesh):
    seen = []

    def body(x):
        seen.append(typeof(x))
        return x

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 4)), PartitionSpec("data"))
        jax.shard_map(body, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))(x)
    assert seen == ["f32[2 4] (one slice; differs over data)"]
