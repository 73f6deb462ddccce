"""Operations on arrays that are held as copies (`~`): values and gradients are those of arrays that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn
from trellis.inspect import ledger

MESH = tr.make_mesh(x=4, y=2)
LAYOUT = tr.Layout(MESH, params={"b": "x"}, compute={"a": "x"})
with LAYOUT:
    X = tr.shard(tr.random.uniform(jax.random.key(0), {"a": 8, "b": 8}, minval=0.1, maxval=0.9), "compute")
    W = tr.shard(tr.random.uniform(jax.random.key(1), {"b": 8}, minval=0.1, maxval=0.9), "compute")

OPERATIONS = {
    "negative": lambda w: -w,
    "cos": tr.cos,
    "log": tr.log,
    "power": lambda w: w**3,
    "of two": lambda w: w / (w - 2.0),
    "of a number": lambda w: 1.0 / w,
    "where": lambda w: tr.where(w > 0.5, w, tr.sqrt(w)),
    "clip": lambda w: tr.clip(w, 0.2, 0.7),
    "sum of some": lambda w: w * w.sum("b", where=W > 0.4),
    "mean": lambda w: w * w.mean("b"),
    "max": lambda w: w * w.max("b"),
    "logsumexp": lambda w: w * tr.logsumexp(w, "b"),
    "softmax": lambda w: tr.softmax(w, "b"),
    "cumsum": lambda w: tr.cumsum(w, "b"),
    "sort": lambda w: tr.sort(w, "b"),
    "top_k": lambda w: tr.top_k(w, "b", 8)[0],
    "flip": lambda w: tr.flip(w, "b"),
    "a slice backwards": lambda w: w["b", ::-1],
    "dropout": lambda w: tr.random.dropout(jax.random.key(2), w, 0.5),
    "vmap": lambda w: tr.vmap(lambda one: tr.cos(one), "b")(w),
    "map": lambda w: tr.map(lambda one: tr.cos(one), "b")(w),
    "norm": lambda w: nn.RMSNorm(w, 1e-6)(w),
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients(name):
    """Along `x`, which slices what it meets, and along `y`, which slices nothing."""

    def loss(w, x):
        return (x * OPERATIONS[name](w) + x * w).sum().array

    def of_copies(w, x):
        return loss(tr.reshard("b -> b ~x ~y", w), x)

    with LAYOUT:
        both = jax.jit(lambda w, x: [jax.value_and_grad(f)(w, x) for f in (loss, of_copies)])(W, X)
    (value, gradient), (found, of_found) = jax.tree.map(np.asarray, both)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    np.testing.assert_allclose(of_found.array, gradient.array, rtol=1e-5, atol=1e-6)


def test_an_elementwise_gradient_stays_a_partial_sum():
    """It is settled once, by a reduce-scatter to where the parameter rests, as that of a product is."""

    def loss(w, x):
        whole = tr.all_gather("b/x -> b ~x", w)
        return (x * tr.exp(-tr.cos(whole) / whole)).sum().array

    with LAYOUT:
        rows = ledger(jax.grad(loss), tr.shard(W), X).rows
    assert [(row.kind, row.what, row.direction) for row in rows] == [
        ("all-gather", "b/x -> b ~x", "forward"),
        ("reduce-scatter", "b +x -> b/x", "backward"),
    ]


@pytest.mark.slow
def test_second_derivatives_and_forward_mode():
    def loss(w, held):
        w = tr.reshard("b -> b ~x", w) if held else w
        return (X * tr.cos(w * w)).sum().array

    with LAYOUT:
        for derivative in (
            lambda held: jax.jvp(lambda w: loss(w, held), (W,), (W,))[1],
            lambda held: jax.grad(lambda w: (jax.grad(lambda w: loss(w, held))(w) * W).sum().array)(W).array,
        ):
            np.testing.assert_allclose(derivative(True), derivative(False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", [lambda w: tr.sin(w).sum(), lambda w: (w / (w + 1.0)).sum(), lambda w: (w * w).mean()])
def test_a_loss_of_copies_alone(loss):
    """It is no copy itself: `jax.grad` begins with one, and of copies with one a device."""
    held = lambda w: loss(tr.reshard("b -> b ~x ~y", w)).array
    with LAYOUT:
        found, wanted = (jax.jit(jax.grad(f))(W).array for f in (held, lambda w: loss(w).array))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("use", [tr.conj, tr.abs, lambda z: z["b", ::-1]])
def test_complex_copies(use):
    def gradient(copies):
        held = lambda z: tr.reshard("b -> b ~x", z) if copies else z
        return tr.grad(lambda z: tr.real(use(held(z)) * tr.arange(z.axis("b"), dtype=use(z).dtype)).sum())(z)

    with LAYOUT:
        z = tr.shard(tr.named(np.exp(1j * np.arange(8, dtype=np.float32)).astype(np.complex64), "b"), "compute")
        begun = tr.reshard("b -> b +x", z)  # XLA ends the process if it makes partial sums of complex numbers
        np.testing.assert_array_equal(tr.settle(begun), z)
        np.testing.assert_allclose(gradient(copies=True), gradient(copies=False), rtol=1e-6)


def test_copies_along_one_axis_become_copies_along_another():
    """XLA's partitioner ends the process where one step takes partial sums along both."""

    def loss(w, x):
        return (x * tr.reshard("b ~y -> b ~x", tr.reshard("b -> b ~y", w))).sum().array

    with LAYOUT:
        found = jax.jit(jax.grad(loss))(W, X)
    np.testing.assert_allclose(found.array, np.asarray(X.array).sum(0), rtol=1e-6)
    assert jnp.isfinite(found.array).all()
