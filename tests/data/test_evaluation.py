"""The bytes that the tokens of a validation set stand for."""

import math

import numpy as np
import pytest

from tests.data.corpora import make_store, random_texts
from trellis.data import Batches, count_bytes, open_store
from trellis.data.store.opening import convert

TEXTS = random_texts(np.random.default_rng(2), 40)
SIZE = sum(len(text.encode()) for text in TEXTS)


def counted(store, **options):
    batches = Batches(store, sequence_length=32, batch_size=4, shuffle=False, max_epochs=1, pad_last=True, **options)
    return sum(count_bytes(store, batches.batch(step)) for step in range(batches.num_steps))


@pytest.mark.parametrize("packing", ["chunk", "best_fit"])
@pytest.mark.parametrize("tokenizer", [{}, {"use_bytes": False, "train_bpe": 320}])
def test_bytes_are_counted_exactly(tmp_path, packing, tokenizer):
    store = make_store(tmp_path, TEXTS, **tokenizer)
    assert counted(store, packing=packing) == SIZE
    assert store.text_bytes == SIZE


def test_without_a_tokenizer_the_average_stands_in(tmp_path):
    store = make_store(tmp_path, TEXTS)
    convert(store, str(tmp_path / "x.bin"), to="megatron")
    assert math.isnan(counted(open_store(tmp_path / "x.bin")))
