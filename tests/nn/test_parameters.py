"""What a parameter is for is said by the type of its field, in every family, and counted by that."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import trellis as tr
from tests.models.small import CONFIGS
from trellis import nn
from trellis.named import is_named
from trellis.named.blocks import Blocks
from trellis.nn import Precision
from trellis.nn.parameters import Bias, Role, Scale, Weight, parameters
from trellis.optim import AdamW, Constant, Muon, decayed, make_optimizer
from trellis.optim.narrow import in_eight_bits, narrow_parts
from trellis.train.flops import matmul_parameters


def abstract(name):
    return jax.eval_shape(lambda: CONFIGS[name].init(key=jax.random.key(0), vocab_multiple=8))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_every_family_says_what_it_is_for(name):
    found = {p.path: p for p in parameters(abstract(name))}
    assert not [path for path, p in found.items() if p.declared is None]
    for path, p in found.items():  # who reads a model would expect no other
        last = path.split(".")[-1]
        assert (p.role == Role.SCALE) == (last == "scale")
        added = last.endswith("bias") or last == "sinks" or ".biases." in path
        assert (p.role in (Role.BIAS, Role.PICKING)) == added
        assert (p.role == Role.PICKING) == path.endswith(".mlp.bias")
        assert (p.role == Role.TABLE) == (last in ("embedding", "positions"))


def products(c) -> dict[str, int]:
    """Parameters of a block that multiply activations, family by family, by hand."""
    if c.family in ("gpt2", "gptj"):
        return {"attention": 4 * c.embed * c.embed, "mlp": 2 * c.embed * c.mlp}
    if c.family == "deepseek_v3":
        down = c.embed * (c.q_latent + c.kv_latent + c.rope_dim)
        up = c.heads * (c.q_latent * (c.nope_dim + c.rope_dim) + c.kv_latent * (c.nope_dim + c.value_dim))
        experts = 3 * c.embed * (c.experts_per_token * c.mlp + c.shared_mlp) + c.embed * c.experts
        mlp = experts * (c.layers - c.dense_layers) + 3 * c.embed * c.dense_mlp * c.dense_layers
        return {"attention": down + up + c.heads * c.value_dim * c.embed, "mlp": mlp / c.layers}
    attention = 2 * c.embed * c.head_dim * (c.heads + c.kv_heads)
    if c.family in ("mixtral", "qwen3_moe", "gpt_oss"):
        return {"attention": attention, "mlp": c.experts_per_token * 3 * c.embed * c.mlp, "router": c.embed * c.experts}
    return {"attention": attention, "mlp": 3 * c.embed * c.mlp}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_counts_as_work(name):
    """Neither tables of positions nor biases, whatever their rank, nor a padded vocabulary's rows."""
    config = CONFIGS[name]
    assert matmul_parameters(abstract(name)) == config.layers * sum(products(config).values()) + (
        config.vocab * config.embed
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_biases_and_scales_are_never_decayed(name):
    model = abstract(name)
    chosen = jax.tree.leaves(decayed(model, ()))
    for p, decays in zip(parameters(model), chosen, strict=True):
        assert decays == (p.role in (Role.WEIGHT, Role.TABLE)), p.path


class Mixed(eqx.Module):
    """Annotations that are strings, optional, in lists; one field that says nothing."""

    weights: list[Weight]
    shift: Bias | None
    by_name: dict[str, Scale]
    plain: tr.NamedArray
    vector: jax.Array


def test_roles_are_found_in_optional_fields_lists_and_strings():
    square = tr.ones({"rows": 2, "columns": 2})
    model = {"inner": Mixed([square, square], square, {"a": square}, square, jnp.ones(2))}
    found = {p.path: (p.declared, p.role.value) for p in parameters(model)}
    assert found == {
        "inner.weights.0": (Role.WEIGHT, "weight"),
        "inner.weights.1": (Role.WEIGHT, "weight"),
        "inner.shift": (Role.BIAS, "bias"),
        "inner.by_name.a": (Role.SCALE, "scale"),
        "inner.plain": (None, "weight"),
        "inner.vector": (None, "bias"),
    }
    assert [p.path for p in parameters(Mixed([], None, {}, square, jnp.ones(2)))] == ["plain", "vector"]


def test_layers_and_experts_do_not_make_a_weight():
    both = {"a": tr.ones({"layers": 2, "experts": 3, "embed": 4}), "b": tr.ones({"layers": 2, "embed": 3, "mlp": 4})}
    assert [p.role.value for p in parameters(both)] == ["bias", "weight"]


def test_precision_and_moments_go_by_parts_of_names_and_by_axes():
    policy = Precision(exceptions={"experts": "float32", "u": "float16"}, moments={"experts": "mxfp8"})
    model = {"gate": tr.ones({"experts": 2, "embed": 4, "mlp": 4}), "up": tr.ones({"embed": 4, "mlp": 4})}
    assert {name: str(x.dtype) for name, x in policy.in_use(model).items()} == {"gate": "float32", "up": "float16"}
    assert [policy.moments_of(p) for p in parameters(model)] == ["mxfp8", None]
    rule = in_eight_bits(optax.scale_by_adam(), lambda p: policy.moments_of(p) is not None)
    kept = jax.eval_shape(rule.init, model)
    assert narrow_parts(kept, {"experts": "mxfp8", "gate": "mxfp8", "up": "mxfp8"}) == {"experts", "gate"}


@pytest.mark.parametrize("rule", [AdamW(learning_rate=1.0), Muon(learning_rate=1.0)], ids=lambda rule: rule.kind)
def test_moments_of_biases_are_kept_whole_whatever_the_rule(rule):
    """A bias with two axes is none by its shape: Muon keeps it in a group, whose fields say nothing."""
    heads = tr.ones({"layers": 2, "heads": 4, "head_dim": 32})
    choose = lambda p: Precision(moments={"heads": "mxfp8"}).moments_of(p) is not None
    optimizer = make_optimizer(rule, Constant(warmup_steps=0), steps=1, narrow=choose)
    model = Mixed([tr.ones({"embed": 4, "heads": 4, "head_dim": 32})], heads, {}, jnp.ones(2), jnp.ones(2))
    kept = jax.eval_shape(optimizer.init, model)
    found = jax.tree.leaves(kept, is_leaf=lambda x: isinstance(x, Blocks) or is_named(x))
    assert [x.shape for x in found if is_named(x)] == [heads.shape] * 2
    blocks = [x.values.shape for x in found if isinstance(x, Blocks)]
    assert blocks and all("embed" in shape for shape in blocks)


@pytest.mark.slow
def test_a_weight_has_the_names_that_its_product_sums_over():
    key, axes = jax.random.key(0), {"embed": 64, "mlp": 16}
    for over in ("embed", tr.Axis("embed", 64), ("embed",)):
        assert abs(nn.weight(key, axes, over=over).array.std() - 1 / 8) < 0.02
    for over in ("emb", ("embed", "heads"), ()):
        with pytest.raises(tr.NamesError, match="sums over, got over=.* for axes embed=64, mlp=16, in weight: name"):
            nn.weight(key, axes, over=over)
    assert nn.weight(key, {"embed": 0, "mlp": 16}, over="embed").size == 0


@pytest.mark.slow
def test_a_layer_norm_over_several_names():
    x = tr.random.normal(jax.random.key(0), {"pos": 2, "heads": 3, "head_dim": 4}) * 3.0 + 1.0
    norm = nn.LayerNorm.init((tr.Axis("heads", 3), tr.Axis("head_dim", 4)), 1e-6)
    rows = x.array.reshape(2, -1)
    wanted = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
    np.testing.assert_allclose(norm(x).array.reshape(2, -1), wanted, atol=1e-4)
