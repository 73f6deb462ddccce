"""What only DeepSeek-V3 has: latents, first layers without experts, counts of the released model, refused folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS, POSITIONS
from trellis.errors import UserError
from trellis.hub import Folder, write_folder
from trellis.hub.tensors import TensorFile
from trellis.models import FAMILIES, DeepseekV3Config, Routing, YarnScaling
from trellis.models.protocol import stacked
from trellis.named import named
from trellis.nn import Precision, parameters
from trellis.train.flops import flops_per_token, matmul_parameters

SMALL = CONFIGS["deepseek_v3"]
RELEASED = DeepseekV3Config(
    vocab=129_280, embed=7168, layers=61, dense_layers=3, heads=128, q_latent=1536, kv_latent=512, nope_dim=128,
    rope_dim=64, value_dim=128, dense_mlp=18_432, mlp=2048, shared_mlp=2048, experts=256, experts_per_token=8,
    rope_theta=10_000.0, tie_embeddings=False,
    rope_scaling=YarnScaling(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
    routing=Routing(scores="sigmoid", scale=2.5, groups=8, groups_per_token=4, bias_rate=0.001),
)  # fmt: skip


def abstract(config):
    return jax.eval_shape(lambda: config.init(key=jax.random.key(0)))


@pytest.mark.slow
def test_counts_of_the_released_model():
    """Parameters, and FLOPs of a token, by hand."""
    model, embed = abstract(RELEASED), 7168
    attention = embed * 1536 + 1536 * 128 * 192 + embed * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * embed
    assert attention == 187_105_280
    norms = 1536 + 512 + 2 * embed
    expert, dense, tables = 3 * embed * 2048, 3 * embed * 18_432, 129_280 * embed
    mixture = 257 * expert + embed * 256 + 256  # a shared expert, the router, and the biases that pick
    total = 61 * (attention + norms) + 3 * dense + 58 * mixture + 2 * tables + embed
    assert sum(p.size for p in parameters(model)) == total == 671_026_419_200
    met = 61 * attention + 3 * dense + 58 * (9 * expert + embed * 256) + tables
    assert matmul_parameters(model) == met and 36e9 < met < 37e9
    # Scores are 192 wide, what they weigh 128; a query sees half of the keys.
    assert flops_per_token(model, 4096) == 6 * met + 6 * 61 * 128 * (192 + 128) * 4096 / 2


def test_scores_have_the_rest_of_yarns_growth():
    model = abstract(RELEASED)
    assert model.layers.block.attention.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert RELEASED.rope_scaling.magnitude == 1


@pytest.mark.slow
def test_stages_share_the_mixtures():
    model = abstract(SMALL)
    assert stacked(SMALL) == model.layers.axis.size == 2 and model.first_layers.axis.name == "dense_layers"
    tokens = named(jnp.zeros((2, 4), jnp.int32), "batch pos")
    measured = jax.eval_shape(lambda model: model(tokens).measured, model)
    assert measured.load.shape == {"layers": 2, "routes": 8}
    load = named(jnp.arange(16.0).reshape(2, 8), "layers routes")
    moved = jax.jit(lambda: SMALL.init(key=jax.random.key(0)).balanced(load).layers.block.mlp.bias)().array
    np.testing.assert_allclose(moved, [[0.001] * 4 + [-0.001] * 4] * 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dense_layers": 3},
            "`dense_layers` must be 0 or more and less than `layers`, so that some blocks have experts.\n"
            "  seen:  dense_layers=3, layers=3",
        ),
        (
            {"rope_dim": 5},
            "`rope_dim` must be even, since rotary positions rotate pairs of elements.\n  seen:  rope_dim=5",
        ),
        ({"kv_latent": 0}, "A model's sizes must be positive.\n  seen:  kv_latent=0"),
    ],
)
def test_refused_sizes(fields, message):
    with pytest.raises(UserError) as error:
        dataclasses.replace(SMALL, **fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_shared_experts": 0}, "A model's sizes must be positive.\n  seen:  shared_mlp=0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "float16, float32 or float64.\n  seen:  quanti"),
        ({"rope_interleave": False}, "A deepseek_v3 must have rope_interleave True here."),
        ({"n_group": ...}, "seen:  no n_group"),
    ],
)
def test_refused_folders(fields, message, tmp_path):
    hub = FAMILIES["deepseek_v3"].to_config_json(SMALL, positions=POSITIONS, dtype="float32") | fields
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in hub.items() if v is not ...}))
    with pytest.raises(UserError) as error:
        Folder(tmp_path, FAMILIES)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routing": Routing()}, "seen:  routing.scores=softmax"),
        ({"routing": Routing(scores="sigmoid")}, "seen:  routing.bias_rate=null"),
        ({"routing": dataclasses.replace(SMALL.routing, capacity=1.0)}, "seen:  routing.capacity=1.0"),
        ({"shared_mlp": 25}, "seen:  shared_mlp=25"),
    ],
)
def test_refused_exports(fields, message):
    with pytest.raises(UserError) as error:
        FAMILIES["deepseek_v3"].to_config_json(dataclasses.replace(SMALL, **fields), positions=8, dtype="float32")
    assert message in str(error.value)


@pytest.mark.slow
def test_biases_that_pick_experts_are_used_as_they_are_kept():
    """At 14, as some of the released model are, neighbours in bfloat16 are 0.06 apart, and probabilities closer."""
    model = jax.tree.map(lambda x: jnp.full(x.shape, 14.03, x.dtype), abstract(SMALL))
    picking = {p.path for p in parameters(model) if p.role == "picking"}
    assert picking == {"layers.block.mlp.bias"}

    def kinds(**exceptions):
        used = Precision(compute="bfloat16", exceptions=exceptions).in_use(model)
        return {p.path: str(p.leaf.dtype) for p in parameters(used)}

    assert {path for path, kind in kinds().items() if kind == "float32"} == picking
    assert {path for path, kind in kinds(bias="float16").items() if kind == "float16"} == picking


@pytest.mark.slow
def test_an_export_writes_biases_that_pick_experts_in_float32(tmp_path):
    """As the released folder has them, and as `transformers` keeps them, whatever the others' type."""
    model = jax.tree.map(lambda x: np.full(x.shape, 14.03, np.float32), abstract(SMALL))
    read = lambda p, at: p.leaf.array[at]
    write_folder(tmp_path, FAMILIES["deepseek_v3"], SMALL, model, read, dtype="bfloat16", positions=POSITIONS)
    kinds = {name: kind for name, (kind, *_) in TensorFile(tmp_path / "model.safetensors").entries.items()}
    wide = {name for name, kind in kinds.items() if kind == "F32"}
    assert wide == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}
    back = Folder(tmp_path, FAMILIES).load(abstract(SMALL))
    assert (back.layers.block.mlp.bias.array == np.float32(14.03)).all()
