"""Whole numbers that overflow, orders of them, and bits read as another type, against JAX on this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis._compat import full_text
from trellis.mesh import make_mesh
from trellis.proof.interpreter import Interpreter


def executed(function, x, devices: int = 1):
    """What the interpreter makes of a program before any compiler, and what JAX does."""
    function = jax.jit(function)
    found = Interpreter(full_text(function.lower(x)), devices)([np.asarray(x)[None]])
    return [y[0] for y in found], jax.tree.leaves(function(x))


def assert_same(function, x, devices: int = 1):
    for mine, theirs in zip(*executed(function, x, devices), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "x", [np.uint32([4_000_000_001] * 4), np.int32([2_000_000_001] * 4), np.int8([100] * 4)], ids=str
)
def test_sums_over_devices_overflow(x):
    """By more than one device's numbers, and what is made of them next: halves, comparisons, floats."""
    mesh = make_mesh(jax.devices()[:2], x=2)

    def made(x):
        total = jax.lax.psum(x, "x")
        return total >> 1, total < x, total.astype(jnp.float32)

    program = jax.shard_map(made, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x"), P()))
    assert_same(program, jax.device_put(x, NamedSharding(mesh, P("x"))), 2)


@pytest.mark.parametrize(
    "x",
    [
        np.uint32([0, 5, 3, 2, 9, 0, 5, 7]),
        np.int32([-(2**31), 5, -3, 2, -(2**31), 5]),
        np.int8([-128, 5, 127, 2, 127]),
        np.float32([1.0, np.inf, -np.inf, np.nan, 3.0, 3.0]),
    ],
    ids=str,
)
def test_the_largest_of_any_kind_of_numbers(x):
    assert_same(lambda x: jax.lax.top_k(x, 4), x)
    assert_same(lambda x: jax.lax.top_k(x, len(x)), x)


def test_numbers_of_four_bits_overflow():
    x = np.arange(-20, 20, dtype=np.int32)

    def made(x):
        signed, unsigned = x.astype(jnp.int4), x.astype(jnp.uint4)
        rounded = (x.astype(jnp.float32) * 0.7).astype(jnp.int4)
        return [y.astype(jnp.int32) for y in (signed, signed + signed, signed * signed, unsigned + unsigned, rounded)]

    assert_same(made, x)


def test_the_bits_of_a_float_as_another_float_of_its_width():
    x = np.float32([1.0, -2.5, 0.0, 3.0])
    kinds = jnp.bfloat16, jnp.float16
    assert_same(lambda x: jax.lax.bitcast_convert_type(x.astype(kinds[0]), kinds[1]).astype(jnp.float32), x)
    assert_same(lambda x: jax.lax.bitcast_convert_type(x.astype(kinds[1]), kinds[0]).astype(jnp.float32), x)
