"""A batch of random tokens: the same work as any other, with nothing to read."""

from typing import Any

import jax
import numpy as np

from trellis.data import Batch


def random_batch(made: Any) -> Batch:
    """For what `trellis.train.assemble` made, on its devices: one document a row.

    Args:
        made: an `Assembled`.
    """
    like = made.abstract_batch()
    rows, length = like.shape
    stream = np.random.default_rng(0).integers(0, made.run.model.vocab, (rows, length + 1), dtype=np.int32)
    arrays = {"tokens": stream[:, :-1], "targets": stream[:, 1:], "loss_mask": np.ones((rows, length), np.float32)}
    if like.segment_ids is not None:
        arrays["segment_ids"] = np.ones((rows, length), np.int32)
        arrays["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return Batch(**jax.device_put(arrays, made.batch_sharding))
