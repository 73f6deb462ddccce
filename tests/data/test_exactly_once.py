"""The whole way, at random: any corpus, workers, kill points, length, packing and hosts give every token once."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import random_texts, stream, write_jsonl
from trellis.data import Batches, FileSource, Shuffle, find_files, open_store, tokenize
from trellis.data.storage import LocalFolder
from trellis.data.tokenizing import formats


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exactly")


@pytest.mark.slow
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 60), files=st.integers(1, 3),
    workers=st.sampled_from([0, 0, 1, 2]),
    kills=st.lists(st.integers(1, 30), max_size=3), length=st.integers(1, 90), rows=st.integers(1, 7),
    hosts=st.integers(1, 4), packing=st.sampled_from(["chunk", "best_fit", "pad"]),
    shuffle=st.sampled_from([True, False, Shuffle(block=5, window=2)]), epoch=st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_token_of_every_document_exactly_once(
    folder, seed, count, files, workers, kills, length, rows, hosts, packing, shuffle, epoch
):
    rng = np.random.default_rng(seed)
    parts = [random_texts(rng, count) for _ in range(files)]
    place = folder / str(len(os.listdir(folder)))
    place.mkdir()
    for i, texts in enumerate(parts):
        write_jsonl(place / f"{i}.jsonl", texts)
    source = FileSource(files=find_files([place / f"{i}.jsonl" for i in range(files)]))
    original, fsync, size = LocalFolder.write, os.fsync, formats.BLOCK_BYTES
    left = list(kills)

    def write(self, name, data):
        if left:
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                raise Killed
        original(self, name, data)

    formats.BLOCK_BYTES, LocalFolder.write, os.fsync = 400, write, lambda descriptor: None
    try:
        for _ in range(len(kills) + 1):
            try:
                tokenize(source, place / "store", use_bytes=True, workers=workers, chunk_tokens=128, chunk_offsets=16,
                         commit_seconds=0.0)  # fmt: skip
            except Killed:
                continue
    finally:
        formats.BLOCK_BYTES, LocalFolder.write, os.fsync = size, original, fsync
    store = open_store(place / "store")
    expected = stream([text for texts in parts for text in texts])
    assert np.array_equal(store.tokens(0, store.num_tokens), expected)
    batches = Batches(store, sequence_length=length, batch_size=rows, packing=packing, shuffle=shuffle, seed=seed)
    per_epoch = batches._rows.num_rows
    found = []
    for step in range(epoch * per_epoch // rows, -(-(epoch + 1) * per_epoch // rows)):
        for host in range(hosts):
            begin, end = rows * host // hosts, rows * (host + 1) // hosts
            part = batches.batch(step, rows=slice(begin, end))
            first = step * rows + begin
            for i in range(end - begin):
                if epoch * per_epoch <= first + i < (epoch + 1) * per_epoch:
                    found += part.targets[i][part.loss_mask[i] > 0].tolist()
    assert np.array_equal(np.sort(found), np.sort(expected))
