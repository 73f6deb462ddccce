"""Products in four bits: their numbers to the bit, on every layout, rounded at random, and what a gather moves."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from tests.named.test_narrow import MESHES, drawn, layout_of, to_numpy
from trellis.named import scaled
from trellis.named.hadamard import matrix

KEY = jax.random.key(5)


def emulated(x: np.ndarray, *dims: int) -> np.ndarray:
    """A matrix as the numbers that stand for it, in float64, by `ml_dtypes` alone: blocks of 16 along dimensions."""
    down, across = (16 if d in dims else 1 for d in (0, 1))
    tiles = x.reshape(x.shape[0] // down, down, x.shape[1] // across, across).astype(np.float32)
    largest = np.abs(tiles).max((1, 3), keepdims=True)
    whole = largest.max() * np.float32(1 / (6 * 448))
    scales = (largest / (whole * np.float32(6))).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = (tiles / (np.where(scales == 0, 1, scales) * whole).astype(np.float32)).astype(ml_dtypes.float4_e2m1fn)
    return (values.astype(np.float64) * scales).reshape(x.shape) * whole


def transformed(x: np.ndarray) -> np.ndarray:
    """Rows of a matrix, 16 after 16, by the transform."""
    return np.einsum("bij,ik->bkj", x.reshape(-1, 16, x.shape[1]), matrix()).reshape(x.shape)


def loss_of(key):
    def loss(weights, x):
        keys = (None, None) if key is None else jax.random.split(key)
        up, down = (tr.Narrow(w, "nvfp4", mine) for w, mine in zip(weights, keys, strict=True))
        h = tr.gelu(tr.einsum("batch pos embed, embed mlp -> batch pos mlp", x, up))
        y = tr.dot(h, down, over="mlp")
        return ((y - x) ** 2).mean().array

    return loss


@functools.cache
def arrays():
    return drawn(128, 64)


@pytest.mark.slow
def test_values_and_gradients_are_those_of_ml_dtypes():
    w, _, x = arrays()
    x = x["batch", 0]
    gradient = tr.random.normal(jax.random.key(3), {"pos": 64, "mlp": 64})

    @jax.jit
    def with_gradients(x, w, gradient):
        out, pull = jax.vjp(lambda x, w: tr.dot(x, tr.Narrow(w, "nvfp4"), over="embed"), x, w)
        return out, *pull(gradient)

    out, dx, dw = with_gradients(x, w, gradient)
    a, b, g = (np.asarray(each.array) for each in (x, w, gradient))
    tiles = emulated(b, 0, 1)
    wanted = (
        (out, emulated(a, 1) @ tiles),
        (dx, emulated(g, 1) @ tiles.T),
        (dw, emulated(transformed(a), 0).T @ emulated(transformed(g), 0)),
    )
    for found, product in wanted:
        np.testing.assert_allclose(found.array, product, rtol=0, atol=1e-6 * np.abs(product).max())
    assert np.linalg.norm(np.asarray(dw.array) - a.T @ g) < 0.2 * np.linalg.norm(a.T @ g)


@functools.cache
def one_device(rounded):
    (up, down, x), key = arrays(), KEY if rounded == "random" else None
    return to_numpy(jax.jit(jax.value_and_grad(loss_of(key), (0, 1)))((up, down), x))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
@pytest.mark.parametrize("rounded", ["nearest", "random"])
def test_every_layout_gives_one_device_s_numbers(axis_type, rounded):
    (up, down, x), wanted = arrays(), one_device(rounded)
    step = jax.value_and_grad(loss_of(KEY if rounded == "random" else None), (0, 1))
    for name in MESHES[axis_type]:
        with layout_of(name, axis_type):
            found = to_numpy(tr.named_jit(step)(tr.shard((up, down)), tr.shard(x, "compute")))
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
        for a, b in zip(found[1:], wanted[1:], strict=True):  # a last bit may round a number to another one
            assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b), name


@pytest.mark.slow
def test_gradients_rounded_at_random_are_right_in_the_mean_and_the_same_with_the_same_key():
    w, _, x = arrays()
    x = x["batch", 0]
    gradient = tr.random.normal(jax.random.key(3), {"pos": 64, "mlp": 64}) * 1e-3
    at = jax.jit(
        lambda key: jax.vjp(lambda x, w: tr.dot(x, tr.Narrow(w, "nvfp4", key), over="embed"), x, w)[1](gradient)
    )
    drawn = [to_numpy(at(key)) for key in jax.random.split(KEY, 128)]
    exact = to_numpy(
        (
            gradient.array @ emulated(np.asarray(w.array), 0, 1).T.astype(np.float32),
            emulated(transformed(np.asarray(x.array)), 0).T.astype(np.float32)
            @ transformed(np.asarray(gradient.array)),
        )
    )
    for n, wanted in enumerate(exact):
        each = np.stack([found[n] for found in drawn])
        error = np.abs(each.mean(0) - wanted) / (each.std(0) / 128**0.5)
        assert error.max() < 7 and 0.9 < np.sqrt(np.square(error).mean()) < 1.1
    again = to_numpy(at(jax.random.split(KEY, 128)[0]))
    assert all((a == b).all() for a, b in zip(again, drawn[0], strict=True))


@pytest.mark.slow
def test_half_a_byte_a_number_is_gathered():
    up, down, x = arrays()
    with layout_of("FSDP"):
        moved = tr.ledger(jax.value_and_grad(loss_of(None)), tr.shard((up, down)), tr.shard(x, "compute"))
    gathers = sorted((row.dtype, row.wire) for row in moved.rows if row.kind == "all-gather")
    numbers, scales = ("f4_e2m1fn", 128 * 64 // 2 * 7 // 8), ("f8_e4m3fn", 8 * 4 * 7 // 8)
    assert gathers == [numbers, numbers, scales, scales]


@pytest.mark.slow
def test_a_blackwell_gpu_multiplies_blocks_with_their_scales(monkeypatch):
    """What JAX gives its compiler, by a stand-in with the same meaning: rows, sums and scales are where they belong."""
    calls = []

    def stand_in(a, b, sa, sb, preferred_element_type):
        calls.append((a.dtype, a.shape, sa.dtype, sa.shape))
        wide = [x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 16, 2) for x, s in ((a, sa), (b, sb))]
        return jnp.einsum("bmk,bnk->bmn", *wide, preferred_element_type=preferred_element_type)

    up, down, x = arrays()
    step = jax.value_and_grad(loss_of(None), (0, 1))
    wanted = to_numpy(jax.jit(step)((up, down), x))
    monkeypatch.setattr(scaled, "multiplies_blocks", lambda a: True)
    monkeypatch.setattr(jax.nn, "scaled_matmul", stand_in)
    with layout_of("sequence"):
        found = to_numpy(tr.named_jit(step)(tr.shard((up, down)), tr.shard(x, "compute")))
    assert calls[0] == (jnp.float4_e2m1fn, (1, 16 // 4 * 64, 128), jnp.float8_e4m3fn, (1, 16 // 4 * 64, 8))
    assert len(calls) == 6
    for a, b in zip(found, wanted, strict=True):
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)


@pytest.mark.slow
def test_both_forms_of_a_factor_are_made_together_on_gpus():
    """Of the activation, and of the gradient: XLA would make one when the weight's gradient needs it, and keep more."""

    def loss(x, w):
        x, w = tr.named(x, "batch embed"), tr.named(w, "embed mlp")
        return tr.dot(x, tr.Narrow(w, "nvfp4"), over="embed").sum().array

    def fences(platform):
        device = AbstractDevice(platform, None, platform)
        mesh = AbstractMesh((1,), ("data",), (AxisType.Explicit,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            factor = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
            return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(factor, factor)).count("= optimization_barrier")

    assert [fences(platform) for platform in ("cpu", "tpu", "cuda")] == [0, 0, 2]


@pytest.mark.slow
def test_zeros_stay_zeros_what_is_not_finite_shows_and_scales_keep_small_and_large_numbers():
    w = tr.ones({"embed": 16, "mlp": 16})
    assert not tr.dot(tr.zeros({"batch": 2, "embed": 16}), tr.Narrow(w, "nvfp4"), over="embed").array.any()
    for bad in (np.inf, np.nan):
        x = tr.named(np.array([[1.0, bad, *[1.0] * 14]], np.float32), "batch embed")
        assert not np.isfinite(tr.dot(x, tr.Narrow(w, "nvfp4"), over="embed").array).any()
    x, w = tr.full({"batch": 2, "embed": 16}, 1e-6), tr.full({"embed": 16, "mlp": 16}, 1e5)
    np.testing.assert_allclose(tr.dot(x, tr.Narrow(w, "nvfp4"), over="embed").array, 1.6, rtol=1e-6)


@pytest.mark.parametrize(
    "x, w, kind, key, said",
    [
        (
            {"batch": 2, "embed": 16},
            {"embed": 16, "mlp": 16},
            "fp8",
            KEY,
            "only products in nvfp4 take a key, .* got one for a product in fp8",
        ),
        ({"batch": 2, "embed": 16}, {"embed": 16, "mlp": 16}, "nvfp4", jnp.zeros(2), r"one random key .* got f32\[2\]"),
    ],
)
def test_refused(x, w, kind, key, said):
    with pytest.raises(tr.NamesError, match=said):
        tr.dot(tr.ones(x), tr.Narrow(tr.ones(w), kind, key), over="embed")
