"""Attention of each example, mapped over slices of the examples, or over all of them."""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import nn

KEYS = "example batch key_pos kv_heads head_dim"
NAMES = ("example batch pos heads head_dim", KEYS, KEYS)
SIZES = {"example": 4, "batch": 2, "pos": 4, "key_pos": 4, "heads": 4, "kv_heads": 2, "head_dim": 4}


def total(q, k, v):
    return (tr.vmap(nn.attend, "example")(q, k, v) ** 2).sum().array


@pytest.mark.slow
@pytest.mark.parametrize(
    "compute",
    [
        {"example": "data"},
        {"example": "data", "pos": "model"},
        {"heads": "model"},
        {"batch": "data", "pos": "model"},
    ],
    ids=str,
)
def test_values_and_gradients(compute):
    rng = np.random.default_rng(0)
    args = [tr.named(rng.normal(size=[SIZES[n] for n in t.split()]).astype(np.float32), t) for t in NAMES]
    value, wanted = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*args)
    with tr.Layout(tr.make_mesh(jax.devices()[:4], data=2, model=2), compute=compute):
        placed = tr.shard(args, "compute")
        np.testing.assert_allclose(total(*placed), value, rtol=1e-5)  # outside of jit, too
        found = jax.jit(jax.grad(total, (0, 1, 2)))(*placed)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.array, theirs.array, rtol=1e-4, atol=1e-5)
