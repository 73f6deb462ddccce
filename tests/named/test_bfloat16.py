"""How bfloat16 is computed on a CPU: sums and compositions in float32, rounded once."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.named.backend import product
from trellis.program.reading import jaxprs_in


def operations(function, *args):
    """Of all equations of a jaxpr and its calls: the primitive, the types of its operands and of its first result."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            types = [str(v.aval.dtype) for v in (*equation.invars, equation.outvars[0]) if hasattr(v.aval, "dtype")]
            yield equation.primitive.name, *types
            for inner in jaxprs_in(equation):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.slow
def test_a_bfloat16_product_is_made_in_float32_and_rounded_on_a_cpu():
    """Forward and both gradients: XLA's CPU compiler reaches the processor's bfloat16 products in no other way."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((64, 8), (8, 4)))
    numbers = (((1,), (0,)), ((), ()))

    def loss(function):
        return lambda x, w: jnp.sum(function(x, w, numbers).astype(jnp.float32) ** 2)

    found = operations(jax.grad(loss(product), (0, 1)), x, w)
    made = [types for name, *types in found if name == "dot_general"]
    assert made == [["bfloat16", "bfloat16", "float32"]] * 3
    for mine, plain in zip(*(jax.grad(loss(f), (0, 1))(x, w) for f in (product, jax.lax.dot_general)), strict=True):
        assert mine.dtype == jnp.bfloat16
        np.testing.assert_allclose(mine.astype(jnp.float32), plain.astype(jnp.float32), rtol=0.02, atol=0.02)


def test_a_broadcast_bfloat16_value_has_its_gradient_summed_in_float32_on_a_cpu():
    x, bias = tr.ones({"batch": 1000, "embed": 2}, "bfloat16"), tr.zeros({"embed": 2}, "bfloat16")
    loss = lambda bias: ((x + bias) * 0.01).sum().array.astype(jnp.float32)
    sums = [types for name, *types in operations(jax.grad(loss), bias) if name == "reduce_sum"]
    assert ["float32", "float32"] in sums
    gradient = jax.jit(jax.grad(loss))(bias)
    np.testing.assert_allclose(gradient.array.astype(jnp.float32), 1000 * float(jnp.bfloat16(0.01)), rtol=0.004)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, bias))
    assert [name for name, *_ in operations(jax.grad(lambda b: (wide[0] + b).sum().array), wide[1])].count(
        "convert_element_type"
    ) == 0


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "mish"])
def test_an_activation_in_bfloat16_is_rounded_once_on_a_cpu(name):
    x = tr.named(jnp.linspace(-4, 4, 101, dtype=jnp.bfloat16), "embed")
    found = getattr(tr, name)(x)
    assert found.dtype == jnp.bfloat16
    exact = getattr(tr, name)(x.astype(jnp.float32))
    np.testing.assert_array_equal(found.array, exact.array.astype(jnp.bfloat16))
    assert getattr(tr, name)(0.5) == pytest.approx(float(getattr(jax.nn, name)(0.5)))


WAYS = {
    "beside an array": lambda x, scale: x * scale,
    "chosen": lambda x, scale: tr.where(x > 0, scale, x),
    "a bound": lambda x, scale: tr.clip(x, scale, 2.0),
    "everywhere": lambda x, scale: tr.full(x.axes, scale),
    "around an array": lambda x, scale: tr.pad(x + scale * 0, {"pos": (x.shape["pos"], 0)}, value=scale),
    "added at places": lambda x, scale: x.at["pos", tr.arange(x.axis("pos"))].add(tr.named(scale, "")),
    "put at places": lambda x, scale: x.at["pos", : x.shape["pos"]].set(tr.named(scale, "")),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_narrow_number_is_a_long_sum_in_float32(way, sliced, dtype):
    """XLA's CPU compiler sums in bfloat16: 20 % of this sum were left on one device, and other shares on others."""
    layout = tr.Layout(tr.make_mesh(data=4, devices=jax.devices()[:4]), compute={"batch": "data"}) if sliced else None
    with layout or contextlib.nullcontext():
        x = tr.ones({"batch": 8, "pos": 1 << 14, "embed": 3}, dtype)

        def loss(scale, weight):
            return (WAYS[way](x, scale).astype(jnp.float32) * weight).sum().array

        gradient = jax.jit(jax.grad(loss))(jnp.asarray(1, dtype), jnp.float32(0.01))
    share = 0.5 if way == "a bound" else 1  # a bound that is met shares its gradient
    assert float(gradient) == pytest.approx(share * (8 << 14) * 3 * 0.01, rel=0.005)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["broadcast_to", "outer"])
