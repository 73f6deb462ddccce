"""The loss's products in narrow numbers: by `ml_dtypes`, in any chunks, on every layout, and what moves."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import trellis as tr
from trellis.mesh.meshes import make_mesh
from trellis.nn import LossError, next_token_loss
from trellis.nn.loss import vocab_chunks
from trellis.nn.loss.linear import linear_cross_entropy
from trellis.nn.loss.products import NarrowFactors, limit_of, narrow_factor

BATCH, POS, EMBED, VOCAB = 8, 32, 64, 128
KINDS = ("fp8", "mxfp8")
LAYOUTS = {
    "FSDP": ({"data": 2}, {"embed": "data"}, {"batch": "data"}),
    "vocab": ({"data": 2, "model": 2}, {"embed": "data", "vocab": "model"}, {"batch": "data", "vocab": "model"}),
}


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    table = tr.random.normal(keys[0], {"vocab": VOCAB, "embed": EMBED}) * 0.4
    x = tr.random.normal(keys[1], {"batch": BATCH, "pos": POS, "embed": EMBED})
    targets = tr.named(jax.random.randint(keys[2], (BATCH, POS), 0, VOCAB), "batch pos")
    return table, x, targets, tr.named(jax.random.uniform(keys[3], (BATCH, POS)), "batch pos")


def loss_of(kind, **options):
    def loss(table, x, targets, weights):
        return next_token_loss(x, tr.Narrow(table, kind) if kind else table, targets, weights, **options).total

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def to_numpy(tree):
    return [np.asarray(jax.device_get(leaf), np.float64) for leaf in jax.tree.leaves(tree)]


def near(found, wanted, share=2e-6):
    for a, b in zip(to_numpy(found), to_numpy(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=share * np.abs(b).max())


def emulated(x: np.ndarray, kind: str, limit=None, gradient=False) -> np.ndarray:
    """The numbers that a narrow array stands for, by `ml_dtypes` alone."""
    if kind == "mxfp8":
        tiles = x.reshape(-1, 32, x.shape[1] // 32, 32)
        scale = 2.0 ** np.ceil(np.log2(np.abs(tiles).max((1, 3), keepdims=True) / 448))
        return ((tiles / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn) * scale).reshape(x.shape)
    dtype = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
    scale = (np.abs(x).max() if limit is None else limit) / float(ml_dtypes.finfo(dtype).max)
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_rounded_factors(arrays, kind):
    table, x, targets, weights = arrays
    w, rows = (np.asarray(a.array, np.float64).reshape(-1, EMBED) for a in (table, x))
    counted, hot = np.asarray(weights.array, np.float64).reshape(-1), np.eye(VOCAB)[targets.array.reshape(-1)]
    qx, qw = emulated(rows, kind), emulated(w, kind)
    logits = qx @ qw.T
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    d = emulated((chances - hot) * counted[:, None], kind, limit=counted.max(), gradient=True)
    wanted = -(np.log(chances) * hot).sum(1) @ counted, (d.T @ qx, (d @ qw).reshape(BATCH, POS, EMBED))
    near(loss_of(kind)(*arrays), wanted, 2e-3)  # a last bit of a chance may round its gradient to another number
    near(loss_of(kind, chunk=64)(*arrays), loss_of(kind)(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_one_device_s_numbers(arrays, kind, name):
    devices, (sizes, params, compute) = jax.devices(), LAYOUTS[name]
    with tr.Layout(make_mesh(devices[: math.prod(sizes.values())], **sizes), params=params, compute=compute):
        placed = (tr.shard(arrays[0]), *(tr.shard(a, "compute") for a in arrays[1:]))
        found = tr.named_jit(loss_of(kind, z_loss=1e-3))(*placed)
        gathers = [row for row in tr.ledger(loss_of(kind), *placed).rows if row.kind == "all-gather"]
    near(found, loss_of(kind, z_loss=1e-3)(*arrays))
    tiles = VOCAB * EMBED // 32**2
    own = (VOCAB * EMBED, tiles)[: 1 if kind == "fp8" else 2]  # a byte a number, and one a tile
    ways = math.prod(sizes.values())
    assert sorted((r.dtype[:2], r.wire) for r in gathers) == [("f8", n // ways) for n in sorted(own)]


@pytest.mark.slow
def test_an_unembedding_gathered_in_chunks_is_gathered_narrow(arrays, monkeypatch):
    monkeypatch.setattr(vocab_chunks, "CHUNK_BYTES", 1)
    table, x, targets, weights = (a.array for a in arrays)
    mesh = make_mesh(jax.devices()[:4], data=4)

    def loss(table, x, targets, weights):
        narrow = NarrowFactors(narrow_factor(x, "fp8"), narrow_factor(table, "fp8"), limit_of(weights, 0.0), "fp8")
        return linear_cross_entropy(x, table, targets, weights, vocab_first=True, narrow=narrow).total

    step = jax.value_and_grad(loss, (0, 1))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, jax.P("data"))) for a in (table, x, targets, weights)]
        moved = tr.ledger(step, *placed).rows
        found = jax.jit(step)(*placed)
    assert {row.dtype for row in moved if row.kind == "all-gather"} == {"f8_e4m3fn"}
    wanted = step(table, x, targets, weights)
    near(found[0], wanted[0])
    for a, b in zip(to_numpy(found[1]), to_numpy(wanted[1]), strict=True):
        # e5m2 has two bits behind the first, and what is rounded is a chance over the largest so far, not over the sum.
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


@pytest.mark.slow
def test_what_the_loss_cannot_multiply_is_refused(arrays):
    with pytest.raises(LossError, match=r"must be in fp8 or mxfp8, .* got int8 for f32\[vocab=128 embed=64\]"):
        loss_of("int8")(*arrays)
    twice = jax.grad(lambda t: (loss_of("fp8")(t, *arrays[1:])[1][0].array ** 2).sum())
    with pytest.raises(tr.NamesError, match="can only be differentiated once, got a second derivative"):
        twice(arrays[0])
    assert jnp.isnan(loss_of("fp8")(arrays[0].with_array(arrays[0].array.at[3, 5].set(jnp.inf)), *arrays[1:])[0])


@pytest.mark.slow
def test_gradients_in_float16_are_as_large_as_those_in_float32(arrays):
    """They are made for weights of at most 1 there, for which the bound on a logit's gradient is another."""
    table, x, targets, weights = arrays
    half, few = [a.astype(jnp.float16) for a in (table, x)], weights * 0.01
    wide = [a.astype(jnp.float32) for a in half]
    near(loss_of("fp8")(*half, targets, few), loss_of("fp8")(*wide, targets, few), 0.01)


def test_a_mask_may_be_of_booleans(arrays):
    table, x, targets, _ = arrays
    mask = tr.ones(targets.axes, jnp.bool_)
    made = jax.eval_shape(lambda mask: next_token_loss(x, tr.Narrow(table, "fp8"), targets, mask), mask)
    assert made.total.dtype == jnp.float32
