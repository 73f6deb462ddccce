"""Damage in a store, chunk by chunk, and the documents that it affects."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from trellis.data.store.store import Store
from trellis.data.store.zarray import ArrayReader, DamagedChunk
from trellis.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A chunk, or the tokenizer, that is not as it was written; of a chunk the first and last document that reach into
    it, or None."""

    chunk: str
    problem: str
    documents: tuple[int, int] | None = None
    files: tuple[str, str] | None = None

    def __str__(self):
        text = f"{self.chunk}: {self.problem}"
        if self.documents is not None:
            text += f"; documents {self.documents[0]:,} to {self.documents[1]:,}"
        if self.files is not None:
            text += f", from {self.files[0]} to {self.files[1]}"
        return text


def find_damage(store: Store) -> Iterator[Damage]:
    """Compares every chunk with its checksum, the arrays with each other, and the tokenizer with the one recorded.

    Reads one chunk at a time.
    """
    broken = set()
    try:
        store.tokenizer()
    except UserError as error:
        yield Damage("tokenizer.json", str(error.seen))
    for array in store.arrays.values():
        for index in range(array.num_chunks):
            try:
                values = array.chunk_values(index)
            except DamagedChunk as error:
                broken.add(array.name)
                yield _damage(store, array, index, error.seen)
                continue
            values = values[: array.length - index * array.chunk]
            if array.name == "tokens" and int(values.max()) >= store.vocab_size:
                yield _damage(store, array, index, f"id {int(values.max())} in a vocabulary of {store.vocab_size}")
            if array.name in ("offsets", "files") and array.name not in broken:
                if problem := _not_rising(store, array, index):
                    broken.add(array.name)
                    yield Damage(f"{array.name}/c/{index}", problem)
    if not broken & {"offsets", "tokens"}:
        yield from _ends(store)


def _not_rising(store, array, index):
    first, last = index * array.chunk, min((index + 1) * array.chunk, array.length)
    values = array.read(max(first - 1, 0), last).astype(np.int64)
    if (np.diff(values) < 0).any() or (index == 0 and values[0] != 0):
        return "not an increasing sequence from 0"
    expected = store.num_tokens if array.name == "offsets" else store.num_documents
    if store.complete and last == array.length and int(values[-1]) != expected:
        return f"ends at {int(values[-1]):,} instead of {expected:,}"
    return None


def _ends(store):
    """Checks that every document ends in the end-of-document id."""
    step = store.arrays["offsets"].chunk
    for first in range(0, store.num_documents, step):
        offsets = store.offsets(first, min(first + step, store.num_documents) + 1)
        begin = int(offsets[0])
        while begin < offsets[-1]:
            stop = min(begin + store.arrays["tokens"].chunk, int(offsets[-1]))
            tokens = store.arrays["tokens"].read(begin, stop)
            found = np.flatnonzero(tokens == store.end_of_document) + begin + 1
            ends = offsets[1:]
            wanted = ends[(ends > begin) & (ends <= stop)]
            if not np.array_equal(found, wanted):
                wrong = int(np.setxor1d(found, wanted)[0])
                i = int(np.searchsorted(offsets, wrong)) - 1 + first
                yield Damage(f"offsets/c/{first // step}", f"no end of a document at token {wrong:,}", (i, i))
                return
            begin = stop


def _damage(store: Store, array: ArrayReader, index: int, problem: str) -> Damage:
    name = f"{array.name}/c/{index}"
    first, last = index * array.chunk, min((index + 1) * array.chunk, array.length) - 1
    if array.name in ("tokens", "loss_mask"):
        try:
            low, high = _document_of(store, first), _document_of(store, last)
        except DamagedChunk:
            return Damage(name, problem)
    elif array.name == "offsets":
        low, high = max(first - 1, 0), min(last, store.num_documents - 1)
    else:
        return Damage(name, problem)
    try:
        names = [source["name"] for source in store.sources()]
        files = names[_file_of(store, low)], names[_file_of(store, high)]
    except (DamagedChunk, OSError, ValueError, IndexError):
        files = None
    return Damage(name, problem, (low, high), files)


def _document_of(store, token):
    return _search(lambda i: int(store.offsets(i, i + 1)[0]), store.num_documents, token)


def _file_of(store, document):
    files = store.arrays["files"]
    return _search(lambda i: int(files.read(i, i + 1)[0]), files.length - 1, document)


def _search(at, count, value):
    """The last i below `count` with at(i) <= value."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle) <= value:
            low = middle
        else:
            high = middle
    return low
