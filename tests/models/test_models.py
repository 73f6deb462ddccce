"""What holds for every family: causality, gradients, positions, dropout, one collective where one is enough."""

import dataclasses
import functools
import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis.models
from tests.models.small import CONFIGS, VOCAB
from trellis.errors import UserError
from trellis.mesh import Layout, make_mesh
from trellis.models import FAMILIES, GPT2Config, GPTJConfig, LlamaConfig, Qwen3Config
from trellis.models.gptj import Block
from trellis.models.protocol import windows
from trellis.named import Axis, arange, einsum, named, named_jit, random, shard
from trellis.nn import Role, parameters
from trellis.plan.sketch import weight_counts
from trellis.train.flops import matmul_parameters

TOKENS = named(jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 12)), jnp.int32), "batch pos")
ONE_EACH = {type(config): name for name, config in CONFIGS.items()}


@pytest.fixture(params=ONE_EACH.values())
def config(request):
    return CONFIGS[request.param]


@functools.cache
def model_of(config):
    """Random everywhere, where the start has zeros and ones too."""
    random = np.random.default_rng(0)
    model = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.2, x.shape), x.dtype), model)


@jax.jit
def hidden_of(model, tokens, key=None):
    return model(tokens, key=key).hidden.array


def test_every_family_is_tested():
    assert set(ONE_EACH) == {family.config for family in FAMILIES.values()}


@pytest.mark.slow
def test_a_sketch_of_a_plan_counts_the_weights_that_multiply():
    """Of every family, from what its model declares: those of experts that a token meets, and no router's."""
    for config in CONFIGS.values():
        model = jax.eval_shape(lambda config=config: config.init(key=jax.random.key(0)))
        blocks, experts, _, _ = weight_counts(config)
        routers = sum(p.size for p in parameters(model) if "routes" in p.names and p.role == Role.WEIGHT)
        met = blocks + experts * config.experts_per_token / config.experts + routers + config.vocab * config.embed
        assert met == matmul_parameters(model), config.family


@pytest.mark.slow
def test_no_output_depends_on_a_later_token(config):
    """Through the gradient: of each position's output with respect to each position's embedding."""
    model = model_of(config)

    def hidden(change):
        x, each, shared = model.start(TOKENS)
        x = x + change
        return model.norm(model.layers.fold(x, *shared, each=each)).array[0]  # one sequence is enough

    zeros = named(jnp.zeros((12, config.embed)), "pos embed")
    jacobian = jax.jit(jax.jacrev(hidden))(zeros).array  # pos embed, pos embed
    size = np.abs(np.asarray(jacobian)).max((1, 3))
    reach = sum((window or 12) - 1 for window in windows(config))  # each layer looks as far back as its window
    seen = np.tri(12, dtype=bool) & ~np.tri(12, k=-reach - 1, dtype=bool)
    assert ((size > 0) == seen).all()


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def gradients_of(model, tokens):
    """Of the squares of logits; and the hidden states."""
    hidden = model(tokens).hidden
    logits = einsum("batch pos embed, vocab embed -> batch pos vocab", hidden, model.unembedding)
    if model.unembedding_bias is not None:
        logits = logits + model.unembedding_bias
    return (logits * logits).sum().array, hidden.array


@pytest.mark.slow
def test_every_parameter_has_a_gradient(config):
    gradients, _ = gradients_of(model_of(config), TOKENS)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        if jax.tree_util.keystr(path).endswith(".mlp.bias.array"):
            continue  # picks experts, and nothing else
        layers = gradient if "layers" in jax.tree_util.keystr(path) else gradient[None]
        assert np.asarray(layers).reshape(len(layers), -1).any(1).all(), jax.tree_util.keystr(path)


@pytest.mark.slow
def test_documents_do_not_see_each_other(config):
    """A packed document has the hidden states that it has alone, its positions counted from its own start."""
    model = model_of(config)
    first = named(jnp.roll(TOKENS.array, -5, axis=1), "batch pos")  # of what comes after it it sees nothing
    ids = named(jnp.asarray([[0] * 5 + [1] * 7] * 2, jnp.int32), "batch pos")
    places = named(jnp.asarray([[*range(5), *range(7)]] * 2, jnp.int32), "batch pos")
    packed = jax.jit(lambda m: m(TOKENS, segment_ids=ids, positions=places).hidden)(model)
    _, alone = gradients_of(model, first)
    np.testing.assert_allclose(packed.array[:, 5:], alone[:, :7], atol=1e-5)


@pytest.mark.slow
def test_scores_are_divided_by_the_layers_number():
    """The queries of layer i, counted from 1, are as if they were i times smaller."""
    config = CONFIGS["gpt2_mistral"]
    assert config.scale_by_inverse_layer
    model = model_of(config)
    numbers = arange(Axis("layers", config.layers), start=1, dtype=jnp.float32)
    qkv = {name: getattr(model.layers.block.attention, name) for name in ("qkv", "qkv_bias")}
    smaller = {name: w.at["qkv", 0].divide(numbers) for name, w in qkv.items()}
    attention = dataclasses.replace(model.layers.block.attention, **smaller)
    block = dataclasses.replace(model.layers.block, attention=attention)
    plain = dataclasses.replace(
        model,
        layers=dataclasses.replace(model.layers, block=block),
        config=dataclasses.replace(config, scale_by_inverse_layer=False),
    )
    np.testing.assert_allclose(hidden_of(model, TOKENS), hidden_of(plain, TOKENS), atol=1e-5)


