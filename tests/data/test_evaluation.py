"""The bytes that the tokens of a validation set stand for."""

import math

import numpy as np
import pytest

from tests.data.corpora import make_store, random_texts
from trellis.data import Batches, Tokenizer, count_bytes, open_store, train_bpe
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


@pytest.mark.parametrize("kind", ["WordPiece", "ends of words"])
def test_tokens_that_are_not_the_text_count_as_the_average(tmp_path, kind):
    """Their lengths do not add up to the text's: spaces are dropped, or marks stand in them."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers

    if kind == "WordPiece":
        inner = Inner(models.WordPiece({"?": 0, "to": 1, "##gether": 2, "be": 3}, unk_token="?"))
    else:
        inner = Inner(models.BPE({"?": 0, "be</w>": 1, "to": 2, "gether</w>": 3}, [], end_of_word_suffix="</w>"))
        inner.model.ignore_merges = True
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["</s>"])
    options = {"use_bytes": False, "tokenizer": Tokenizer(inner.to_str())}
    store = make_store(tmp_path, ["be together", "together be be"], **options)
    assert not store.tokenizer().counts_bytes
    assert counted(store) == pytest.approx(store.text_bytes)


@pytest.mark.parametrize(
    ("change", "counts"),
    [("nothing", True), ("NFC", True), ("NFKC", False), ("strips accents", False), ("knows few", False)],
)
def test_tokens_count_their_own_bytes_only_if_these_are_the_texts(tmp_path, change, counts):
    """Else they count as the average, which is right for a whole store."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, normalizers, pre_tokenizers

    without_accents = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    made = {"NFC": normalizers.NFC(), "NFKC": normalizers.NFKC(), "strips accents": without_accents}
    if change == "knows few":
        inner = Inner(models.Unigram([("<unk>", 0.0), ("t", -1.0), ("o", -1.0)], unk_id=0))
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.add_special_tokens(["</s>"])
    else:
        inner = Inner.from_str(train_bpe([TEXTS], 300).json)
        if change in made:
            inner.normalizer = made[change]
    options = {"use_bytes": False, "tokenizer": Tokenizer(inner.to_str())}
    store = make_store(tmp_path, ["naïve Ｗ ﬁ ☃ and so on"] * 9, **options)
    assert store.tokenizer().counts_bytes == counts
    assert counted(store) == pytest.approx(store.text_bytes)


def test_the_space_that_is_put_before_a_text_is_not_counted(tmp_path):
    from tokenizers import Tokenizer as Inner
    from tokenizers import pre_tokenizers

    inner = Inner.from_str(train_bpe([TEXTS], 300).json)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    store = make_store(tmp_path, TEXTS, use_bytes=False, tokenizer=Tokenizer(inner.to_str()))
    assert store.tokenizer().counts_bytes
    assert counted(store) == counted(store, packing="best_fit") == SIZE
