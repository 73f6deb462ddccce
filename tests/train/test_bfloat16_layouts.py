"""Steps in bfloat16 on several layouts, against float32 on one device, on a text in which one token is everywhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small import CONFIGS
from trellis.data import Batch
from trellis.nn import Precision
from trellis.recipes import load_run
from trellis.train import assemble
from trellis.train.step import StepOptions, loss_and_gradients

SMALL = {
    "model.vocab": "64", "model.embed": "32", "model.layers": "2", "model.heads": "4", "model.kv_heads": "2",
    "model.head_dim": "8", "model.mlp": "48", "data.sequence_length": "256", "batch_size": "8",
    "data.mask_documents": "false",
}  # fmt: skip
LAYOUTS = {
    "one device": (1, {"layout.preset": "single"}),
    "fsdp": (4, {"layout.preset": "fsdp", "mesh.data": "4"}),
    "tensor": (4, {"layout.preset": "auto", "mesh.data": "2", "mesh.model": "2"}),
    "microbatches": (2, {"layout.preset": "fsdp", "mesh.data": "2", "microbatches": "2"}),
    "stages": (4, {"mesh.data": "2", "mesh.stage": "2", "microbatches": "2", "layout.compute": "{layers: stage}"}),
}


@functools.cache
def gradients_of(compute: str, layout: str) -> tuple[float, np.ndarray]:
    """The loss of a step, and AdamW's first average of the table after it, which is a share of the gradient."""
    devices, options = LAYOUTS[layout]
    made = assemble(load_run("tiny", SMALL | options | {"precision.compute": compute}), jax.devices()[:devices])
    rows = np.full((8, 257), 7, np.int32)
    rows[:, ::16] = np.random.default_rng(0).integers(0, 64, rows[:, ::16].shape)
    arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "loss_mask": np.ones((8, 256), np.float32)}
    with made.layout:
        state, metrics = made.step(made.init(), Batch(**jax.device_put(arrays, made.batch_sharding)))
        return float(metrics["loss"]), np.asarray(state.optimizer[1].mu.embedding.array)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_in_bfloat16(layout):
    right, wide = gradients_of("float32", "one device")
    loss, narrow = gradients_of("bfloat16", layout)
    assert loss == pytest.approx(right, rel=0.01)
    size = lambda rows: np.linalg.norm(rows, axis=-1)
    assert (size(narrow - wide)[size(wide) > 0] < 0.05 * size(wide).max()).all()
    assert size(narrow)[7] == pytest.approx(size(wide)[7], rel=0.03)  # the row that is read 1,900 times


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_tokens_that_are_a_small_part_of_a_float16_step_have_a_gradient(microbatches):
    """Each of a million tokens counts a millionth, where float16 ends: half of the gradient was lost."""
    config = dataclasses.replace(CONFIGS["llama3"], layers=1, tie_embeddings=False)
    model = config.init(key=jax.random.key(0), vocab_multiple=8)
    tokens = np.random.default_rng(0).integers(1, 16, (12, 17)).astype(np.int32)
    mask = np.ones((12, 16), np.float32)
    tokens[:8], mask[:8] = 0, 1 << 13  # each counts as 8,192, in rows of their own: a million together
    batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_mask=mask)

    def rows(compute):
        options = StepOptions(precision=Precision(compute=compute), microbatches=microbatches)
        gradients = jax.jit(lambda m: loss_and_gradients(m, batch.named(), options)[2])(model)
        return np.asarray(gradients.embedding["vocab", 1:16].array)

    found, right = rows("float16"), rows("float32")
    assert found.dtype == jnp.float32
    assert 0 < np.linalg.norm(found - right) < 0.05 * np.linalg.norm(right)
