"""Values of other types than the page on data shows: each is refused where it is given, in our words."""

import math

import jax
import numpy as np
import pytest

from tests.data.corpora import make_store
from trellis.data import (
    Batches,
    BinStore,
    FileSource,
    Loader,
    Mixture,
    Shuffle,
    find_files,
    load_tokenizer,
    open_store,
    tokenize,
    train_bpe,
)
from trellis.errors import UserError

ROWS = {"sequence_length": 8, "batch_size": 4}
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("arguments"), ["so much depends upon", "a red wheel barrow"] * 9)


WRONG = {
    "Batches": (
        lambda store, **given: Batches(**({"data": store} | ROWS | given)),
        [("seed", True), ("seed", "0"), ("batch_size", True), ("batch_size", 4.0), ("sequence_length", "8")]
        + [("max_epochs", True), ("pad_last", "no"), ("mask_documents", "no")],
    ),
    "Shuffle": (
        lambda _, **given: Shuffle(**({"block": 4} | given)),
        [("block", "4"), ("block", 4.0), ("window", None), ("window", 2.5), ("in_order", "no")],
    ),
    "Loader": (
        lambda store, **given: Loader(**({"batches": Batches(store, **ROWS), "sharding": HERE} | given)),
        [("batches", "a store"), ("sharding", None), ("start_step", "5"), ("start_step", -1), ("prefetch", 2.0)],
    ),
    "Mixture": (
        lambda store, **given: Mixture(**({"stores": {"a": store}, "weights": {"a": 1}} | given)),
        [("stores", [1]), ("stores", {1: 2}), ("weights", 0.5), ("weights", [0.5]), ("weights", [(0.5, {"a": 1})])]
        + [("weights", [(0, [1.0])]), ("max_epochs", 4), ("validation", None), ("block", "64"), ("block", 64.0)],
    ),
    "open_store": (
        lambda store, **given: open_store(**({"url": store.url} | given)),
        [("url", 5), ("url", b"stores"), ("keep", "4"), ("keep", -1), ("growing", "no"), ("check", "no")],
    ),
    "tokenize": (
        lambda store, **given: tokenize(**({"source": store.url, "out": "out", "use_bytes": True} | given)),
        [("source", 5), ("source", [None]), ("out", None), ("use_bytes", "no"), ("chat", "no"), ("restart", "no")]
        + [("chunk_tokens", "5"), ("chunk_tokens", 5.0), ("commit_seconds", "5"), ("commit_seconds", math.nan)],
    ),
    "tokenizers": (
        lambda _, **given: tokenize(**({"source": __file__, "out": "out", "workers": 0} | given)),
        [("tokenizer", 5), ("train_bpe", "300"), ("train_bpe", 300.0)],
    ),
    "load_tokenizer": (
        lambda store, **given: load_tokenizer(**({"path": store.url} | given)),
        [("path", 5), ("end_of_document", 0)],
    ),
    "document": (lambda store, **given: store.document(**given), [("i", "7"), ("i", 2.5), ("i", True), ("i", None)]),
    "encode": (
        lambda store, **given: store.tokenizer().encode(**given),
        [("text", 5), ("text", b"a"), ("text", ["a"]), ("text", "\ud800")],
    ),
    "decode": (
        lambda store, **given: store.tokenizer().decode(**given),
        [("ids", "abc"), ("ids", 5), ("ids", [1.5]), ("ids", [-1]), ("ids", [[1]]), ("ids", np.ones(2))],
    ),
    "filled": (lambda store, **given: Batches(store, **ROWS).filled(**given), [("steps", -1), ("steps", "3")]),
    "train_bpe": (
        lambda _, **given: train_bpe(**({"texts": ["a"], "vocab_size": 300} | given)),
        [("texts", "abc"), ("texts", [5]), ("texts", 5), ("vocab_size", -5), ("vocab_size", 300.0)],
    ),
    "FileSource": (lambda _, **given: FileSource(**given), [("files", "corpus"), ("files", ("a.txt",))]),
}


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [pytest.param(m, n, v, id=f"{call}-{n}-{v}") for call, (m, wrong) in WRONG.items() for n, v in wrong],
)
def test_a_value_of_another_type_is_refused_where_it_is_given(store, tmp_path, monkeypatch, make, name, value):
    """Texts were true, floats ended in a TypeError of Python's at the first batch, or in the loader's thread."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        make(store, **{name: value})
    assert refused.value.fix and not any(tmp_path.iterdir())


def test_numbers_of_numpy_are_taken(store):
    """A mixture whose block was one of NumPy's failed at its first batch, and a document of a number of eight bits."""
    assert np.array_equal(store.document(np.int8(3)), store.document(3))
    assert store.tokenizer().decode(jax.numpy.array([97, 98])) == store.tokenizer().decode(iter([97, 98])) == "ab"
    assert train_bpe(iter([["ab ab"], "ab"]), np.int16(258)).vocab_size == 258
    block, size = np.int64(64), np.int64(4)
    of = {"stores": {"a": store}, "weights": [(np.int64(0), {"a": np.float32(1)})]}
    mixed = Batches(
        Mixture(**of, block=block), sequence_length=np.int64(8), batch_size=size, shuffle=Shuffle(block=size)
    )
    same = Batches(Mixture(**of, block=64), sequence_length=8, batch_size=4, shuffle=Shuffle(block=4))
    assert np.array_equal(mixed.batch(3).tokens, same.batch(3).tokens)
    with Loader(mixed, HERE, start_step=np.int32(2), prefetch=np.int32(1)) as loader:
        assert next(loader)[0] == 2


@pytest.mark.parametrize(
    "given", [{"dtype": "unit16"}, {"dtype": "float32"}, {"vocab_size": "9"}, {"end_of_document": 50257}]
)
def test_a_bin_file_of_another_kind(tmp_path, given):
    """Of the last, the token that is read before a document would have no row in the model's table."""
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=f"seen:  .*{next(iter(given))}="):
        BinStore(str(tmp_path / "a.bin"), **given)


def test_one_path_of_many_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for paths in (tmp_path, str(tmp_path), [tmp_path / "a.txt"], (str(tmp_path / "*.txt"),)):
        assert [file.size for file in find_files(paths)] == [1]
