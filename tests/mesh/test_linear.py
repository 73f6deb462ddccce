"""Gradients that are made together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

from trellis.mesh.linear import gradients_together, linear


def loss(x, w, fence):
    x, w = fence((x, w))
    return jnp.sum(jnp.tanh(x @ w.T))


@pytest.mark.slow
def test_gradients_together_changes_no_number():
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(4, 3)
    plain = jax.grad(loss, (0, 1))(x, w, lambda both: both)
    fenced = jax.grad(loss, (0, 1))(x, w, gradients_together)
    jax.tree.map(np.testing.assert_array_equal, plain, fenced)
    forward = lambda fence: jax.jvp(lambda x: loss(x, w, fence), (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_array_equal(forward(lambda both: both), forward(gradients_together))


def test_what_has_no_gradient_gets_none():
    """Of a weight that is not trained, no product is made, and whole numbers go through."""
    x, w = jnp.ones((2, 3)), jnp.ones((4, 3))
    program = str(jax.make_jaxpr(jax.grad(lambda x: loss(x, w, gradients_together)))(x))
    assert program.count("dot_general") == 2 and "optimization_barrier" in program
    both = lambda x, n: gradients_together((x, n))[0] * gradients_together(n).astype(jnp.float32)
    assert jax.grad(both)(2.0, jnp.int32(3)) == 3


def test_no_gradient_is_made_of_none():
    """JAX asks for the gradient of a result that nothing depends on where a loop takes it and forgets it."""
    double = linear(lambda _, x: 2 * x, lambda _, gradient: 2 * gradient)
    (equation,) = jax.make_jaxpr(lambda x: double((), x))(1.0).jaxpr.eqns
    aval = equation.outvars[0].aval
    back = ad.primitive_transposes[equation.primitive]
    assert back([ad.Zero(aval)], ad.UndefinedPrimal(aval), **equation.params) == [None]
    assert back([jnp.float32(3)], ad.UndefinedPrimal(aval), **equation.params) == [6.0]
