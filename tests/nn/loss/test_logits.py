"""The cross entropy of logits that are held all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import nn


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [None, "data"])
def test_choices_that_are_masked_do_not_count(vocab):
    """Their logits are minus infinity, as those of words that a grammar forbids."""
    logits = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    logits[:, 5:] = -np.inf
    targets = np.array([0, 3, 4, 1])
    rows = lambda x: -jax.nn.log_softmax(x)[jnp.arange(4), targets]
    expected = jax.jit(lambda x: (rows(x), jax.grad(lambda x: rows(x).sum())(x)))(logits)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), compute={"vocab": vocab}):
        x, ids = tr.shard(tr.named(logits, "batch vocab"), "compute"), tr.named(targets.astype(np.int32), "batch")
        found = nn.cross_entropy(x, ids)  # XLA turns a product with booleans into a choice, but only in a program
        gradient = tr.grad(lambda x: nn.cross_entropy(x, ids).sum())(x)
    for one, other in zip((found, gradient), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [None, "data"])
def test_targets_that_are_no_positions_have_no_logit(vocab):
    """On every layout, and they leave no gradient with the weight 0."""
    logits = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    targets, weights = np.array([-100, 3, 8, -1], np.int32), np.array([0, 1, 0, 0], np.float32)
    with tr.Layout(tr.make_mesh(jax.devices()[:2], data=2), compute={"vocab": vocab}):
        x, ids = tr.shard(tr.named(logits, "batch vocab"), "compute"), tr.named(targets, "batch")
        found = nn.cross_entropy(x, ids)
        gradient = tr.grad(lambda x: (nn.cross_entropy(x, ids) * tr.named(weights, "batch")).sum())(x)
    expected = np.asarray(jax.nn.logsumexp(logits, -1)) - np.array([0, logits[1, 3], 0, 0])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.asarray(gradient)[1].all() and not np.asarray(gradient)[[0, 2, 3]].any()
