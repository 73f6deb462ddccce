"""How bfloat16 is computed on a CPU: sums and compositions in float32, rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.named.backend import product
from trellis.program.reading import jaxprs_in


def operations(function, *args):
    """Of all equations of a jaxpr and its calls: the primitive, the types of its operands and of its first result."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            types = [str(v.aval.dtype) for v in (*equation.invars, equation.outvars[0]) if hasattr(v.aval, "dtype")]
            yield equation.primitive.name, *types
            for inner in jaxprs_in(equation):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


def test_a_bfloat16_product_is_made_in_float32_and_rounded_on_a_cpu():
    """Forward and both gradients: XLA's CPU compiler reaches the processor's bfloat16 products in no other way."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((64, 8), (8, 4)))
    numbers = (((1,), (0,)), ((), ()))

    def loss(function):
        return lambda x, w: jnp.sum(function(x, w, numbers).astype(jnp.float32) ** 2)

    found = operations(jax.grad(loss(product), (0, 1)), x, w)
    made = [types for name, *types in found if name == "dot_general"]
    assert made == [["bfloat16", "bfloat16", "float32"]] * 3
    for mine, plain in zip(*(jax.grad(loss(f), (0, 1))(x, w) for f in (product, jax.lax.dot_general)), strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(mine.astype(jnp.float32), plain.astype(jnp.float32), rtol=0.02, atol=0.02)


def test_a_broadcast_bfloat16_value_has_its_gradient_summed_in_float32_on_a_cpu():
    x, bias = tr.ones({"batch": 1000, "embed": 2}, "bfloat16"), tr.zeros({"embed": 2}, "bfloat16")
    loss = lambda bias: ((x + bias) * 0.01).sum().array.astype(jnp.float32)
    sums = [types for name, *types in operations(jax.grad(loss), bias) if name == "reduce_sum"]
    assert ["float32", "float32"] in sums
    gradient = jax.jit(jax.grad(loss))(bias)
    np.testing.assert_allclose(gradient.array.astype(jnp.float32), 1000 * float(jnp.bfloat16(0.01)), rtol=0.004)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, bias))
    assert [name for name, *_ in operations(jax.grad(lambda b: (wide[0] + b).sum().array), wide[1])].count(
        "convert_element_type"
    ) == 0


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "mish"])
def test_an_activation_in_bfloat16_is_rounded_once_on_a_cpu(name):
    x = tr.named(jnp.linspace(-4, 4, 101, dtype=jnp.bfloat16), "embed")
    found = getattr(tr, name)(x)
    assert found.dtype == jnp.bfloat16
    exact = getattr(tr, name)(x.astype(jnp.float32))
    np.testing.assert_array_equal(found.array, exact.array.astype(jnp.bfloat16))
    assert getattr(tr, name)(0.5) == pytest.approx(float(getattr(jax.nn, name)(0.5)))