def test_a_narrow_array_that_is_broadcast_has_its_gradient_summed_in_float32(way, dtype):
    x, pos = tr.ones({"embed": 2}, dtype), tr.Axis("pos", 70_000)
    spread = {"broadcast_to": lambda x: tr.broadcast_to(x, (pos, *x.axes)),
              "outer": lambda x: tr.outer(tr.add, tr.zeros((pos,), dtype), x)}[way]  # fmt: skip
    loss = lambda x, weight: (spread(x).astype(jnp.float32) * weight).sum().array
    found = jax.jit(jax.grad(loss))(x, jnp.float32(0.01)).array.astype(jnp.float32)
    np.testing.assert_allclose(found, 700, rtol=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sliced", [False, True])
def test_what_is_added_at_one_place_is_summed_in_float32(sliced, dtype):
    """As segments are summed: of 8,192 ones bfloat16 alone leaves 256, float16 2,048."""
    layout = tr.Layout(tr.make_mesh(data=4, devices=jax.devices()[:4]), compute={"batch": "data"}) if sliced else None
    with layout or contextlib.nullcontext():
        segments = tr.zeros({"batch": 4, "pos": 8192}, jnp.int32)
        rows = tr.ones({"batch": 4, "pos": 8192, "embed": 2}, dtype)
        for zeros in (tr.zeros({"batch": 4, "segment": 2, "embed": 2}, dtype), tr.zeros({"segment": 2}, dtype)):
            kept = rows if "batch" in zeros.names else rows["embed", 0]
            total = jax.jit(lambda at, rows, zeros=zeros: zeros.at["segment", at].add(rows * 0.5))(segments, kept)
            assert total.dtype == dtype and total.names == zeros.names
            expected = 4096 if "batch" in zeros.names else 4 * 4096
            np.testing.assert_array_equal(total["segment", 0].array.astype(jnp.float32), expected)
        product = tr.ones({"segment": 2}, dtype).at["segment", segments["batch", 0]].multiply(1.0002)
        assert float(product["segment", 0].array) == pytest.approx(1.0002**8192, rel=0.01)


@pytest.mark.slow
def test_exponentials_of_many_float16_numbers_do_not_overflow():
    x = tr.zeros({"vocab": 100_000}, "float16")
    assert float(tr.logsumexp(x).array) == pytest.approx(np.log(100_000), rel=1e-3)
    np.testing.assert_allclose(tr.log_softmax(x, "vocab").array, -np.log(100_000), rtol=1e-3)
    assert float(tr.softmax(x, "vocab").sum().array) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pending_sum_in_few_bits_is_summed_over_names_in_float32(dtype):
    layout = tr.Layout(tr.make_mesh(model=4, devices=jax.devices()[:4]), compute={"embed": "model"})
    with layout:
        x, w = tr.ones({"pos": 1 << 14, "batch": 8, "embed": 4}, dtype), tr.ones({"embed": 4}, dtype)

        def total(x, w, weight):
            parts = tr.dot(x, w * weight.astype(dtype), over="embed", settle=False)
            return tr.settle(parts.sum(("batch", "pos")))

        found = jax.jit(total)(x, w, jnp.float32(0.01))
    assert found.dtype == dtype
    assert float(found.array) == pytest.approx(4 * (8 << 14) * 0.01, rel=0.005)


def test_draws_by_bfloat16_logits_are_those_by_the_same_numbers_in_float32():
    """Rounded sums are often equal, and the first of them was taken: 52.2 % of draws were in the first half."""
    logits = tr.full({"batch": 64, "vocab": 4096}, 20.0, "bfloat16")
    key = jax.random.key(0)
    found = tr.random.categorical(key, logits, "vocab")
    np.testing.assert_array_equal(found.array, tr.random.categorical(key, logits.astype("float32"), "vocab").array)


@pytest.mark.parametrize("way", ["beside an array", "everywhere"])
def test_a_narrow_number_need_not_be_on_the_mesh(way):
    layout = tr.Layout(tr.make_mesh(data=4, devices=jax.devices()[:4]), compute={"batch": "data"})
    rows = np.ones((8, 1 << 14), jnp.bfloat16)
    with layout:
        x = tr.shard(tr.named(rows, "batch pos"), "compute")
        loss = lambda scale, x, weight: (WAYS[way](x, scale).astype(jnp.float32) * weight).sum().array
        for scale in (np.asarray(1, jnp.bfloat16), jnp.asarray(1, jnp.bfloat16)):
            assert loss(scale, x, 1.0) == rows.size
            gradient = jax.jit(jax.grad(loss))(scale, x, jnp.float32(0.01))
            assert float(gradient) == pytest.approx(rows.size * 0.01, rel=0.005)


@pytest.mark.slow
def test_a_bfloat16_probability_is_met():
    """JAX draws uniform numbers in the type of the probability: 7.7 of 1,000 were true."""
    key, axes, chance = jax.random.key(0), {"batch": 1 << 20}, jnp.asarray(0.001, jnp.bfloat16)
    found = tr.random.bernoulli(key, axes, chance)
    np.testing.assert_array_equal(found.array, tr.random.bernoulli(key, axes, float(chance)).array)
    kept = tr.random.dropout(key, tr.ones(axes, "bfloat16"), chance)
    assert kept.dtype == jnp.bfloat16
    assert float((kept.array == 0).mean()) == pytest.approx(0.001, rel=0.2)
