"""Experts' products in narrow numbers: near the whole ones, the same on every layout, and gathered narrow."""

import functools

import jax
import numpy as np
import pytest

import trellis as tr
from trellis.nn.moe import Experts, choose, mix, score

LAYOUTS = {
    "FSDP": ("grouped", {"data": 4}, {"embed": "data"}, {"batch": "data"}),
    "gather": (
        "gather",
        {"expert": 2, "model": 2},
        {"experts": "expert", "mlp": "model"},
        {"batch": "expert", "experts": "expert", "mlp": "model"},
    ),
    "slots": ("slots", {"expert": 4}, {"experts": "expert"}, {"batch": "expert", "experts": "expert"}),
}


def loss_of(kind, way):
    mark = lambda w: w if kind is None else tr.Narrow(w, kind)

    def loss(weights, x, choices):
        # Room for all rows: what goes in a further round has a scale of its own.
        return (mix(x, choices, *map(mark, weights), way=way, slack=8.0) ** 2.0).mean().array

    return jax.value_and_grad(loss, (0, 1))


@functools.cache
def arrays():
    @jax.jit
    def made():
        axes = tr.Axis("embed", 16), tr.Axis("mlp", 16), tr.Axis("experts", 4)
        layer = Experts.init(*axes, per_token=2, key=jax.random.key(0))
        x = tr.random.normal(jax.random.key(1), {"batch": 8, "pos": 4, "embed": 16})
        return (layer.gate, layer.up, layer.down), x, choose(score(x, layer.router), 2, layer.routing)

    return made()


@functools.cache
def alone(kind):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(loss_of(kind, "grouped"))(*arrays()))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_near_the_whole_products(kind):
    for a, b in zip(alone(kind), alone(None), strict=True):
        assert 1e-4 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_same_on_every_layout(kind, name):
    way, sizes, params, compute = LAYOUTS[name]
    wanted = alone(kind)
    weights, x, choices = arrays()
    with tr.Layout(tr.make_mesh(jax.devices()[:4], **sizes), params=params, compute=compute):
        given = tr.shard(weights), tr.shard(x, "compute"), tr.shard(choices, "compute")
        found = [np.asarray(leaf) for leaf in jax.tree.leaves(tr.named_jit(loss_of(kind, way))(*given))]
        gathers = []
        if name == "FSDP":
            gathers = [row for row in tr.ledger(loss_of(kind, way), *given).rows if row.kind == "all-gather"]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
    if name == "FSDP":
        assert {row.dtype for row in gathers} == {"f8_e4m3fn" if kind == "fp8" else "i8"}
        assert sum(row.wire * row.times for row in gathers) == 3 * 4 * 16 * 16 * 3 // 4


@pytest.mark.slow
def test_tiles_are_refused():
    with pytest.raises(tr.NamesError, match="narrow products of experts must be in fp8 or int8, got 'mxfp8'"):
        loss_of("mxfp8", "grouped")(*arrays())
