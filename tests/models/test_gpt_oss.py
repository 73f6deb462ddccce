"""What only GPT-OSS has: pairs of layers, windows, counts of a released model, folders that are refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS, POSITIONS
from trellis.errors import UserError
from trellis.hub import Folder
from trellis.models import FAMILIES, GptOssConfig, Routing, YarnScaling
from trellis.models.gpt_oss.gpt_oss import attention
from trellis.models.protocol import stacked
from trellis.named import Axis, arange, named
from trellis.nn import parameters, rotary_tables
from trellis.train.flops import flops_per_token, matmul_parameters

SMALL = CONFIGS["gpt_oss"]
RELEASED = GptOssConfig(
    vocab=201_088, embed=2880, layers=24, heads=64, kv_heads=8, head_dim=64, window=128, mlp=2880, experts=32,
    experts_per_token=4, rope_theta=150_000.0, tie_embeddings=False,
    rope_scaling=YarnScaling(factor=32.0, original_context=4096, truncate=False),
)  # fmt: skip


def abstract(config):
    return jax.eval_shape(lambda: config.init(key=jax.random.key(0)))


def test_counts_of_the_released_model():
    """Parameters, and FLOPs of a token, by hand."""
    model, embed, heads = abstract(RELEASED), 2880, 64 * 64
    attention = embed * (heads + 2 * 8 * 64) + heads * embed
    expert, tables = 3 * embed * 2880, 201_088 * embed
    biases = (heads + 2 * 8 * 64 + embed + 64) + 32 * 3 * 2880 + 32  # of attention with its sinks, experts, the router
    layer = attention + 32 * expert + embed * 32 + biases + 2 * embed
    assert sum(p.size for p in parameters(model)) == 24 * layer + 2 * tables + embed == 20_914_757_184
    met = 24 * (attention + 4 * expert + embed * 32) + tables
    assert matmul_parameters(model) == met
    near, far = 128 - 128 * 128 / (2 * 4096), 4096 / 2  # keys that a query sees, in the mean
    assert flops_per_token(model, 4096) == 6 * met + 12 * heads * 12 * (near + far)


@pytest.mark.slow
def test_a_layer_sees_its_window():
    config = dataclasses.replace(SMALL, window=3)

    @jax.jit
    @jax.grad
    def gradient(x):
        layer = attention(config, config.window, key=jax.random.key(0))
        rope = rotary_tables(arange(Axis("pos", 8)), Axis("head_dim", config.head_dim), config.rope_theta)
        return layer(named(x, "batch pos embed"), rope, None).array[0, 5].sum()

    x = np.random.default_rng(1).standard_normal((1, 8, config.embed), np.float32)
    seen = np.abs(gradient(x)[0]).max(1) > 0
    assert seen.tolist() == [False] * 3 + [True] * 3 + [False] * 2


@pytest.mark.slow
def test_biases_of_both_layers_move_towards_an_even_load():
    config = dataclasses.replace(SMALL, routing=Routing(bias_rate=0.1))
    tokens = named(jnp.arange(24, dtype=jnp.int32).reshape(2, 12), "batch pos")

    @jax.jit
    def balanced(key, tokens):
        model = config.init(key=key)
        load = model(tokens).measured.load
        return load, model.balanced(load).layers.block

    load, pair = balanced(jax.random.key(0), tokens)
    assert load.shape == {"layers": 1, "pair": 2, "routes": 4} and load.sum().array == 2 * 24 * 2
    for i, block in enumerate((pair.near, pair.far)):
        own = load["pair", i].array
        np.testing.assert_allclose(block.mlp.bias.array, 0.1 * np.sign(own.mean() - own))


def test_stages_share_pairs():
    assert stacked(RELEASED) == 12 and abstract(SMALL).layers.axis.size == 1
    with pytest.raises(UserError, match=r"come in pairs.*\n  seen:  layers=3\n.*\n  fix:   use an even number, 4"):
        dataclasses.replace(SMALL, layers=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": ["full_attention"] * 2},
            "The layers of a GPT-OSS must alternate between sliding-window and full attention",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "seen:  quantization_config: mxfp4"),
        ({"attention_bias": False}, "A gpt_oss must have attention_bias True here."),
        ({"sliding_window": ...}, "seen:  no sliding_window"),
    ],
)
def test_refused_folders(fields, message, tmp_path):
    hub = FAMILIES["gpt_oss"].to_config_json(SMALL, positions=POSITIONS, dtype="float32") | fields
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in hub.items() if v is not ...}))
    with pytest.raises(UserError) as error:
        Folder(tmp_path, FAMILIES)
    assert message in str(error.value)
