"""5. NVIDIA/Megatron-LM issue 7452: a checkpoint's layers are counted from each pipeline stage's first.

Restored on another number of stages, a layer got the parameters of another one.
"""

import jax
import numpy as np
import pytest

import trellis as tr
from trellis import Axis
from trellis.checkpoints.checkpoints import Checkpoints

LAYERS, EMBED, MLP = Axis("layers", 8), Axis("embed", 4), Axis("mlp", 6)


def stages(count: int) -> tr.Layout:
    mesh = tr.make_mesh(jax.devices()[: 2 * count], stage=count, model=2)
    return tr.Layout(mesh, params={"layers": "stage", "mlp": "model"})


def numbered():
    """Every element is its place among all: one in a wrong layer shows."""
    size = LAYERS.size * EMBED.size * MLP.size
    whole = np.arange(size, dtype=np.float32).reshape(LAYERS.size, EMBED.size, MLP.size)
    return tr.named(jax.numpy.asarray(whole), "layers embed mlp")


@pytest.mark.parametrize("after", [1, 2])
def test_5_a_layer_has_one_number_on_any_number_of_stages(tmp_path, after):
    with stages(4):
        saved = tr.shard({"weight": numbered()}, "params")
    with stages(after):
        like = tr.shard({"weight": numbered() * 0.0}, "params")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.wait()
        found = checkpoints.restore(like).state["weight"]
    assert found.array.sharding.spec[0] == (None if after == 1 else "stage")
    np.testing.assert_array_equal(jax.device_get(found.array), numbered().array)
    last = found.array.addressable_shards[-1]
    first = LAYERS.size - LAYERS.size // after
    np.testing.assert_array_equal(last.data, np.asarray(numbered().array)[first:, :, 3:])
