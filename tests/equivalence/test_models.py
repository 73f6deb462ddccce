"""Every family on every layout: loss and gradients are one device's.

In float32 the gradient differs by at most 1e-5 of its norm, and each parameter's by at most 1e-4 of its own; the loss
by 2e-6 of itself. The differences that there are come from the order of sums.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS, VOCAB
from tests.sample import grid
from trellis.data.batch import Batch
from trellis.models import Routing
from trellis.named import NamesError, named_jit, shard
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import model_axes
from trellis.train.step import StepOptions, loss_and_gradients

WHOLE = {"kv_heads": ""}
OVER_MODEL = {"experts": "model", "mlp": ""}
LAYOUTS = {
    "data": (MeshSizes(data=8), LayoutChoice(preset="data")),
    "fsdp": (MeshSizes(data=8), LayoutChoice(preset="fsdp")),
    # Four devices share two key heads: each reads the one that its query head needs.
    "tensor": (MeshSizes(data=1, model=4), LayoutChoice(preset="tensor", params=WHOLE, compute=WHOLE)),
    "fsdp_tensor": (MeshSizes(data=4, model=2), LayoutChoice(preset="fsdp_tensor")),
    "sequence": (MeshSizes(data=4, model=2), LayoutChoice(preset="fsdp_tensor_sequence")),
    "ring": (MeshSizes(data=2, context=4), LayoutChoice(preset="context")),
    "gather": (MeshSizes(data=4, context=2), LayoutChoice(preset="context", context="gather")),
    "exchange": (MeshSizes(data=4, context=2), LayoutChoice(preset="context", context="exchange")),
    "ring, gather, heads": (
        MeshSizes(data=1, context=2, context_y=2, model=2),
        LayoutChoice(preset="hybrid", context="ring", context_y="gather"),
    ),
    "ring, exchange": (
        MeshSizes(data=1, context=4, context_y=2),
        LayoutChoice(preset="context", context="ring", context_y="exchange"),
    ),
    "hybrid": (MeshSizes(replica=2, data=2, model=2), LayoutChoice(preset="hybrid")),
    "pipeline": (MeshSizes(stage=2, data=2, model=2), LayoutChoice(preset="fsdp_tensor_sequence")),
    "pipeline, context": (
        MeshSizes(stage=2, context=2, data=2),
        LayoutChoice(preset="hybrid", pipeline_microbatches=2),
    ),
    "overlap": (
        MeshSizes(data=2, model=4),
        LayoutChoice(preset="fsdp_tensor_sequence", params=WHOLE, compute=WHOLE, overlap=("mlp", "heads")),
    ),
    "overlap, context": (
        MeshSizes(data=2, context=2, model=2),
        LayoutChoice(preset="hybrid", overlap=("mlp", "heads")),
    ),
}
FAMILIES = {
    "llama": CONFIGS["llama3"],
    # Llama with norms on queries and keys; tied embeddings.
    "qwen3": dataclasses.replace(CONFIGS["qwen3"], tie_embeddings=True, rope_scaling=CONFIGS["llama3"].rope_scaling),
    # Every layer sees a window.
    "mistral": CONFIGS["mistral"],
    # Biases of queries, keys and values.
    "qwen2": CONFIGS["qwen2"],
    # Norms after layers, and over all heads, which a tensor's mesh axis slices.
    "olmo2": CONFIGS["olmo2"],
    # A first layer before pairs, which all see a window, and norms around each part of a layer.
    "gemma3": CONFIGS["gemma3"],
    # A first layer without experts, and a stack of two: stages share the second.
    "deepseek_v3": dataclasses.replace(
        CONFIGS["deepseek_v3"], routing=Routing(scores="sigmoid", groups=4, groups_per_token=2, scale=2.5)
    ),
    # Queries from the stream, beside a latent that no heads slice.
    "deepseek_v3_queries": dataclasses.replace(
        CONFIGS["deepseek_v3"], q_latent=None, routing=Routing(scores="sigmoid", scale=2.5)
    ),
    # Pairs of layers, and a load-balancing loss that goes through stages.
    "gpt_oss": dataclasses.replace(
        CONFIGS["gpt_oss"], layers=4, routing=Routing(balance=0.1, balance_over="sequence", z_loss=0.01)
    ),
    "gpt2": dataclasses.replace(CONFIGS["gpt2_mistral"], layers=4, dropout=0.1),  # the same numbers dropped everywhere
    "gptj": dataclasses.replace(CONFIGS["gptj"], heads=4),
    "mixtral": dataclasses.replace(
        CONFIGS["mixtral"], routing=Routing(balance=0.1, z_loss=0.01), shared_mlp=24, expert_biases=True
    ),
}
# As many layers as they need to be in stages; elsewhere a pair, or one layer of each kind. That a stack has more than
# one layer is held by the other families.
SHALLOW = {"deepseek_v3": 2, "deepseek_v3_queries": 2, "gemma3": 3, "gpt_oss": 2, "gpt2": 2}
# Layouts on which `test_steps.py` holds the gradients of all families but the two that follow, beside their curves.
IN_STEPS = {"data", "fsdp", "fsdp_tensor", "sequence", "hybrid"}
OTHERS = {*LAYOUTS} - IN_STEPS
# Families that have nothing of their own but in these layouts: Qwen3's program holds all of Llama's, GPT-OSS's and
# DeepSeek-V3's all of Mixtral's but how it balances over a batch, and GPT-OSS's and Qwen3's together all of Mistral's,
# Qwen2's and OLMo 2's but windows alone, tied tables beside biases, and norms of what is sliced or pending; and GPT-2
# and GPT-J, whose heads have keys of their own, take turns in slices of a sequence.
FEWER = {
    "llama": {"pipeline"},
    "mistral": {"sequence", "ring", "ring, gather, heads", "pipeline, context"},
    "qwen2": {"fsdp_tensor", "tensor"},
    "qwen3": OTHERS,
    "olmo2": {"fsdp", "sequence", "tensor", "pipeline", "overlap, context"},
    "gemma3": {"fsdp_tensor", "sequence", "ring", "exchange", "pipeline"},
    "deepseek_v3_queries": {"overlap"},
    "mixtral": {"ring, exchange", "pipeline", "overlap"},
    "gpt2": OTHERS - {"exchange", "ring, gather, heads"},
    "gptj": OTHERS - {"gather", "ring, exchange", "overlap, context"},
}
# Experts on mesh axes: their own, tokens gathered or exchanged along it, or hierarchically along two, with FSDP, tensor
# and context beside it; more devices than an expert's tokens; and the tensor's axis, along which tokens are whole.
EXPERTS = {
    "expert": (MeshSizes(data=2, expert=4), LayoutChoice(preset="expert"), "auto"),
    "expert, gather": (MeshSizes(data=2, expert=4), LayoutChoice(preset="expert"), "gather"),
    "expert_fsdp": (MeshSizes(data=4, expert=2), LayoutChoice(preset="fsdp"), "slots"),
    "expert_tensor": (MeshSizes(data=2, expert=2, model=2), LayoutChoice(preset="fsdp_tensor"), "slots"),
    "expert_sequence": (MeshSizes(data=2, expert=2, model=2), LayoutChoice(preset="fsdp_tensor_sequence"), "gather"),
    "expert_context": (MeshSizes(data=2, expert=2, context=2), LayoutChoice(preset="hybrid"), "slots"),
    "expert, gathered weights": (MeshSizes(data=2, expert=2), LayoutChoice(preset="fsdp"), "grouped"),
    "experts over model": (
        MeshSizes(data=2, model=2),
        LayoutChoice(preset="fsdp_tensor", params=OVER_MODEL, compute=OVER_MODEL),
        "auto",
    ),
    "dense": (MeshSizes(data=2, expert=2, model=2), LayoutChoice(preset="fsdp_tensor"), "dense"),
    "expert_y": (MeshSizes(data=2, expert=2, expert_y=2), LayoutChoice(preset="fsdp"), "hierarchical"),
}


def batch():
    """Eight rows of two documents each, some tokens not counted: no row is like another."""
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, VOCAB, (2, 8, 16))
    cut = random.integers(3, 13, (8, 1))
    places = np.arange(16)
    second = places >= cut
    fields = {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": second,
        "positions": np.where(second, places - cut, places),
    }
    mask = (random.random((8, 16)) < 0.8).astype(np.float32)
    return {name: jnp.asarray(x, jnp.int32) for name, x in fields.items()} | {"loss_mask": jnp.asarray(mask)}


def one_device(family, stages=False, dispatch=None):
    """The model, its loss and its gradients; `stages` with the layers that stages need, and nothing dropped."""
    config = FAMILIES[family]
    if dispatch is not None:
        config = dataclasses.replace(config, routing=dataclasses.replace(config.routing, dispatch=dispatch))
    if not stages:
        config = dataclasses.replace(config, layers=SHALLOW.get(family, config.layers))
    elif hasattr(config, "dropout"):  # a pipeline draws what it drops for each microbatch
        config = dataclasses.replace(config, dropout=0.0)
    return _one_device(config)


@functools.cache
def _one_device(config):
    # Not under `jax.jit`: what draws an array is compiled once for all families that have one of its shape.
    model = moved_a_little(config.init(key=jax.random.key(0), vocab_multiple=8))
    return model, *loss_of(jax.jit, model, Batch(**batch()).named())


def moved_a_little(model):
    """No parameter is as models begin: neither ones nor zeros. On the host, since a trace would take seconds."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x) + 0.05 * random.standard_normal(x.shape, np.float32), model)


