"""Experts in the train step: their losses, loads and biases do not change with the mesh or the number of microbatches.

The load-balancing loss is a product of two means. Means of parts of a batch make another number of it on every mesh
(published for several trainers); here both are of the whole batch.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS, VOCAB
from trellis.data.batch import Batch
from trellis.inspect import ledger, structure_of
from trellis.models import Routing
from trellis.named import named_jit, shard
from trellis.nn import Precision
from trellis.optim import make_optimizer
from trellis.optim.config import Adafactor, AdamW, Constant, Lion, Muon
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.flops import matmul_parameters
from trellis.train.state import TrainState
from trellis.train.step import StepOptions, loss_and_gradients, make_step

WEIGHTS = dict(balance=0.5, z_loss=0.1)
ROUTING = {
    "batch": Routing(**WEIGHTS),
    "sequence": Routing(**WEIGHTS, balance_over="sequence"),
    "dropped, with biases": Routing(**WEIGHTS, capacity=0.75, bias_rate=0.01),
}
LAYOUTS = {
    "data": (MeshSizes(data=4), LayoutChoice(preset="data")),
    "experts": (MeshSizes(data=2, expert=2), LayoutChoice(preset="fsdp")),
}


def config_of(routing):
    return dataclasses.replace(CONFIGS["mixtral"], routing=ROUTING[routing])


def batch():
    """Rows with different numbers of tokens that count: means of parts are not the mean."""
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, VOCAB, (2, 8, 12))
    mask = np.arange(12) < random.integers(1, 13, (8, 1))
    ids = {"tokens": jnp.asarray(tokens, jnp.int32), "targets": jnp.asarray(targets, jnp.int32)}
    return Batch(**ids, loss_mask=jnp.asarray(mask, jnp.float32)).named()


@functools.cache
def model_of(routing):
    """Skewed: some experts have several times the load of others."""

    @jax.jit
    def made(first, second):
        model = config_of(routing).init(key=first)
        keys = iter(jax.random.split(second, len(jax.tree.leaves(model))))
        return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), model)

    return made(jax.random.key(0), jax.random.key(1))


@functools.cache
def whole(routing):
    return run(jax.jit, model_of(routing), batch(), StepOptions())


def run(jit, model, data, options):
    return jax.device_get(jit(lambda m, b: loss_and_gradients(m, b, options))(model, data))


def test_utilisation_counts_the_experts_that_a_token_meets():
    config = CONFIGS["mixtral"]
    model = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
    experts = config.experts_per_token * 3 * config.embed * config.mlp + config.embed * config.experts
    assert matmul_parameters(model) == config.layers * (attention + experts) + config.vocab * config.embed


def norm(tree):
    return float(np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree))))


def assert_alike(found, wanted):
    sums, routed, gradients = found
    for a, b in zip(jax.tree.leaves((sums, routed)), jax.tree.leaves(wanted[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)
    assert norm(jax.tree.map(np.subtract, gradients, wanted[2])) < 1e-5 * norm(wanted[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routing", "accumulation"), [*((routing, "pending") for routing in ROUTING), ("batch", "sharded")]
)
def test_microbatches(routing, accumulation):
    options = StepOptions(microbatches=4, accumulation=accumulation)
    assert_alike(run(jax.jit, model_of(routing), batch(), options), whole(routing))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routing", "layout", "microbatches"),
    [*((routing, "experts", 2) for routing in ROUTING), ("batch", "data", 1), ("sequence", "experts", 1)],
)
def test_meshes(routing, layout, microbatches):
    model, wanted = model_of(routing), whole(routing)
    sizes, choice = LAYOUTS[layout]
    with make_layout(sizes, choice, jax.devices()[:4]):
        sharded, data = shard(model, "params"), shard(batch(), "compute")
        assert_alike(run(named_jit, sharded, data, StepOptions(microbatches=microbatches)), wanted)


@pytest.mark.slow
def test_shares_of_sequences_whose_positions_are_sliced():
    """The loss gathers a microbatch's mask, and the compiler counts a sequence's tokens in what that brings."""
    model = config_of("sequence").init(key=jax.random.key(0), vocab_multiple=2)
    wanted = run(jax.jit, model, batch(), StepOptions())
    with make_layout(MeshSizes(data=2, model=2), LayoutChoice(), jax.devices()[:4]) as layout:
        given = shard(model, "params"), shard(batch(), "compute")
        step = named_jit(lambda model, data: loss_and_gradients(model, data, StepOptions(microbatches=2)))
        compiled = step.lower(*given).compile()
        assert_alike(jax.device_get(compiled(*given)), wanted)
        matched = structure_of(ledger(step, *given), compiled, layout.mesh)
    assert matched.right, str(matched)


@pytest.mark.slow
def test_a_batch_in_which_no_token_counts_has_no_gradient():
    """Its load is 0, of which no share is a number."""
    given = batch()
    none = dataclasses.replace(given, loss_mask=given.loss_mask * 0.0)
    sums, _, gradients = run(jax.jit, model_of("batch"), none, StepOptions(microbatches=2))
    assert float(sums.total) == 0 and all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_the_losses_are_in_the_gradient():
    """The routers' gradients are another without the routers' losses, and the loss that is reported is not."""
    plain = dataclasses.replace(CONFIGS["mixtral"], routing=Routing())
    model = model_of("batch")
    experts = dataclasses.replace(model.layers.block.mlp, routing=plain.routing)
    layers = dataclasses.replace(model.layers, block=dataclasses.replace(model.layers.block, mlp=experts))
    without = dataclasses.replace(model, layers=layers, config=plain)
    sums, routed, gradients = run(jax.jit, without, batch(), StepOptions())
    wanted = whole("batch")
    assert sums.cross_entropy == wanted[0].cross_entropy
    added = 0.5 * wanted[1].balance + 0.1 * wanted[1].z
    np.testing.assert_allclose(wanted[0].total - sums.total, added, rtol=1e-4)
    apart = gradients.layers.block.mlp.router.array - wanted[2].layers.block.mlp.router.array
    assert (np.abs(apart).max((1, 2)) > 1e-3).all()


@pytest.mark.slow
def test_biases_move_by_the_load_alone():
    """By the rate, up where the load is below the mean."""
    rate, model = 0.01, model_of("dropped, with biases")
    optimizer = make_optimizer(AdamW(learning_rate=0.1, weight_decay=0.5), Constant(warmup_steps=0), steps=10)
    step = jax.jit(make_step(optimizer, StepOptions()))
    state = TrainState(jnp.int32(0), model, optimizer.init(model), None, jax.random.key(0))
    load = whole("dropped, with biases")[1].load.array
    after, metrics = step(state, batch())
    moved = after.model.layers.block.mlp.bias.array - model.layers.block.mlp.bias.array
    np.testing.assert_allclose(moved, rate * np.sign(load.mean(1, keepdims=True) - load), atol=1e-6)
    shares = load / load.mean(1, keepdims=True)
    np.testing.assert_allclose(metrics["router_load_max"], shares.max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["router_load_min"], shares.min(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [AdamW, Lion, Muon, Adafactor])
def test_no_optimizer_moves_a_bias(rule):
    """Their gradients are zeros, and vectors of a layer are not decayed."""
    model = model_of("dropped, with biases")
    assert not whole("dropped, with biases")[2].layers.block.mlp.bias.array.any()
    optimizer = make_optimizer(rule(learning_rate=0.1, weight_decay=0.5), Constant(warmup_steps=0), steps=10)
    bias = lambda tree: tree.layers.block.mlp.bias
    gradients = eqx.tree_at(bias, jax.tree.map(jnp.ones_like, model), jax.tree.map(jnp.zeros_like, bias(model)))
    updates, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradients, model)
    assert not bias(updates).array.any() and updates.layers.block.mlp.router.array.all()


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["float32", "bfloat16"])
def test_biases_even_the_load(rest):
    """With the learning rate at zero only the biases move, and the fullest expert's load falls towards the mean. Of
    biases in bfloat16, two neighbours at 2 are three times as far apart as the rate, so that they go on jumping: around
    biases that even the load."""
    config = dataclasses.replace(CONFIGS["mixtral"], routing=Routing(bias_rate=0.005))
    model = jax.jit(lambda key: config.init(key=key))(jax.random.key(0))
    router = model.layers.block.mlp.router
    skewed = router.with_array(router.array.at[:, :, 0].multiply(4.0))
    model = jax.tree.map(lambda x: skewed if x is router else x, model, is_leaf=lambda x: x is router)
    bias = lambda model: model.layers.block.mlp.bias
    precision = Precision(params=rest, compute="float32")
    model = precision.at_rest(eqx.tree_at(bias, model, bias(model) + 2.0))
    optimizer = make_optimizer(AdamW(learning_rate=1e-12), Constant(warmup_steps=0), steps=10)
    step = jax.jit(make_step(optimizer, StepOptions(precision=precision)))
    state = TrainState(jnp.int32(0), model, optimizer.init(model), None, jax.random.key(0))
    fullest, biases = [], []
    for _ in range(120):
        state, metrics = step(state, batch())
        fullest.append(float(metrics["router_load_max"]))
        biases.append(np.asarray(bias(state.model).array, np.float32))
    assert {x.dtype for x in metrics.values()} == {jnp.dtype("float32")}
    if rest == "bfloat16":
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), state.model)
        model = eqx.tree_at(bias, wide, bias(wide).with_array(jnp.asarray(np.mean(biases[40:], 0))))
        around = TrainState(jnp.int32(0), model, optimizer.init(model), None, jax.random.key(0))
        step = jax.jit(make_step(optimizer, StepOptions(precision=Precision(compute="float32"))))
        fullest.append(float(step(around, batch())[1]["router_load_max"]))
    assert fullest[0] > 1.5 and fullest[-1] < 1.25, (fullest[0], fullest[-1])
