"""Totals of validation sets, and the bytes that tokens stand for."""

import math

import numpy as np
import pytest

from tests.data.corpora import make_store, random_texts
from trellis.data import Batches, Totals, count_bytes, summarize
from trellis.data.foreign import convert
from trellis.data.store import Store

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
    assert math.isnan(counted(Store.open(tmp_path / "x.bin")))


def test_bits_per_byte():
    total = Totals(nats=math.log(2) * 80, tokens=20, text_bytes=40) + Totals(0.0, 0.0, 0.0)
    assert total.bits_per_byte == pytest.approx(2.0) and total.loss == pytest.approx(math.log(2) * 4)
    assert math.isnan(Totals().loss) and math.isnan(Totals().bits_per_byte)


def test_micro_and_macro():
    found = summarize({"a": Totals(10.0, 10.0, 20.0), "b": Totals(90.0, 30.0, 60.0)})
    assert found["macro_loss"] == 2.0 and found["micro_loss"] == 2.5
    assert found["a/bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert found["micro_bits_per_byte"] == pytest.approx(100 / 80 / math.log(2))
    assert found["macro_bits_per_byte"] == pytest.approx((0.5 + 1.5) / 2 / math.log(2))
