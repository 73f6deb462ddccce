"""14. pytorch/torchtitan pull requests 811, 816: the loader's position was lost when the number of ranks changed.

Each rank had a position of its own. With more ranks the new ones had none; with fewer, some were dropped.
"""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.data.corpora import make_store, random_texts
from trellis.data import Batches, Loader


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("position"), random_texts(np.random.default_rng(0), 60))
    return Batches(store, sequence_length=16, batch_size=8, seed=3)


def read(batches, devices: int, start: int, stop: int) -> list[np.ndarray]:
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    with Loader(batches, NamedSharding(mesh, P("data")), start_step=start) as loader:
        return [np.asarray(batch.tokens) for (_, batch), _ in zip(loader, range(start, stop))]


@pytest.mark.parametrize("sizes", [(2, 8, 4), (8, 1, 2)])
def test_14_rows_come_in_one_order_whatever_the_devices(batches, sizes):
    """The position is the step's number, and a batch's rows follow from it and the seed alone."""
    whole = read(batches, 4, 0, 9)
    parts = [rows for i, devices in enumerate(sizes) for rows in read(batches, devices, 3 * i, 3 * i + 3)]
    assert len({rows.tobytes() for rows in whole}) == 9
    for row, wanted in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(row, wanted)
