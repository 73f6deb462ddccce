"""4. NVIDIA/Megatron-LM issue 7452: per-head attention sinks are sliced over the tensor axis, but not marked so.

The clipping norm counted them on one device only, so every gradient was clipped to the wrong length.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32


@pytest.mark.slow
def test_4_manual_the_norm_counts_every_slice(put):
    @tr.shard_map
    def norm(sinks: f32["heads/model"], w: f32["embed mlp"]) -> f32[""]:
        total = tr.einsum("heads/model, heads/model -> +model", sinks, sinks)
        total = tr.all_reduce("+model -> ", total) + tr.einsum("embed mlp, embed mlp -> ", w, w)
        return jnp.sqrt(total)

    sinks, w = put("h/model", 8), put("e m", 3, 4, seed=1)
    want = np.sqrt(np.sum(np.asarray(sinks) ** 2) + np.sum(np.asarray(w) ** 2))
    np.testing.assert_allclose(norm(sinks, w), want, rtol=1e-5)


def test_4_manual_sinks_that_are_not_marked(put):
    @tr.shard_map
    def norm(sinks: f32["heads"]) -> f32[""]:
        return jnp.sqrt(tr.einsum("heads, heads -> ", sinks, sinks))

    message = (
        "an annotation that mentions a mesh axis must match the whole sharding, got f32[8/model] for f32[heads], in "
        'argument `sinks` of `norm`: write reshard("heads/model -> heads", ...) first, or correct the annotation'
    )
    with pytest.raises(tr.TypeMismatch, match=re.escape(message)):
        norm(put("h/model", 8))


@pytest.mark.slow
def test_4_manual_sums_of_slices_that_are_left_alone(put):
    @tr.shard_map
    def pending(sinks: f32["heads/model"]) -> f32[""]:
        return jnp.sqrt(tr.einsum("heads/model, heads/model -> +model", sinks, sinks))

    @tr.shard_map
    def local(sinks: f32["heads/model"]) -> f32[""]:
        return jnp.sqrt(jnp.sum(sinks**2))

    @tr.shard_map
    def added(sinks: f32["heads/model"], w: f32["embed"]) -> f32[""]:
        total = tr.einsum("heads/model, heads/model -> +model", sinks, sinks)
        return jnp.sqrt(tr.reshard("+model -> ", total + tr.einsum("embed, embed -> ", w, w)))

    sinks = put("h/model", 8)
    with pytest.raises(
        tr.PendingSumError, match=r"got sqrt of a sum pending along model, in `pending` .*: write reshard\("
    ):
        pending(sinks)
    message = "a result must match its annotation, got f32[] (one slice; differs over model), which differs along model"
    with pytest.raises(tr.TypeMismatch, match=re.escape(message)):
        local(sinks)
    # Adding what every device holds to a partial sum would count it once per device.
    with pytest.raises(tr.PendingSumError, match="got add of a sum pending along model, in `added`"):
        added(sinks, put("e", 3))


def test_4_explicit_a_norm_is_of_whole_arrays(mesh):
    import optax

    layout = tr.Layout(mesh, params={"heads": "model", "embed": "data"}, compute={"batch": "data", "heads": "model"})
    with layout:
        sinks = tr.shard(tr.named(jnp.arange(8, dtype=jnp.float32), "heads"), "params")
        w = tr.shard(tr.named(jnp.ones((4, 3)), "embed mlp"), "params")
        assert tr.typeof(sinks) == "f32[heads/model=8]"
        assert tr.typeof(w) == "f32[embed/data=4 mlp=3]"
        norm = jax.jit(lambda tree: optax.tree.norm(tree))({"sinks": sinks, "w": w})
    np.testing.assert_allclose(norm, np.sqrt(np.sum(np.arange(8) ** 2) + 12), rtol=1e-6)
