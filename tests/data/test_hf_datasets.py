"""Hugging Face datasets, stored and streaming; no network."""

import datasets
import numpy as np
import pytest

from tests.data.corpora import random_texts, stream, tree, write_jsonl
from trellis.data import tokenize
from trellis.data.tokenizing.hf_datasets import DatasetSource, dataset_source
from trellis.errors import UserError

TEXTS = random_texts(np.random.default_rng(8), 300)
OPTIONS = {"use_bytes": True, "workers": 0, "chunk_tokens": 256, "chunk_offsets": 16}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)


@pytest.fixture
def stored():
    return datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})


def test_a_stored_dataset(tmp_path, stored):
    stored.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": stored, "test": stored.select([0])}).save_to_disk(str(tmp_path / "several"))
    for spec, expected in (("one", TEXTS), ("several", TEXTS), ("several@test", TEXTS[:1])):
        store = tokenize(dataset_source(f"{tmp_path}/{spec}"), tmp_path / f"out-{spec}", **OPTIONS)
        assert np.array_equal(store.tokens(0, store.num_tokens), stream(expected))
        assert store.sources() == [{"name": f"dataset:{tmp_path}/{spec}", "size": None}]


@pytest.mark.slow
def test_a_streaming_dataset_interrupted_and_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("trellis.data.tokenizing.formats.BLOCK_BYTES", 500)
    path = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    streaming = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
    source = DatasetSource(dataset=streaming, name="in")
    tokenize(source, tmp_path / "whole", **OPTIONS)
    from trellis.data.storage import LocalFolder

    original, writes = LocalFolder.write, []

    def write(self, name, data):
        writes.append(name)
        if len(writes) in (20, 50):
            raise KeyboardInterrupt
        original(self, name, data)

    monkeypatch.setattr(LocalFolder, "write", write)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tokenize(source, tmp_path / "again", commit_seconds=0.0, **OPTIONS)
    store = tokenize(source, tmp_path / "again", commit_seconds=0.0, **OPTIONS)
    assert tree(tmp_path / "again") == tree(tmp_path / "whole")
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))


def test_filters_see_every_field(tmp_path, stored):
    (tmp_path / "rules.py").write_text("def keep(record):\n    return record['id'] < 5\n")
    source = DatasetSource(dataset=stored, name="stored")
    store = tokenize(source, tmp_path / "out", filter=f"{tmp_path}/rules.py:keep", **OPTIONS)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS[:5]))


def test_a_field_whose_own_name_has_the_dots_comes_first(tmp_path):
    both = datasets.Dataset.from_dict({"a": [{"b": text[::-1]} for text in TEXTS], "a.b": TEXTS})
    store = tokenize(DatasetSource(dataset=both, name="both", field="a.b"), tmp_path / "out", **OPTIONS)
    assert np.array_equal(store.tokens(0, store.num_tokens), stream(TEXTS))


@pytest.mark.parametrize(
    ("spec", "seen", "fix"),
    [
        ("several@nope", "nope, but it has test, train", "several@test"),
        ("several", "train, but it has test, validation", "several@test"),
        ("one@nope", "nope, but it has one without a name", "one"),
    ],
)
def test_a_split_that_is_not_there(tmp_path, stored, spec, seen, fix):
    """Not the only one there is, without a word."""
    stored.save_to_disk(str(tmp_path / "one"))
    other = "train" if "@" in spec else "validation"
    datasets.DatasetDict({"test": stored, other: stored}).save_to_disk(str(tmp_path / "several"))
    with pytest.raises(UserError) as raised:
        dataset_source(f"{tmp_path}/{spec}")
    assert (raised.value.rule, raised.value.seen) == ("The dataset must have the requested split.", seen)
    assert raised.value.fix == f"use dataset:{tmp_path}/{fix}"


def test_a_dataset_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as raised:
        dataset_source(str(tmp_path / "none"))
    assert (
        raised.value.rule == "A dataset must be a folder written by save_to_disk or a dataset on the Hugging Face hub."
    )
    assert raised.value.where == f"dataset:{tmp_path}/none"
