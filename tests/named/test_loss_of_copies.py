"""One number that was made of copies (`~x`) is none: as a loss, it has one gradient, on all devices together.

JAX begins the gradient of a loss that is copies with a one that all devices share; where XLA folds that into a
constant, it is a one on each of them (29 of docs/published-bugs.md).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.named import named

LOSSES = {
    "an index": lambda w: w["a", 2],
    "times a number": lambda w: w["a", 2] * 3.0,
    "times one": lambda w: w["a", 2] * 1.0,
    "a position": lambda w: w["a", jnp.int32(2)] * 3.0,
    "take": lambda w: tr.take(w, "a", jnp.int32(1)) * 2.0,
    "take along": lambda w: tr.take_along(w, "a", named(jnp.int32(3), "")) * 2.0,
    "reshard": lambda w: tr.reshard(" -> ~x", w.sum()) * 2.0,
    "minus": lambda w: -(w["a", 0] * w["a", 1]),
    "a sum": lambda w: w.sum() / 2.0,
    "a mean": lambda w: 2.0 * w.mean(),
    "a maximum": lambda w: w.max() * 2.0,
    "a product": lambda w: 3.0 * tr.dot(w, w, over="a"),
    "a length": lambda w: jnp.float32(3.0) * tr.sqrt((w * w).sum()),
}


@pytest.fixture
def weights():
    """On a mesh; and programs are compiled as users' are, with all that XLA does to them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    mesh = tr.make_mesh(jax.devices()[:4], x=4)
    with jax.set_mesh(mesh):
        yield jax.device_put(jnp.arange(1.0, 5), P(None))
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("grad", [jax.grad, tr.grad])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_copies_has_one_gradient(weights, loss, grad, jit):
    of = lambda make: grad(lambda w: loss(make(named(w, "a"))).array)
    gradient = of(lambda w: tr.reshard("a -> a ~x", w))
    found = (jax.jit(gradient) if jit else gradient)(weights)
    np.testing.assert_allclose(found, of(lambda w: w)(weights), rtol=1e-6)


def test_a_plain_number_of_copies_by_our_own_gradient(weights):
    loss = lambda w: tr.reshard("a -> a ~x", w)[2] * 1.0
    np.testing.assert_array_equal(jax.jit(tr.grad(loss))(weights), [0, 0, 1, 0])


def test_what_jax_makes_of_it(weights):
    """Where this fails, JAX and XLA are right: `no_copies` of one number may go."""
    loss = lambda w: jax.reshard(w, P(None, reduced={"x"}))[2] * 1.0
    assert jax.jit(jax.grad(loss))(weights)[2] == 4
