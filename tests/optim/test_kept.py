"""What an optimizer keeps in few bits, as it keeps it in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from trellis.optim.adafactor import adafactor
from trellis.optim.config import Adafactor
from trellis.optim.updated import in_float32, kept_like

RULES = {
    "adam": lambda: optax.scale_by_adam(b1=0.9, b2=0.999),
    "lion": lambda: optax.scale_by_lion(b1=0.9, b2=0.999),
    "factored": lambda: adafactor(Adafactor(learning_rate=1.0, min_factored_size=8)),
}


def kept(rule, dtype, *, random=True, steps=3000):
    """What a rule keeps after gradients that were a hundred times larger in the first steps."""
    params = {"w": tr.named(jnp.ones((64, 32), dtype), "embed mlp")}

    def turn(step, state):
        gradients = jax.tree.map(lambda p: jnp.full_like(p, jnp.where(step < 20, 1.0, 0.01)), params)
        if not random:
            return rule.update(gradients, state, params)[1]
        new = rule.update(*in_float32((gradients, state, params)))[1]
        return kept_like(new, state, jax.random.fold_in(jax.random.key(0), step))

    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(lambda: jax.lax.fori_loop(0, steps, turn, rule.init(params)))()
    return [np.asarray(x, np.float32).mean() for x in jax.tree.leaves(found) if x.ndim and x.size > 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_averages_in_few_bits_decay(name, dtype):
    rule = RULES[name]()
    np.testing.assert_allclose(kept(rule, dtype), kept(rule, jnp.float32), rtol=0.05, atol=1e-5)


def test_rounded_to_the_nearest_they_do_not():
    (_, nu), (_, exact) = (kept(RULES["adam"](), dtype, random=False) for dtype in (jnp.bfloat16, jnp.float32))
    assert nu > 10 * exact


def test_what_is_kept_in_float32_is_as_it_was():
    state = optax.scale_by_adam().init({"w": jnp.ones(4)})
    new = jax.tree.map(lambda x: x + 1, in_float32(state))
    for found, wanted in zip(jax.tree.leaves(kept_like(new, state, jax.random.key(0))), jax.tree.leaves(new)):
        assert found is wanted
