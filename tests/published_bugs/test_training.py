"""4, 13 and 15 in a whole train step: what is clipped, and by how much, is the same on every mesh, cut or not.

The vocabulary does not divide over the devices; rows have from one to all of their tokens counted. The update is plain
gradient descent: unlike Adam's it depends on the length of the gradient, so that a wrong norm, which would clip to
another length, moves the parameters.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from tests.models.small import CONFIGS
from trellis.data.batch import Batch
from trellis.named import is_named, named_jit, shard
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.assemble import vocab_multiple
from trellis.train.state import new_state
from trellis.train.step import StepOptions, make_step

ROWS, LENGTH = 16, 16
CONFIG = dataclasses.replace(CONFIGS["llama"], vocab=61)
CLIP = 0.25
OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(1.0))
LAYOUTS = {
    "single": (1, MeshSizes(), 4),
    "fsdp": (4, MeshSizes(), 1),
    "tensor": (4, MeshSizes(data=2, model=2), 4),
    "fsdp_tensor_sequence": (4, MeshSizes(data=2, model=2), 1),
    "hybrid": (8, MeshSizes(replica=2, data=2, model=2), 4),
}


def batch():
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab, (ROWS, LENGTH + 1)).astype(np.int32)
    counted = np.arange(LENGTH) < 1 + np.arange(ROWS)[:, None]
    return Batch(tokens=ids[:, :-1], targets=ids[:, 1:], loss_mask=counted.astype(np.float32)).named()


def step_on(layout: str, count: int, mesh: MeshSizes, microbatches: int):
    """Metrics and parameters after one step."""
    with make_layout(mesh, LayoutChoice(preset=layout), jax.devices()[:count]) as placed:
        init = lambda key: CONFIG.init(key=key, vocab_multiple=vocab_multiple(placed))
        state = new_state(init, OPTIMIZER, seed=0)
        step = named_jit(make_step(OPTIMIZER, StepOptions(microbatches=microbatches)))
        after, metrics = step(state, shard(jax.tree.map(jax.numpy.asarray, batch()), "compute"))
    rows = lambda x: np.asarray(x.array)[: CONFIG.vocab] if "vocab" in x.names else np.asarray(x.array)
    moved = jax.tree.map(lambda a, b: rows(a) - rows(b), after.model, state.model, is_leaf=is_named)
    return {name: float(x) for name, x in metrics.items()}, moved


@functools.cache
def one_device():
    return step_on("single", 1, MeshSizes(), 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_4_13_15_loss_norm_and_clipped_update(layout):
    wanted, wanted_moves = one_device()
    found, moves = step_on(layout, *LAYOUTS[layout])
    assert wanted["grad_norm"] > 2 * CLIP, "it is clipped"
    for measure in ("loss", "grad_norm", "tokens", "accuracy"):
        assert found[measure] == pytest.approx(wanted[measure], rel=1e-5), measure
    norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(moves)))
    assert norm == pytest.approx(CLIP, rel=1e-3)
    for a, b in zip(jax.tree.leaves(moves), jax.tree.leaves(wanted_moves), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * CLIP)
