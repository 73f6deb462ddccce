"""A loop's gradient on a mesh where XLA, left to itself, sums a gathered array over devices once more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.mesh import Layout, make_mesh
from trellis.named import Axis, Keep, einsum, fold, named_jit, random, settle

LAYERS, EMBED, MLP = Axis("layers", 3), Axis("embed", 8), Axis("mlp", 16)
BATCH, POS = Axis("batch", 4), Axis("pos", 8)


def layout() -> Layout:
    """Two devices: widths are sliced, and positions where widths are not."""
    return Layout(make_mesh(jax.devices()[:2], model=2), {"mlp": "model"}, {"mlp": "model", "pos": "model"})


def whole(tree):
    return jax.tree.map(lambda a: jnp.asarray(jax.device_get(a)), tree)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, Keep()], ids=["plain", "remat"])
def test_bias_on_sliced_positions(policy):
    """Its gradient is a sum over positions, which the same step of the backward pass also gathers."""

    def loss(params, x):
        def layer(x, p):
            h = einsum("batch pos embed, mlp embed -> batch pos mlp", x, p["weight"])
            return x + einsum("batch pos mlp, mlp embed -> batch pos embed", h, p["weight"]) + p["bias"]

        return (fold(layer, LAYERS, policy=policy)(x, params) ** 2).sum().array

    with layout():
        params = {
            "weight": random.normal(jax.random.key(0), (LAYERS, MLP, EMBED), at="params"),
            "bias": random.normal(jax.random.key(1), (LAYERS, EMBED), at="params"),
        }
        x = random.normal(jax.random.key(2), (BATCH, POS, EMBED))
        found = named_jit(jax.grad(loss))(params, x)
    wanted = jax.jit(jax.grad(loss))(*whole((params, x)))
    for name in params:
        np.testing.assert_allclose(jax.device_get(found[name].array), wanted[name].array, rtol=1e-4)


@pytest.mark.slow
def test_partial_sums_are_carried():
    """A loop may carry partial sums: they are settled after it, once."""

    def total(x, w):
        add = lambda sums, w: sums + einsum("batch mlp, mlp embed -> batch embed", x, w, settle=False)
        start = einsum("batch mlp, mlp embed -> batch embed", x, w["layers", 0], settle=False)
        return settle(fold(add, LAYERS)(start, w))

    with layout():
        x = random.normal(jax.random.key(0), (BATCH, MLP))
        w = random.normal(jax.random.key(1), (LAYERS, MLP, EMBED), at="params")
        found = named_jit(total)(x, w)
        wanted = total(*whole((x, w)))
    np.testing.assert_allclose(jax.device_get(found.array), wanted.array, rtol=1e-5, atol=1e-5)


SECOND = {
    "a gradient's penalty": lambda loss, w, x: (tr.grad(loss)(w, x) ** 2.0).sum(),
    "through a step of descent": lambda loss, w, x: loss(w - 0.1 * tr.grad(loss)(w, x), x),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECOND)
def test_second_derivatives_through_loops_over_weights_at_rest(kind):
    """JAX takes no stack of pending sums apart, which the gradient of a stack of gathered weights would be."""

    def loss(w, x):
        layer = lambda x, w: tr.tanh(tr.dot(x, w, over="embed").rename(out="embed"))
        return (tr.fold(layer, "layers")(x, w) ** 2.0).mean()

    run = lambda: tr.named_jit(tr.grad(lambda w, x: SECOND[kind](loss, w, x)))(
        tr.shard(tr.random.normal(jax.random.key(0), {"layers": 3, "embed": 8, "out": 8}) * 0.3),
        tr.random.normal(jax.random.key(1), {"batch": 8, "embed": 8}),
    )
    wanted = np.asarray(run())
    with tr.Layout(tr.make_mesh(data=4, model=2), params={"embed": "data"}, compute={"batch": "data", "out": "model"}):
        np.testing.assert_allclose(np.asarray(run()), wanted, rtol=1e-4, atol=1e-6)
