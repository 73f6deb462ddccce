"""Losses in float16: the gradient of a mean is finite where that of the sum over all tokens is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.mesh import make_mesh
from trellis.nn import linear_cross_entropy
from trellis.nn.loss import token_chunks

TOKENS, EMBED, VOCAB = 32768, 8, 16
LAYOUTS = {  # batch and pos of x; vocab and embed of the unembedding
    "one device": None,
    "tokens": (("data", "model"), (), ()),
    "copies": (("data", None), (), ("data",)),
    "vocabulary": (("data", None), ("model",), ()),
    "gathered in chunks": (("data", "model"), ("data",), ()),
    "gathered over both": (("data", "model"), ("data", "model"), ()),
}


def loss(weight):
    def mean(x, unembed, targets):
        weights = jnp.full_like(targets, weight, dtype=jnp.float32)
        found = linear_cross_entropy(x, unembed, targets, weights, vocab_first=True)
        return found.total / found.tokens

    return mean


@pytest.fixture(scope="module")
def numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, TOKENS // 8, EMBED)) + 3
    given = [jnp.asarray(a, jnp.float16) for a in (x, rng.normal(size=(VOCAB, EMBED)))]
    targets = jnp.zeros((8, TOKENS // 8), jnp.int32)  # one word's row has the gradient of all tokens
    wide = [a.astype(jnp.float32) for a in given]
    return (*given, targets), jax.jit(jax.grad(loss(1.0), (0, 1)))(*wide, targets)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 50_000.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_words_gradient_is_finite(numbers, layout, weight):
    given, wanted = numbers
    if LAYOUTS[layout] is not None:
        tokens, vocab, copies = LAYOUTS[layout]
        mesh = make_mesh(data=4, model=2)
        put = lambda a, *spec, **how: jax.device_put(a, jax.NamedSharding(mesh, jax.P(*spec, **how)))
        unembed = put(given[1], vocab or None, reduced=set(copies))
        given = put(given[0], *tokens), unembed, put(given[2], *tokens)
    found = jax.jit(jax.grad(loss(weight), (0, 1)))(*given)
    if LAYOUTS[layout] is not None and copies:
        found = found[0], jax.jit(lambda g: jax.reshard(g, jax.NamedSharding(mesh, jax.P())))(found[1])
    for mine, plain in zip(found, wanted, strict=True):
        assert mine.dtype == jnp.float16
        error = np.abs(np.asarray(mine, np.float32) - np.asarray(plain)).max() / np.abs(plain).max()
        assert error < 0.01


def test_also_where_chunks_are_summed_in_the_parameters_type(numbers, monkeypatch):
    """As on accelerators."""
    given, wanted = numbers
    monkeypatch.setattr("trellis.nn.loss.linear.on_accelerator", lambda x: True)
    monkeypatch.setattr(token_chunks, "LOGITS_BYTES", TOKENS * VOCAB)
    _, found = jax.jit(jax.grad(loss(1.0), (0, 1)))(*given)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted[1], atol=0.01 * float(jnp.abs(wanted[1]).max()))


@pytest.mark.slow
def test_derivatives_by_weights_and_along_directions():
    rng = np.random.default_rng(1)
    x, unembed = (jnp.asarray(rng.normal(size=s), jnp.float16) for s in ((2, 8, EMBED), (VOCAB, EMBED)))
    targets = jnp.asarray(rng.integers(0, VOCAB, (2, 8)))
    weights = jnp.asarray(rng.uniform(0, 100, (2, 8)), jnp.float32)

    def mean(x, unembed, weights):
        found = linear_cross_entropy(x, unembed, targets, weights, vocab_first=True)
        return found.total / found.tokens

    wide = x.astype(jnp.float32), unembed.astype(jnp.float32), weights
    for mine, plain in zip(
        *(jax.grad(mean, (0, 1, 2))(*given) for given in ((x, unembed, weights), wide)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(mine, np.float32), plain, atol=2e-3 * float(jnp.abs(plain).max()))
    ones = jax.tree.map(jnp.ones_like, (x, unembed, weights))
    along = [jax.jvp(mean, given, tuple(o.astype(g.dtype) for o, g in zip(ones, given)))[1]
             for given in ((x, unembed, weights), wide)]  # fmt: skip
    np.testing.assert_allclose(*along, rtol=5e-3)
    found = linear_cross_entropy(x, unembed, targets, jnp.zeros_like(weights), vocab_first=True)
    assert [float(s) for s in found] == [0.0] * 5


@pytest.mark.slow
def test_named_losses():
    layout = tr.Layout(
        make_mesh(data=4, model=2), params={"embed": "data"}, compute={"batch": "data", "vocab": "model"}
    )
    x = tr.named(jnp.full((8, 4096, EMBED), 3, jnp.float16), "batch pos embed")
    table = tr.named(jnp.zeros((VOCAB, EMBED), jnp.float16), "vocab embed")
    targets = tr.zeros({"batch": 8, "pos": 4096}, "int32")

    def mean(table, x, targets):
        found = tr.nn.next_token_loss(x, table, targets)
        return found.total / found.tokens

    with layout:
        gradient = jax.jit(jax.grad(mean))(tr.shard(table), tr.shard(x, "compute"), tr.shard(targets, "compute"))
    wanted = np.full((VOCAB, EMBED), 3 / VOCAB) - 3 * np.eye(VOCAB, 1) * np.ones(EMBED)
    np.testing.assert_allclose(np.asarray(gradient.array, np.float32), wanted, rtol=2e-3)
