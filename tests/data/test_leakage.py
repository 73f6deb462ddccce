"""Segment ids and positions of a batch reach a model's attention: no document sees another one."""

import functools

import jax
import numpy as np
import pytest

from tests.data.corpora import make_store
from trellis.data import Batches
from trellis.models import LlamaConfig
from trellis.named import named

# every document has letters of its own, so a gradient says which document it came from
TEXTS = ["abcabcab", "dede", "fghfghfghfghfgh", "ijklijkl", "mnmnmnmnmnmn", "opqr"]
CONFIG = LlamaConfig(vocab=257, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, rope_theta=1e4,
                     tie_embeddings=False)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("leakage"), TEXTS)


@functools.cache
def model():
    return CONFIG.init(key=jax.random.key(0))


def fields_of(batch):
    return {name: getattr(batch, name) for name in ("tokens", "segment_ids", "positions")}


@functools.partial(jax.jit, static_argnames="masked")
def hidden(model, fields, *, masked=True):
    """f32[batch pos embed]"""
    given = {name: named(array, "batch pos") for name, array in fields.items() if masked or name != "segment_ids"}
    return model(**given).hidden.array


@functools.partial(jax.jit, static_argnames="masked")
def reached(model, fields, weights, *, masked):
    """How much each id's embedding moves the hidden states that `weights` picks: f32[vocab]."""
    loss = lambda model: (hidden(model, fields, masked=masked) ** 2 * weights[..., None]).sum()
    return abs(jax.grad(loss)(model).embedding.array).max(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
def test_no_gradient_crosses_documents(store, packing):
    batch = Batches(store, sequence_length=20, batch_size=3, packing=packing, shuffle=False).batch(0)
    assert (batch.segment_ids.max(axis=1) > 1).any()

    fields = fields_of(batch)

    def ids_reached(row, segment, masked):
        weights = ((batch.segment_ids == segment) & (np.arange(3) == row)[:, None]).astype(np.float32)
        return set(np.flatnonzero(reached(model(), fields, weights, masked=masked)).tolist())

    leaks = 0
    for row in range(3):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            own = set(batch.tokens[row][batch.segment_ids[row] == segment].tolist())
            assert ids_reached(row, segment, True) == own
            leaks += ids_reached(row, segment, False) != own
    assert leaks > 0  # the control: without segment ids the same gradient does cross


@pytest.mark.slow
def test_a_packed_document_is_as_it_would_be_alone(store):
    """Positions begin anew in each document, so packing changes nothing."""
    packed = Batches(store, sequence_length=24, batch_size=4, packing="best_fit", shuffle=False, max_epochs=1,
                     pad_last=True)  # fmt: skip
    alone = Batches(store, sequence_length=24, batch_size=6, packing="pad", shuffle=False).batch(0)
    outputs = {}
    for row, out in enumerate(np.asarray(hidden(model(), fields_of(alone)))):
        real = alone.segment_ids[row] > 0
        outputs[alone.targets[row][real].tobytes()] = out[real]
    compared = 0
    for step in range(packed.num_steps):
        batch = packed.batch(step)
        out = np.asarray(hidden(model(), fields_of(batch)))
        for row in range(4):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                here = batch.segment_ids[row] == segment
                expected = outputs[batch.targets[row][here].tobytes()]
                assert np.allclose(out[row][here], expected, atol=1e-5)
                compared += 1
    assert compared == len(TEXTS)
