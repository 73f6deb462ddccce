"""Forward mode works wherever reverse mode does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr

MAPS = {
    "none": None,
    "explicit": ("explicit", {"b": "data", "o": "model"}),
    "summed": ("explicit", {"b": "data", "e": "model"}),
    "auto": ("auto", {"b": "data", "o": "model"}),
}
W = tr.named(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), "e o")
X = np.linspace(0.1, 2, 32, dtype=np.float32).reshape(8, 4)
IDS = tr.named(np.array([0, 3, 3, 1]), "k")

FUNCTIONS = {
    "dot": lambda w, x: (tr.dot(x, w, over="e") ** 2).sum(),
    "einsum": lambda w, x: tr.einsum("b e, e o -> b", x, tr.tanh(w)).sum(),
    "dot_each": lambda w, x: sum(((y * y).sum() for y in tr.dot_each(x, (w, w * 2), over="e")), tr.zeros({})),
    "take": lambda w, x: (tr.take(w, "e", IDS) ** 2).sum() + x.sum() * 0,
    "index": lambda w, x: (w["e", 1] * w["e", [-1]]["e", 0]).sum() + x.sum() * 0,
    "update": lambda w, x: (w.at["e", IDS].add(1.0) ** 2).sum() + x.sum() * 0,
    "sort": lambda w, x: (tr.sort(w, "e") ** 3).sum() + x.sum() * 0,
    "softmax": lambda w, x: (tr.softmax(tr.dot(x, w, over="e"), "o") ** 2).sum(),
    "prod": lambda w, x: tr.prod(w + 3, "e").sum() + x.sum() * 0,
    "cumsum": lambda w, x: (tr.cumsum(w, "e") ** 2).sum() + x.sum() * 0,
    "checkpoint": lambda w, x: tr.checkpoint(lambda w: (tr.dot(x, w, over="e") ** 2).sum(), tr.Keep())(w),
    "scan": lambda w, x: tr.fold(lambda c, row: c + (tr.dot(row, w, over="e") ** 2).sum(), "b")(tr.zeros({}), x),
    "vmap": lambda w, x: tr.vmap(lambda row: (tr.dot(row, w, over="e") ** 2).sum(), "b")(x).sum(),
    "logsumexp": lambda w, x: tr.logsumexp(tr.dot(x, w, over="e"), "o").sum(),
    "max": lambda w, x: (w.max("e") ** 2).sum() + x.sum() * 0,
    "roll": lambda w, x: (tr.roll(w, 1, "e") * w).sum() + x.sum() * 0,
}


TANGENT = tr.named(np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4), "e o")


@functools.cache
def gradient(function):
    """Reverse mode's, without a layout."""
    x = tr.named(X, "b e")
    return jax.device_get(jax.jit(jax.grad(lambda w: FUNCTIONS[function](w, x).array))(W))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("layout", MAPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_mode_agrees_with_reverse_mode(function, layout):
    f, x, tangent, expected = FUNCTIONS[function], tr.named(X, "b e"), TANGENT, gradient(function)
    along = float((np.asarray(expected) * np.asarray(tangent)).sum())

    def check(w):
        scalar = lambda w: f(w, x).array
        np.testing.assert_allclose(jax.jvp(scalar, (w,), (t,))[1], along, rtol=2e-4, atol=1e-5)
        run = lambda w, t: (jax.jvp(scalar, (w,), (t,))[1], jax.linearize(scalar, w)[1](t), jax.grad(scalar)(w))
        pushed, linear, reverse = jax.jit(run)(w, t)
        np.testing.assert_allclose((pushed, linear), (along, along), rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(reverse, expected, rtol=2e-4, atol=1e-5)

    if MAPS[layout] is None:
        w, t = jax.tree.map(jnp.asarray, (W, tangent))
        check(w)
        return
    kind, compute = MAPS[layout]
    with tr.Layout(tr.make_mesh(data=4, model=2, axis_type=kind), params={"e": "data"}, compute=compute):
        w, t = tr.shard((W, tangent))
        check(w)


@pytest.mark.slow
def test_jacobians_and_hessians():
    w, x = jax.tree.map(jnp.asarray, (W, tr.named(X, "b e")))
    f = lambda array: tr.dot(x, tr.named(array, "e o"), over="e").array
    np.testing.assert_allclose(jax.jacfwd(f)(w.array), jax.jacrev(f)(w.array), rtol=1e-5)
    g = lambda array: (tr.tanh(tr.dot(x, tr.named(array, "e o"), over="e")) ** 2).sum().array
    np.testing.assert_allclose(jax.hessian(g)(w.array), jax.jacrev(jax.jacrev(g))(w.array), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(jax.hessian(g)(w.array), jax.jacrev(jax.jacfwd(g))(w.array), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_manual_forward_mode():
    @tr.shard_map
    def loss(w: tr.f32["e/data o"], x: tr.f32["b/data e"]) -> tr.f32[""]:
        whole = tr.all_gather("e/data o -> e o ~data", w)
        y = tr.einsum("b/data e, e o ~data -> b/data o", x, whole)
        return tr.all_reduce("+data ->", tr.einsum("b/data o, b/data o -> +data", y, y))

    x = np.concatenate([X, X], 1)[:, :8]
    w = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    t = np.cos(np.arange(32, dtype=np.float32)).reshape(8, 4)
    with tr.Layout(tr.make_mesh(data=8)):
        placed = [jax.device_put(a, jax.NamedSharding(jax.sharding.get_mesh(), jax.P("data"))) for a in (w, t, x)]
        w_, t_, x_ = placed
        tangent = jax.jit(lambda w, t: jax.jvp(lambda w: loss(w, x_), (w,), (t,))[1])(w_, t_)
        gradient = jax.grad(lambda w: loss(w, x_))(w_)
    np.testing.assert_allclose(gradient, 2 * x.T @ (x @ w), rtol=1e-4)
    np.testing.assert_allclose(tangent, (2 * x.T @ (x @ w) * t).sum(), rtol=1e-4)


@pytest.mark.slow
def test_a_backward_rule_of_ones_own():
    """Its gradients lie where its arguments do."""
    product = lambda x, w: tr.dot(x, w, over="e")

    def ruled(place):
        rule = jax.custom_vjp(product)
        backward = lambda kept, g: (tr.dot(g, kept[1], over="m"), tr.dot(kept[0], g, over="b"))
        rule.defvjp(lambda x, w: (product(x, w), (x, w)), lambda kept, g: place(*backward(kept, g)))
        return lambda w, x: (rule(x, w) ** 2.0).sum()

    with tr.Layout(tr.make_mesh(data=4, model=2), params={"e": "data"}, compute={"b": "data", "m": "model"}):
        w = tr.shard(tr.named(np.arange(32, dtype=np.float32).reshape(8, 4), "e m"))
        x = tr.shard(tr.named(np.arange(32, dtype=np.float32).reshape(4, 8), "b e"), "compute")
        with pytest.raises(
            tr.TypeMismatch, match=r"got float32\[8,4.*\] for an argument of float32\[8@data,4.*shard\("
        ):
            tr.grad(ruled(lambda x, w: (x, w)))(w, x)
        found = tr.grad(ruled(lambda x, w: (tr.shard(x, "compute"), tr.shard(w))))(w, x)
        expected = tr.grad(lambda w, x: (product(x, w) ** 2.0).sum())(w, x)
        assert tr.typeof(found) == tr.typeof(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
