"""Optax's own rules on trees of named arrays, as a loop of one's own uses them: on a mesh as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from trellis.optim import by_compiler, on_arrays
from trellis.train import Checkpoints

RATE = 0.1
MATRICES = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
LABELS = lambda params: jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", params)
RULES = {
    "masked": lambda: optax.masked(optax.adam(RATE), MATRICES),
    "partition": lambda: optax.partition({"adam": optax.adam(RATE), "sgd": optax.sgd(RATE)}, LABELS),
    "adafactor": lambda: on_arrays(optax.adafactor(RATE, min_dim_size_to_factor=4)),
    "novograd": lambda: on_arrays(optax.novograd(RATE)),
    "sm3": lambda: on_arrays(optax.sm3(RATE)),
    "zero_nans": lambda: optax.chain(on_arrays(optax.zero_nans()), optax.sgd(RATE)),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(RATE), optax.contrib.reduce_on_plateau()),
    "polyak_sgd": lambda: optax.polyak_sgd(RATE),
    "muon": lambda: by_compiler(optax.contrib.muon(RATE)),
    "prodigy": lambda: by_compiler(optax.contrib.prodigy()),
    "momo": lambda: by_compiler(optax.contrib.momo(RATE)),
    "mechanize": lambda: by_compiler(optax.contrib.mechanize(optax.adam(RATE))),
    "adaptive_grad_clip": lambda: optax.chain(by_compiler(optax.adaptive_grad_clip(0.1)), optax.sgd(RATE)),
    "lbfgs": lambda: by_compiler(on_arrays(optax.lbfgs(RATE, linesearch=None))),
    "apply_if_finite": lambda: by_compiler(optax.apply_if_finite(optax.adam(RATE), 3)),
}


def params():
    random = np.random.default_rng(0)
    new = lambda shape, names: tr.from_numpy(random.normal(size=shape).astype(np.float32), names)
    return {"weight": new((8, 16), "embed mlp"), "scale": new((8,), "embed")}


def loss(params):
    return tr.square(params["weight"] * params["scale"]).mean()


def steps(rule, count=2):
    """The parameters and the state after some steps."""

    def step(params, state):
        value, gradients = tr.value_and_grad(loss)(params)
        more = {"value": value.array} if isinstance(rule, optax.GradientTransformationExtraArgs) else {}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = rule.update(gradients, state, params, **more)
        return optax.apply_updates(params, updates), state

    now = params()
    state = tr.named_jit(rule.init, outputs="params")(now)
    for _ in range(count):
        now, state = tr.named_jit(step)(now, state)
    return now, state


def layout(axis_type="explicit"):
    mesh = tr.make_mesh(data=4, model=2, axis_type=axis_type)
    return tr.Layout(mesh, params={"embed": "data", "mlp": "model"}, compute={"mlp": "model"})


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", RULES)
def test_on_a_mesh(name):
    alone = steps(RULES[name]())
    with layout():
        sliced = steps(RULES[name]())
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(sliced), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_products_of_whole_arrays_need_automatic_axes():
    rule = optax.contrib.muon(RATE)
    alone, _ = steps(rule)
    with layout("auto"):
        sliced, _ = steps(rule)
    np.testing.assert_allclose(alone["weight"].array, sliced["weight"].array, rtol=1e-4, atol=1e-5)


def test_a_rule_that_knows_nothing_of_slices_is_refused_with_what_to_do():
    for rule in (optax.contrib.prodigy(), optax.apply_if_finite(optax.adam(RATE), 3)):
        with layout(), pytest.raises(tr.MeshError, match=r"test_optax\.py:\d+: wrap the rule in trellis\.optim\.by_c"):
            steps(rule)


def test_updates_are_sliced_like_the_parameters_and_the_ledger_has_what_the_rule_moves():
    rule = by_compiler(optax.contrib.momo(RATE))
    with layout():
        now = tr.shard(params())
        state = rule.init(now)
        run = lambda updates, state: rule.update(updates, state, now, value=jnp.float32(1))
        updates, _ = jax.jit(run)(now, state)
        ledger = tr.ledger(run, now, state)
    assert tr.typeof(updates["weight"]) == "f32[embed/data=8 mlp/model=16]"
    assert {"data", "model"} <= {axis for row in ledger for axis in row.axes}


@pytest.mark.slow
def test_gradients_for_each_example():
    """Such a rule gets gradients with a name more than the parameters have."""
    rule = on_arrays(optax.contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0)))
    square = lambda weight, x: tr.square(tr.dot(weight, x, over="embed")).mean()

    def step():
        weight, x = params()["weight"], tr.from_numpy(np.ones((4, 8), np.float32), "batch embed")
        each = tr.vmap(lambda weight, x: tr.grad(square)(weight, x), "batch")(weight, x)
        return rule.update(each, rule.init(weight), weight)[0]

    alone = step()
    with layout():
        np.testing.assert_allclose(alone, step(), rtol=1e-5)
    assert alone.names == ("embed", "mlp")


def test_a_masked_state_is_saved_and_restored(tmp_path):
    with layout(), Checkpoints(tmp_path) as checkpoints:
        _, state = steps(RULES["masked"]())
        checkpoints.save(1, {"state": state})
    with layout(), Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(tr.abstract(jax.eval_shape(lambda: {"state": state}))).state["state"]
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_state_of_other_shapes_is_refused_with_what_to_do():
    with layout(), pytest.raises(tr.NamesError, match=r"trellis\.optim\.on_arrays for an optimizer"):
        tr.shard(optax.novograd(RATE).init({"weight": tr.ones({"embed": 8, "mlp": 16})}))
    assert jnp.ndim(on_arrays(optax.novograd(RATE)).init(params())[0].nu["weight"]) == 0
