import jax
import jax.numpy as jnp
import numpy as np

import trellis as tr
from trellis import Layout, make_mesh, reshard


def test_positions_shared_by_a_sliced_batch():
    """A copied table looked up at positions without a batch: values and gradient are one device's."""
    table = jnp.arange(32.0).reshape(16, 2)
    ids = jnp.array([1, 5, 5], jnp.int32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 2)), jnp.float32)

    def loss(table, x):
        rows = tr.take(table, "positions", tr.named(ids, "pos"))
        y = x + rows
        return (y * y).sum().array

    def copied(table, x):
        return loss(reshard("positions embed -> positions embed ~data", table), x)

    whole = jax.value_and_grad(loss)(tr.named(table, "positions embed"), tr.named(x, "batch pos embed"))
    with Layout(make_mesh(data=8), compute={"batch": "data"}):
        args = tr.shard(tr.named(table, "positions embed")), tr.shard(tr.named(x, "batch pos embed"))
        value, gradient = jax.jit(jax.value_and_grad(copied))(*args)
    np.testing.assert_allclose(value, whole[0], rtol=1e-6)
    np.testing.assert_allclose(gradient.array, whole[1].array, rtol=1e-5)


def test_numbers_without_a_zero():
    """Rows of other devices are zeros, and a sum: scales of narrow numbers have none."""
    table = jnp.asarray(2.0 ** np.arange(-4, 4), jnp.float8_e8m0fnu)
    with Layout(make_mesh(data=4, model=2), compute={"vocab": "model"}):
        rows = tr.take(tr.shard(tr.named(table, "vocab"), "compute"), "vocab", tr.named(np.int32([6, 1, 3]), "pos"))
    np.testing.assert_array_equal(np.asarray(rows).astype(np.float32), [4, 0.125, 0.5])
