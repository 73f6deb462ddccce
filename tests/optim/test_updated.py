"""Updates of parameters that are kept in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from trellis.errors import UserError
from trellis.named.rounding import drawn_for
from trellis.nn import Precision
from trellis.optim.updated import moved, updated


def test_small_updates_add_up_where_they_are_rounded_at_random():
    """A thousandth of what two neighbours of 1 are apart, 2,000 times: twice that distance, give or take a deviation
    of its root."""
    params = {"w": tr.ones({"embed": 64, "mlp": 32}, jnp.bfloat16)}
    change = {"w": tr.full({"embed": 64, "mlp": 32}, 2.0**-7 / 1000, jnp.bfloat16)}
    step = jax.jit(lambda params, key: updated(params, change, key))
    loop = jax.jit(lambda params: jax.lax.fori_loop(0, 2000, lambda n, p: step(p, jax.random.key(n)), params))
    moved = np.asarray(loop(params)["w"].array, np.float32)
    assert moved.mean() == pytest.approx(1 + 2 * 2.0**-7, abs=5 * 2.0**-7 * (2 / moved.size) ** 0.5)
    assert (np.asarray(updated(params, change)["w"].array) == 1).all()


def test_what_is_moved_in_small_steps_is_rounded_at_random_and_the_rest_is_left():
    """Biases of experts at 1, moved by a thousandth 500 times; weights beside them stay the same bits."""
    params = {"bias": tr.ones({"routes": 512}, jnp.bfloat16), "w": tr.full({"embed": 8}, 1 / 3, jnp.bfloat16)}
    up = lambda p: p | {"bias": p["bias"] + 1e-3}
    loop = lambda n, p: moved(p, up, jax.random.key(n))
    after = jax.jit(lambda params: jax.lax.fori_loop(0, 500, loop, params))(params)
    assert np.asarray(after["bias"].array, np.float32).mean() == pytest.approx(1.5, abs=0.02)
    assert after["bias"].dtype == jnp.bfloat16 and (after["w"].array == params["w"].array).all()
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    assert moved(wide, up, jax.random.key(0))["w"].array is wide["w"].array


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_number_becomes_one_of_its_neighbours(dtype):
    params = {"w": jax.random.normal(jax.random.key(0), (512,)).astype(dtype)}
    change = {"w": (1e-3 * jax.random.normal(jax.random.key(1), (512,))).astype(dtype)}
    exact = np.asarray(params["w"], np.float64) + np.asarray(change["w"], np.float64)
    info = jnp.finfo(dtype)
    apart = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(exact))), int(info.minexp)) - int(info.nmant))
    drawn = np.stack([np.asarray(updated(params, change, jax.random.key(n))["w"], np.float64) for n in range(64)])
    assert (np.abs(drawn - exact) <= apart * (1 + 1e-6)).all()
    assert np.abs(drawn.mean(0) - exact).max() < 6 * apart.max() / 2 / 8


@pytest.mark.slow
def test_what_is_drawn_looks_random():
    """Evenly spread, also in each bit, and unrelated from place to place and from key to key: off by less than four
    deviations."""
    x, keys = jnp.zeros((64, 32, 16)), [jax.random.fold_in(jax.random.key(3), n) for n in range(16)]
    drawn = np.stack([np.asarray(drawn_for(x, key)).ravel() for key in keys])
    share, chance = drawn / 2.0**32, 4 / drawn.size**0.5
    assert abs(share.mean() - 0.5) < chance / 12**0.5 and abs(share.var() - 1 / 12) < chance / 180**0.5
    assert all(abs((drawn >> bit & 1).mean() - 0.5) < chance / 2 for bit in range(32))
    related = lambda a, b: abs(np.corrcoef(a.ravel(), b.ravel())[0, 1])
    assert max(related(share[:, :-lag], share[:, lag:]) for lag in (1, 16, 512)) < chance
    assert related(share[:-1], share[1:]) < chance


@pytest.mark.slow
def test_the_same_on_every_mesh():
    params = {"w": tr.random.normal(jax.random.key(0), {"embed": 64, "mlp": 32}).astype(jnp.bfloat16)}
    change = {"w": 1e-3 * tr.random.normal(jax.random.key(1), {"embed": 64, "mlp": 32})}
    alone = updated(params, change, jax.random.key(2))
    with tr.Layout(tr.make_mesh(data=4, model=2), params={"embed": "data", "mlp": "model"}, compute={}):
        sliced = tr.named_jit(updated)(tr.shard(params), tr.shard(change), jax.random.key(2))
    assert str(sliced["w"].type) == "embed/data mlp/model"
    np.testing.assert_array_equal(np.asarray(alone["w"].array), np.asarray(sliced["w"].array))


def test_whole_parameters_are_updated_as_ever():
    params, change = {"w": jnp.arange(4.0), "n": jnp.arange(3)}, {"w": jnp.full(4, 0.1), "n": jnp.ones(3, jnp.int32)}
    wanted, found = optax.apply_updates(params, change), updated(params, change, jax.random.key(0))
    assert all((wanted[name] == found[name]).all() for name in params)


def test_updates_that_are_not_rounded_are_refused():
    with pytest.raises(UserError, match="updates=random, params=float32"):
        Precision(updates="random")
