"""Published bugs 6 to 12, 18 and 19: experts and their routers under expert, tensor and context parallelism.

Each was a gradient, a norm or a loss that another mesh made another number. Here all of them are held against one
device, part by part, so that a wrong factor in any part shows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models.small import CONFIGS, VOCAB
from trellis.data.batch import Batch
from trellis.models import Routing
from trellis.named import Axis, named, named_jit, one_hot, shard
from trellis.nn.moe import ExpertsError, choose
from trellis.optim import make_optimizer
from trellis.optim.config import AdamW, Constant
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.state import TrainState
from trellis.train.step import StepOptions, loss_and_gradients, make_step

ONE_ROUND = 16.0  # room for all tokens, whomever they choose
CONFIG = dataclasses.replace(CONFIGS["mixtral"], routing=Routing(balance=0.5, z_loss=0.1))
MESHES = {
    "experts and tensor": MeshSizes(data=1, expert=2, model=2),
    "experts and context": MeshSizes(data=1, expert=2, context=2),
    "experts alone": MeshSizes(data=1, expert=4),  # tokens go to them in several rounds
}


def batch():
    """Rows that count different numbers of tokens."""
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, VOCAB, (2, 4, 16))
    mask = np.arange(16) < np.array([[16], [3], [9], [14]])
    ids = {"tokens": jnp.asarray(tokens, jnp.int32), "targets": jnp.asarray(targets, jnp.int32)}
    return Batch(**ids, loss_mask=jnp.asarray(mask, jnp.float32)).named()


@functools.cache
def model():
    return jax.jit(lambda key: CONFIG.init(key=key, vocab_multiple=4))(jax.random.key(0))


def run(jit, model, data):
    found = jit(lambda m, b: loss_and_gradients(m, b, StepOptions()))(model, data)
    return *jax.device_get(found), float(jit(optax.tree.norm)(found[2]))


@functools.cache
def one_device():
    return run(jax.jit, model(), batch())


@functools.cache
def on_mesh(mesh):
    whole = model()
    if mesh != "experts alone":
        routing = dataclasses.replace(CONFIG.routing, slack=ONE_ROUND)
        whole = dataclasses.replace(whole, config=dataclasses.replace(CONFIG, routing=routing))
    with make_layout(MESHES[mesh], LayoutChoice(preset="hybrid"), jax.devices()[:4]):
        return run(named_jit, shard(whole, "params"), shard(batch(), "compute"))


def parts(gradients):
    """Every parameter of every layer, and of experts each one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients, is_leaf=lambda x: hasattr(x, "names")):
        array = np.asarray(leaf.array)
        counted = sum(name in ("layers", "experts") for name in leaf.names)
        for at in np.ndindex(array.shape[:counted]):
            yield (jax.tree_util.keystr(path, simple=True, separator="."), *at), array[at]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_gradient_is_one_devices(mesh):
    """Bugs 8 to 12: of each expert, of the router, and of what stands beside experts, to its own scale."""
    for (name, found), (_, wanted) in zip(parts(on_mesh(mesh)[2]), parts(one_device()[2]), strict=True):
        assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_norm_is_one_devices(mesh):
    """Bug 6: the norm that gradients are clipped by counts every slice of every expert once."""
    assert on_mesh(mesh)[3] == pytest.approx(one_device()[3], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_routers_losses_are_one_devices(mesh):
    """Bug 7: whatever slices widths, positions or the batch, and with tokens that do not count."""
    wanted = one_device()[1]
    for a, b in zip(jax.tree.leaves(on_mesh(mesh)[1]), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
def test_every_expert_learns():
    """Bug 18: a step moves every parameter of every layer, and of every expert."""
    optimizer = make_optimizer(AdamW(learning_rate=0.01), Constant(warmup_steps=0), steps=3)
    state = TrainState(jnp.int32(0), model(), optimizer.init(model()), None, jax.random.key(0))
    after, _ = jax.jit(make_step(optimizer, StepOptions()))(state, batch())
    for (name, gradient), (_, moved) in zip(
        parts(one_device()[2]), parts(jax.tree.map(jnp.subtract, after.model, model())), strict=True
    ):
        assert np.abs(gradient).max() > 0 and np.abs(moved).max() > 0, name


@pytest.mark.slow
def test_the_loss_reaches_the_router():
    """Bug 19: without any loss of its own the router learns; of one normalized weight it cannot, so that is refused."""
    scores = named(jax.random.normal(jax.random.key(0), (1, 4, 5)), "batch pos routes")

    def read(scores, count):
        ids, weights = choose(scores, count)
        made = one_hot(ids, Axis("routes", 5)) * named(jnp.arange(5.0), "routes")  # what the experts would make
        return (weights * made.sum("routes")).sum().array

    assert jnp.abs(jax.grad(lambda s: read(s, 2))(scores).array).max() > 1e-2
    with pytest.raises(ExpertsError, match="the router learns nothing from the loss"):
        choose(scores, 1)

    def normalized_top_1(scores):
        largest = jax.nn.softmax(scores, -1).max(-1, keepdims=True)
        return (largest / largest.sum(-1, keepdims=True)).sum()

    assert jnp.abs(jax.grad(normalized_top_1)(scores.array)).max() < 1e-6
