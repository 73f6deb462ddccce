"""What the programs of this folder share: a mesh of four by two, and comparison with one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr


@pytest.fixture
def mesh():
    mesh = tr.make_mesh(data=4, model=2)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def put(mesh):
    """Puts a random array where the text says: `put("batch/data embed", 8, 4)`."""

    def put(text: str, *sizes: int, seed: int = 0):
        spec = tr.parse(text).spec
        return jax.device_put(jax.random.normal(jax.random.key(seed), sizes), jax.sharding.NamedSharding(mesh, spec))

    return put


@pytest.fixture
def close():
    """Holds trees of arrays against the same computed on one device."""

    def close(got, want):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)

    return close


@pytest.fixture
def alone():
    """The same arrays on one device."""
    return lambda *arrays: jax.tree.map(jnp.asarray, jax.device_get(arrays))