def loss_of(jit, model, batch):
    key = jax.random.key(2)
    sums, _, gradients = jit(lambda m, b: loss_and_gradients(m, b, StepOptions(), key))(model, batch)
    return float(sums.total / sums.tokens), jax.device_get(gradients)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        case
        for case in grid(FAMILIES, LAYOUTS, quick=[("gptj", "ring")])
        if case.values[1] in FEWER.get(case.values[0], LAYOUTS)
    ],
)
def test_one_device_and_many(family, layout):
    sizes, choice = LAYOUTS[layout]
    model, *wanted = one_device(family, stages=layout.startswith("pipeline"))
    if (family, layout) == ("deepseek_v3", "pipeline, context"):  # its first layers run on the first stage alone
        with pytest.raises(NamesError, match="cannot contain a permute, got one, as from a ring"):
            assert_alike(model, wanted, sizes, choice, 8)
        choice = dataclasses.replace(choice, context="exchange")
    assert_alike(model, wanted, sizes, choice, 4 if layout == "tensor" else 8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts(layout):
    sizes, choice, way = EXPERTS[layout]
    model, *wanted = one_device("mixtral")
    with_routing(model, wanted, dataclasses.replace(model.config.routing, way=way), sizes, choice)


# Two parts side by side, where devices have more than a sequence: experts exchanged, at home and gathered. Rows of
# DeepSeek-V3 go in eight bits, rounded as they are on one device, which sends nothing.
INTERLEAVED = {
    "mixtral": (MeshSizes(data=2, expert=2), LayoutChoice(preset="fsdp"), "slots", None),
    "deepseek_v3": (MeshSizes(data=1, expert=2, expert_y=2), LayoutChoice(preset="fsdp"), "hierarchical", "mxfp8"),
    "gpt_oss": (MeshSizes(data=1, expert=2, model=2), LayoutChoice(preset="fsdp_tensor_sequence"), "gather", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", INTERLEAVED)
def test_parts_side_by_side(family):
    sizes, choice, way, dispatch = INTERLEAVED[family]
    model, *wanted = one_device(family, dispatch=dispatch)
    routing = dataclasses.replace(model.config.routing, way=way, interleave=2)
    with_routing(model, wanted, routing, sizes, choice)


# Where the compiler places communication, except in attention and in experts: key heads whole beside sliced query heads
# and positions, which its partitioner gets wrong by itself (docs/published-bugs.md, 22); a ring with sinks and windows,
# and experts whose tokens are exchanged; and one of each kind of layer of which two devices compute a part.
BY_COMPILER = {
    "llama": (MeshSizes(data=2, model=4), {"params": WHOLE, "compute": WHOLE}),
    "gpt_oss": (MeshSizes(data=1, expert=2, context=4), {}),
    "deepseek_v3": (MeshSizes(data=2, expert=2, model=2), {"context": "exchange"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_COMPILER)
def test_where_the_compiler_places(family):
    sizes, entries = BY_COMPILER[family]
    model, *wanted = one_device(family)
    assert_alike(model, wanted, sizes, LayoutChoice(mode="auto", **entries), 8)


def with_routing(model, wanted, routing, sizes, choice):
    """`assert_alike` of the same parameters, their tokens routed otherwise."""
    config = dataclasses.replace(model.config, routing=routing)
    structure = jax.tree.structure(jax.eval_shape(lambda: config.init(key=jax.random.key(0), vocab_multiple=8)))
    model, wanted[1] = (jax.tree.unflatten(structure, jax.tree.leaves(tree)) for tree in (model, wanted[1]))
    assert_alike(model, wanted, sizes, choice, math.prod(dataclasses.asdict(sizes).values()))


def assert_alike(model, wanted, sizes, choice, count):
    axes = {"kv_heads": 1} | model_axes(model.config)  # layouts name them, and not every family has them
    with make_layout(sizes, choice, jax.devices()[:count], axes):
        assert_near(loss_of(named_jit, shard(model, "params"), shard(Batch(**batch()).named(), "compute")), wanted)


def assert_near(found, wanted):
    """Both are a loss and its gradients."""
    (loss, gradients), (wanted_loss, wanted_gradients) = found, wanted
    assert loss == pytest.approx(wanted_loss, rel=2e-6)
    assert_gradients_near(gradients, wanted_gradients)


def assert_gradients_near(gradients, wanted_gradients):
    """Each parameter's, and all together."""
    norm = lambda tree: float(np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree))))
    apart = jax.tree.map(np.subtract, gradients, wanted_gradients)
    assert norm(apart) < 1e-5 * norm(wanted_gradients)
    pairs = zip(jax.tree_util.tree_leaves_with_path(apart), jax.tree.leaves(wanted_gradients), strict=True)
    for (path, off), whole in pairs:
        assert norm(off) < 1e-4 * norm(whole), jax.tree_util.keystr(path)