@pytest.mark.slow
def test_dropout():
    config = dataclasses.replace(CONFIGS["gpt2"], dropout=0.5)
    model = model_of(config)
    first, again, other = (hidden_of(model, TOKENS, jax.random.key(i)) for i in (0, 0, 1))
    whole = hidden_of(model, TOKENS)
    assert (first == again).all() and not (first == other).any()
    np.testing.assert_array_equal(whole, hidden_of(model_of(CONFIGS["gpt2"]), TOKENS, jax.random.key(0)))
    # Half of the elements are zeros after the embedding, where nothing was added yet.
    x, *_ = model.start(TOKENS, key=jax.random.key(0))
    assert 0.4 < float((x.array == 0).mean()) < 0.6


@pytest.mark.slow
def test_a_parallel_block_sums_over_devices_once():
    """GPT-J's block: both halves leave partial sums, which are added first. Forward one all-reduce, backward one."""
    config = CONFIGS["gptj"]
    tensor = {"heads": "model", "kv_heads": "model", "mlp": "model"}

    def forward(block, x, rope):
        return block(x, rope, None)

    def backward(block, x, rope):
        return jax.grad(lambda x: (forward(block, x, rope) ** 2).sum().array)(x)

    def given():
        block = shard(Block.init(config, key=jax.random.key(0)), "params")
        x = random.normal(jax.random.key(0), {"batch": 2, "pos": 12, "embed": config.embed})
        return block, x, config.init(key=jax.random.key(0)).start(TOKENS)[2][0]

    with Layout(make_mesh(jax.devices()[:2], model=2), tensor, tensor):
        block, x, rope = jax.eval_shape(given)
        texts = [named_jit(f).lower(block, x, rope).compile().as_text() for f in (forward, backward)]
    assert [text.count(" all-reduce(") for text in texts] == [1, 2]
    assert not any(op in text for text in texts for op in (" all-gather(", " all-to-all(", " reduce-scatter("))


GATED = dict(vocab=8, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp=8, rope_theta=1e4, tie_embeddings=True)
GPT2 = dict(
    vocab=8, positions=8, embed=8, layers=1, heads=2, mlp=8, norm_eps=1e-5, dropout=0.0, scale_by_inverse_layer=False,
    upcast_attention=False,
)  # fmt: skip
GPTJ = dict(vocab=8, embed=8, layers=1, heads=2, rotary_dim=4, mlp=8)


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        (LlamaConfig, GATED | {"mlp": 0}, "A model's sizes must be positive.\n  seen:  mlp=0\n  where: model.mlp"),
        (
            Qwen3Config,
            GATED | {"kv_heads": 3},
            "`heads` must be divisible by `kv_heads`.\n  seen:  heads",
        ),
        (
            LlamaConfig,
            GATED | {"head_dim": 3},
            "`head_dim` must be even, since rotary positions rotate pairs of elements.\n  seen:  head_dim=3",
        ),
        (GPT2Config, GPT2 | {"heads": 3}, "`embed` must be divisible by `heads`.\n  seen:  embed=8, heads=3"),
        (GPT2Config, GPT2 | {"dropout": 1.0}, "`dropout` must be at least 0 and below 1.\n  seen:  dropout=1.0"),
        (
            GPTJConfig,
            GPTJ | {"rotary_dim": 6},
            "`rotary_dim` must be even and at most the width of a head.\n  seen:  rotary",
        ),
    ],
)
def test_refused_configurations(family, sizes, message):
    with pytest.raises(UserError) as error:
        family(**sizes)
    assert str(error.value).startswith(message)


def test_refused_length():
    config = GPT2Config(**GPT2)
    tokens = named(jnp.zeros((1, 9), jnp.int32), "batch pos")
    with pytest.raises(UserError, match=r"learned positions\.\n  seen:  pos=9, positions=8"):
        jax.eval_shape(lambda: config.init(key=jax.random.key(0))(tokens))


def test_another_family_is_what_its_page_says(tmp_path, monkeypatch):
    """The files of docs/families.md: a model of them computes, and each of its parameters has a key."""
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    folder = tmp_path / "plain"
    folder.mkdir()
    for name, code in zip(("plain.py", "hub.py"), re.findall(r"```py\n(.*?)```", page, re.S), strict=True):
        (folder / name).write_text(code)
    (folder / "__init__.py").write_text("from trellis.models.plain.plain import PlainConfig")
    monkeypatch.setattr(trellis.models, "__path__", [*trellis.models.__path__, str(tmp_path)])
    try:
        family = importlib.import_module("trellis.models.plain.hub").FAMILY
        sizes = "vocab embed layers heads kv_heads head_dim mlp".split()
        config = family.config(**{size: getattr(CONFIGS["llama3"], size) for size in sizes})
        model = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
        assert jax.eval_shape(lambda model: model(TOKENS).hidden, model).shape == {"batch": 2, "pos": 12, "embed": 32}
        assert {p.path for p in parameters(model)} == family.keys_of(config).keys() - {"head"}
    finally:
        for name in [name for name in sys.modules if name.startswith("trellis.models.plain")]:
            del sys.modules[name]
        vars(trellis.models).pop("plain", None)
