"""A step whose layers are a loop has the loss and the gradients of one whose layers are written out."""

import jax
import numpy as np
import optax
import pytest

from tests.equivalence.test_models import assert_gradients_near
from tests.equivalence.test_steps import assembled, batch, first_state, put
from trellis.data.batch import Batch


def first_step(made, family):
    """The loss, and the mean of gradients that the optimizer keeps."""
    with made.layout:
        data = Batch(**jax.device_put(batch(0), made.batch_sharding))
        state, metrics = made.step(put(first_state(family), made.abstract), data)
    return float(metrics["loss"]), jax.device_get(optax.tree.get(state.optimizer, "mu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "microbatches", "policy"),
    [("mixtral", "fsdp_tensor", 4, "saved"), ("qwen3", "single", 1, "full"), ("gpt2", "context", 1, "none")],
)
def test_layers_in_a_loop_and_written_out(family, layout, microbatches, policy):
    looped, written = (
        first_step(assembled(family, layout, microbatches, policy, scan_layers=scanned), family)
        for scanned in (True, False)
    )
    np.testing.assert_allclose(written[0], looped[0], rtol=2e-6)
    assert_gradients_near(written[1], looped[1])
