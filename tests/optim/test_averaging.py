"""Moving averages of parameters, also where both are kept in few bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.optim import average


def followed(dtype, steps=4000, decay=0.999):
    """What an average makes of parameters that go from one place to another."""
    first, way = (0.05 * jax.random.normal(jax.random.key(n), (32, 64)) for n in range(2))
    at = lambda step: {"w": tr.named((first + way * step / steps).astype(dtype), "embed mlp")}
    turn = lambda step, ema: average(ema, at(step), decay, step, jax.random.key(step))
    found = jax.jit(lambda: jax.lax.fori_loop(0, steps, turn, at(0)))()
    return np.asarray(found["w"].array, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "apart"), [(jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)])
def test_an_average_in_few_bits_follows_the_parameters(dtype, apart):
    """As one in float32 does, give or take a few times what two neighbours are apart, and right in the mean."""
    exact, found = followed(jnp.float32), followed(dtype)
    assert np.abs(found - exact).mean() < 6 * apart * np.abs(exact).mean()
    assert abs((found - exact).mean()) < apart * np.abs(exact).mean()


def test_an_average_in_float32_is_rounded_as_ever():
    ema, params = ({"w": jax.random.normal(jax.random.key(n), (512,))} for n in range(2))
    plain = jax.tree.map(lambda e, p: e + (1 - jnp.float32(0.9)) * (p - e), ema, params)
    for key in (None, jax.random.key(0)):
        np.testing.assert_array_equal(average(ema, params, 0.9, 1000, key)["w"], plain["w"])


@pytest.mark.slow
def test_an_average_has_the_type_that_it_is_kept_in():
    ema, params = {"w": jnp.ones(4, jnp.bfloat16)}, {"w": jnp.full(4, 3.0)}
    assert average(ema, params, 0.5, 1000)["w"].tolist() == [2.0] * 4
    assert average(ema, params, 0.5, 1000, jax.random.key(0))["w"].dtype == jnp.bfloat16
