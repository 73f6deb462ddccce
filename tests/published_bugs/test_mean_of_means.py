"""15. stanford-crfm/levanter, `grad_accum`: the means of microbatches are averaged.

Where microbatches (or devices) have different numbers of counted tokens, a token's weight depends on its neighbours.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis import f32
from trellis.data.batch import Batch
from trellis.models.llama import Llama, LlamaConfig
from trellis.train.step import StepOptions, loss_and_gradients

# Most tokens of the first rows are masked out.
MASK = np.tril(np.ones((8, 8), np.float32))
LOSS = np.arange(64, dtype=np.float32).reshape(8, 8)
MEAN = np.sum(LOSS * MASK) / np.sum(MASK)


@pytest.fixture
def sliced(mesh):
    sharding = jax.sharding.NamedSharding(mesh, tr.parse("batch/data pos").spec)
    return jax.device_put(LOSS, sharding), jax.device_put(MASK, sharding)


def test_15_manual_a_mean_per_device_is_refused(sliced):
    @tr.shard_map
    def mean_of_means(loss: f32["batch/data pos"], mask: f32["batch/data pos"]) -> f32[""]:
        total = tr.einsum("batch/data pos, batch/data pos -> +data", loss, mask)
        count = tr.einsum("batch/data pos -> +data", mask)
        return tr.reshard("+data -> ", total / count)

    message = "got div of a sum pending along data, in `mean_of_means`"
    with pytest.raises(tr.PendingSumError, match=re.escape(message)):
        mean_of_means(*sliced)


def test_15_manual_a_mean_per_microbatch_is_refused(sliced):
    @tr.shard_map
    def mean_of_means(loss: f32["batch/data pos"], mask: f32["batch/data pos"]) -> f32[""]:
        def microbatch(carry, rows):
            loss, mask = rows
            total = tr.einsum("pos, pos -> ", loss, mask)
            return carry + total / jnp.sum(mask), None

        start = jax.lax.pcast(jnp.float32(0), "data", to="varying")
        total, _ = jax.lax.scan(microbatch, start, (loss, mask))
        return total / loss.shape[0]

    # Each device has its own mean, and the result says that all have the same.
    message = "which differs along data, for '', in result of `mean_of_means`"
    with pytest.raises(tr.TypeMismatch, match=re.escape(message)):
        mean_of_means(*sliced)


def test_15_manual_sums_are_settled_and_divided_once(sliced):
    @tr.shard_map
    def mean(loss: f32["batch/data pos"], mask: f32["batch/data pos"]) -> f32[""]:
        total = tr.einsum("batch/data pos, batch/data pos -> +data", loss, mask)
        count = tr.einsum("batch/data pos -> +data", mask)
        return tr.reshard("+data -> ", total) / tr.reshard("+data -> ", count)

    np.testing.assert_allclose(mean(*sliced), MEAN, rtol=1e-6)


def test_15_explicit_a_mean_is_of_the_whole_array(mesh, sliced):
    with tr.Layout(mesh, compute={"batch": "data"}):
        loss, mask = (tr.named(a, "batch pos") for a in sliced)
        np.testing.assert_allclose(
            jax.jit(lambda loss, mask: loss.mean(where=mask > 0).array)(loss, mask), MEAN, rtol=1e-6
        )


CONFIG = LlamaConfig(
    vocab=16, embed=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=8, rope_theta=1e4, tie_embeddings=True
)


def batch():
    """Rows with more and more counted tokens, so that microbatches have different numbers of them."""
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 16, (8, 9)), jnp.int32)
    return Batch(tokens=ids[:, :-1], targets=ids[:, 1:], loss_mask=jnp.asarray(MASK)).named()


@pytest.mark.slow
def test_15_explicit_the_train_step_divides_by_the_tokens_of_the_whole_batch(mesh):
    start = jax.jit(lambda key: Llama.init(CONFIG, key=key))(jax.random.key(0))
    one, _, gradient = jax.jit(lambda model, data: loss_and_gradients(model, data, StepOptions()))(start, batch())
    with tr.Layout(mesh, compute={"batch": "data"}):
        options = StepOptions(microbatches=2)
        model, data = tr.shard(start, "params"), tr.shard(batch())
        sums, _, got = jax.jit(lambda model, data: loss_and_gradients(model, data, options))(model, data)
    np.testing.assert_allclose(sums.tokens, np.sum(MASK))
    np.testing.assert_allclose(sums.total, one.total, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), got, gradient)
