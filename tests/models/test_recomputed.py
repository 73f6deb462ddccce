"""What is recomputed of layers that are stacked in groups: one of them at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.models.small import CONFIGS
from trellis import Keep, grad, named
from trellis.plan import quick_plan, target
from trellis.recipes import load_run

# Gemma 3 has a layer, then two groups of two; GPT-OSS a pair.
GROUPED = pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])


def gradient(tokens, policy):
    loss = lambda model: (model(tokens, policy=policy).hidden.astype(jnp.float32) ** 2).mean()
    return grad(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [Keep(), Keep(names=("attention",)), Keep(products=True)], ids=["full", "named", "dots"]
)
@GROUPED
def test_gradients_are_those_of_a_model_that_keeps_everything(family, policy):
    model = CONFIGS[family].init(key=jax.random.key(0))
    tokens = named(jax.random.randint(jax.random.key(1), (2, 16), 0, CONFIGS[family].vocab), "batch pos")
    found, wanted = (jax.jit(gradient(tokens, kept))(model) for kept in (policy, None))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "expected"), [("gemma3", (3, 1, 2)), ("gpt_oss", (2, 2, 0))])
def test_each_layer_is_recomputed_by_itself_and_fenced_where_layers_are_written_out(family, expected):
    """A stack of one is written out everywhere; the two layers of a group are traced once for all groups."""

    def traced(platform):
        device = AbstractDevice(platform, None, platform)
        mesh = AbstractMesh((2,), ("data",), (AxisType.Explicit,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            model = jax.eval_shape(lambda: CONFIGS[family].init(key=jax.random.key(0)))
            place = NamedSharding(mesh, P("data"))
            tokens = named(jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=place), "batch pos")
            text = str(jax.make_jaxpr(lambda model, tokens: gradient(tokens, Keep())(model))(model, tokens))
        return text.count("prevent_cse=True"), text.count("prevent_cse=False")

    (fenced, plain), (in_loop, more) = traced("cuda"), traced("tpu")
    assert (fenced, in_loop, more - plain) == expected


@pytest.mark.slow
def test_a_group_of_six_takes_little_more_memory_than_single_blocks():
    sizes = {
        "model.family": "gemma3", "model.layers": "12", "model.window": "512", "model.query_scale": "128",
        "remat.policy": "full", "layout.preset": "fsdp", "mesh.data": "8",
    }  # fmt: skip
    peaks = {}
    for every in (1, 6):
        run = load_run("llama_540m", sizes | {"model.global_every": str(every)})
        peaks[every] = quick_plan(run, target("v5e:2x4")).memory.peak
    assert peaks[6] < 1.1 * peaks[1]
