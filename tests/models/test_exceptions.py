"""Parts of a layer that are computed in another type than the rest (`Precision.exceptions`), in every family."""

import jax
import jax.numpy as jnp
import pytest

import trellis as tr
from tests.models.small import CONFIGS
from trellis import nn
from trellis.nn import Precision, parameters


@pytest.mark.parametrize("family", {type(config): name for name, config in CONFIGS.items()}.values())
def test_any_part_of_a_layer_may_be_computed_in_another_type(family):
    """Hidden states stay in the stream's type, which is that of the table."""
    config, tokens = CONFIGS[family], tr.zeros({"batch": 2, "pos": 8}, "int32")
    made = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    for part in ("attention", "mlp", "bias", "heads", "up"):
        policy = Precision(compute="bfloat16", exceptions={part: "float32"})
        if any(p.matches((part,)) for p in parameters(made)):
            with jax.numpy_dtype_promotion("standard"):  # of biases that are added
                hidden = jax.eval_shape(lambda model, use=policy.in_use: use(model)(tokens).hidden, made)
            assert hidden.dtype == jnp.bfloat16, part


@pytest.mark.slow
def test_a_scale_in_float32_scales_in_float32():
    x = tr.random.normal(jax.random.key(0), {"batch": 8, "embed": 64}).astype("bfloat16")
    scale = 1 + 0.01 * tr.random.normal(jax.random.key(1), {"embed": 64})
    for norm in (nn.RMSNorm(scale, 1e-6), nn.LayerNorm(scale, scale, 1e-6)):
        exact = norm(x.astype("float32")).astype("bfloat16")
        assert norm(x).dtype == jnp.bfloat16 and (norm(x).array == exact.array).mean() == 1
        narrow = jax.tree.map(lambda y: y.astype(jnp.bfloat16), norm)
        assert (narrow(x).array == exact.array).mean() < 0.9


@pytest.mark.slow
def test_a_scale_around_zero_is_as_fine_in_sixteen_bits():
    """Around 1 the next number is 1.0078."""
    x = tr.random.normal(jax.random.key(0), {"batch": 8, "embed": 64}).astype("bfloat16")
    scale = tr.full({"embed": 64}, 0.003)
    exact = nn.RMSNorm(scale, 1e-6, 1.0)(x.astype("float32")).astype("bfloat16")
    found = nn.RMSNorm(scale.astype("bfloat16"), 1e-6, 1.0)(x)
    assert found.dtype == jnp.bfloat16 and (found.array == exact.array).mean() > 0.98
