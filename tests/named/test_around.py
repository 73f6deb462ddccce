"""What loops read from around them: gradients are summed over the turns in float32."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.program.reading import jaxprs_in

TURNS = 1024


def total(run):
    """A sum of a loop over steps of a batch, which reads a weight."""
    body = lambda carry, x, w: (carry, x * w)

    def loss(w, steps):
        return run(lambda carry, x: body(carry, x, w), steps).astype(jnp.float32).sum()

    return loss


RUNS = {
    "scan": lambda fn, steps: tr.scan(fn, "pos")(0.0, steps)[1],
    "reversed": lambda fn, steps: tr.scan(fn, "pos", reverse=True)(0.0, steps)[1],
    "groups": lambda fn, steps: tr.scan(fn, "pos", unroll=3)(0.0, steps)[1],
    "recomputed": lambda fn, steps: tr.scan(fn, "pos", policy=tr.Keep())(0.0, steps)[1],
    "map": lambda fn, steps: tr.map(lambda x: fn(0.0, x)[1], "pos")(steps),
    "fold": lambda fn, steps: tr.fold(lambda c, x: c + fn(c, x)[1].astype("float32"), "pos")(like(steps), steps),
}


def like(steps):
    return tr.zeros({name: size for name, size in steps.shape.items() if name != "pos"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("run", RUNS)
def test_a_long_loop_adds_up(run, dtype):
    steps, w = tr.ones({"pos": TURNS, "embed": 2}, dtype), tr.ones({"embed": 2}, dtype)
    gradient = tr.grad(total(RUNS[run]))(w, steps * 0.99)
    assert str(gradient.dtype) == dtype
    np.testing.assert_allclose(gradient.array.astype(jnp.float32), TURNS * 0.99, rtol=0.004)


@pytest.mark.parametrize(
    ("params", "compute"),
    [
        ({"embed": "data"}, {"batch": "data"}),
        ({"embed": "data/model"}, {"batch": "model/data"}),
        ({}, {"batch": "data", "embed": "model"}),
        ({"embed": "model"}, {"pos": "data"}),
    ],
)
def test_it_adds_up_on_every_layout(params, compute):
    layout = tr.Layout(tr.make_mesh(data=4, model=2), params=params, compute=compute)
    draw = np.random.default_rng(0).normal(size=(TURNS, 8, 16)) + 1
    steps = tr.named(jnp.asarray(draw, jnp.bfloat16), "pos batch embed")
    w = tr.ones({"embed": 16}, "bfloat16")
    exact = np.asarray(steps.array, np.float32).sum((0, 1))
    with layout:
        found = jax.jit(tr.grad(total(RUNS["scan"])))(tr.shard(w), tr.shard(steps, "compute"))
    np.testing.assert_allclose(np.asarray(found.array, np.float32), exact, rtol=0.02)


@pytest.mark.slow
def test_other_derivatives():
    steps, w = tr.ones({"pos": TURNS, "embed": 2}, "bfloat16"), tr.ones({"embed": 2}, "bfloat16")
    loss = lambda w: total(RUNS["scan"])(w, steps)
    value, along = jax.jvp(lambda w: loss(w).array, (w,), (w,))
    assert value == along == 2 * TURNS
    second = tr.grad(lambda w: (tr.grad(lambda w: loss(w * w))(w) * w).astype("float32").sum())(w)
    assert second.array.tolist() == [4 * TURNS] * 2
    mapped = jax.vmap(lambda k: tr.grad(lambda w: loss(w * k))(w).array)(jnp.arange(3, dtype="bfloat16"))
    assert mapped.tolist() == [[0, 0], [TURNS] * 2, [2 * TURNS] * 2]


def test_what_all_layers_share():
    class Block(eqx.Module):
        scale: tr.NamedArray

        def __call__(self, x, w):
            return x + self.scale * w

    layers = tr.Stacked(Block(tr.ones({"layers": TURNS, "embed": 2}, "bfloat16")), tr.Axis("layers", TURNS))
    x, w = tr.zeros({"embed": 2}, "bfloat16"), tr.ones({"embed": 2}, "bfloat16")
    assert tr.grad(lambda w: layers.fold(x, w).astype("float32").sum())(w).array.tolist() == [TURNS] * 2


def test_only_what_has_few_bits_and_a_gradient_is_cast():
    def casts(dtype, given):
        def walk(jaxpr):
            for equation in jaxpr.eqns:
                yield equation.primitive.name
                for inner in jaxprs_in(equation):
                    yield from walk(inner)

        steps, w = tr.ones({"pos": 4, "embed": 2}, dtype), tr.ones({"embed": 2}, dtype)
        run = lambda *w: tr.scan(lambda c, x: (c, x * (w or known)[0]), "pos")(0.0, steps)[1]
        known = (w,)
        return list(walk(jax.make_jaxpr(run)(*known[:given]).jaxpr)).count("convert_element_type")

    added = {dtype: casts(dtype, True) - casts(dtype, False) for dtype in ("bfloat16", "float16", "float32", "int8")}
    assert added == {"bfloat16": 2, "float16": 2, "float32": 0, "int8": 0}


def test_results_and_carries_keep_their_types():
    w = tr.ones({"embed": 2}, "bfloat16")
    steps = tr.arange(tr.Axis("pos", 4))

    def run(w):
        body = lambda carry, i: ((carry[0] + 1, carry[1] * w, carry[2]), (i, w))
        return tr.scan(body, "pos")((0, w, None), steps)

    for fn in (run, jax.jit(run)):
        (count, product, nothing), (numbers, stacked) = fn(w)
        assert (int(count), nothing, str(product.dtype), stacked.array.shape) == (4, None, "bfloat16", (4, 2))
        assert jnp.asarray(count).dtype == jnp.int32 and numbers.array.tolist() == [0, 1, 2, 3]
