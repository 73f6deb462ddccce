"""Looking into a store: counts, document lengths, samples; and its damage, chunk by chunk."""

import dataclasses
import json
from collections.abc import Iterator

import numpy as np

from trellis.data.store import Store, TokenStore
from trellis.data.zarray import ArrayReader, DamagedChunk
from trellis.errors import UserError

HISTOGRAM_DOCUMENTS = 1 << 20  # larger stores are sampled: as many documents, in 64 evenly spread runs


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What `trellis data inspect` shows."""

    counts: dict
    histogram: list[tuple[int, int, int]]  # from, to (tokens, both included), documents
    sampled: bool
    samples: list[tuple[int, str]]


def summarize(store: TokenStore, *, samples: int = 3) -> Summary:
    """Counts, a histogram of document lengths in powers of two, and decoded documents evenly spread."""
    counts = {
        "store": store.url,
        "complete": store.complete,
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "vocabulary": store.vocab_size,
        "bytes per token": round(store.bytes_per_token, 4),
    }
    if isinstance(store, Store):
        about = store.about
        counts |= {
            "type": store.dtype.name,
            "text bytes": about["text_bytes"],
            "input files": len(store.sources()),
            "filtered": about["filtered"],
            "skipped": about["skipped"],
            "tokenizer": f"{about['tokenizer']['kind']}, sha256 {about['tokenizer']['sha256'][:16]}",
        }
    lengths, sampled = _lengths(store)
    buckets = np.bincount(np.floor(np.log2(np.maximum(lengths, 1))).astype(int)) if len(lengths) else []
    histogram = [(2**i, 2 ** (i + 1) - 1, int(n)) for i, n in enumerate(buckets)]
    chosen = sorted({i * store.num_documents // samples for i in range(samples)}) if store.num_documents else []
    shown = [(i, _decoded(store, i)) for i in chosen]
    return Summary(counts, histogram, sampled, shown)


def _lengths(store):
    n = store.num_documents
    if n <= HISTOGRAM_DOCUMENTS:
        return np.diff(store.offsets(0, n + 1)), False
    run = HISTOGRAM_DOCUMENTS // 64
    begins = np.linspace(0, n - run, 64).astype(np.int64)
    return np.concatenate([np.diff(store.offsets(int(b), int(b) + run + 1)) for b in begins]), True


def _decoded(store, i):
    tokens = store.document(i)[:200]
    try:
        return store.tokenizer().decode(tokens)
    except UserError:
        return " ".join(map(str, tokens[:40]))


def inspect(url: str, *, samples: int = 3, as_json: bool = False) -> int:
    """`trellis data inspect`."""
    summary = summarize(Store.open(url, growing=True), samples=samples)
    if as_json:
        print(json.dumps(dataclasses.asdict(summary), indent=1, ensure_ascii=False))
        return 0
    for name, value in summary.counts.items():
        print(
            f"{name:<16} {value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{name:<16} {value}"
        )
    print("\ndocument lengths in tokens" + (" (a sample of the documents)" if summary.sampled else ""))
    most = max((n for *_, n in summary.histogram), default=1)
    for low, high, n in summary.histogram:
        print(f"{low:>12,} to {high:<12,} {n:>12,} {'#' * round(40 * n / most)}")
    for i, text in summary.samples:
        print(f"\n--- document {i:,}\n{text}")
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that is not as it was written, and the documents that reach into it (first and last, or None)."""

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
    """Compare every chunk with its checksum and the arrays with each other. Reads one chunk at a time."""
    broken = set()
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
            if array.name in ("offsets", "files") and not broken & {array.name}:
                if problem := _not_rising(store, array, index):
                    yield Damage(f"{array.name}/c/{index}", problem)
    if not broken & {"offsets", "tokens"}:
        yield from _ends(store)


def _not_rising(store, array, index):
    first, last = index * array.chunk, min((index + 1) * array.chunk, array.length)
    values = array.read(max(first - 1, 0), last).astype(np.int64)
    if (np.diff(values) < 0).any() or (index == 0 and values[0] != 0):
        return "not a rising sequence from 0"
    expected = store.num_tokens if array.name == "offsets" else store.num_documents
    if store.complete and last == array.length and int(values[-1]) != expected:
        return f"ends at {int(values[-1]):,} where {expected:,} belongs"
    return None


def _ends(store):
    """Every document ends in the end-of-document id."""
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
    """The last i below ``count`` with at(i) <= value."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if at(middle) <= value:
            low = middle
        else:
            high = middle
    return low


def verify(url: str) -> int:
    """`trellis data verify`."""
    store = Store.open(url, growing=True, check=False)
    if not isinstance(store, Store):
        raise UserError(
            "Only Trellis's own stores have checksums.",
            seen=type(store).__name__,
            where=url,
            fix="check it with the tool that wrote it",
        )
    damaged = 0
    for damage in find_damage(store):
        damaged += 1
        print(damage)
    chunks = sum(array.num_chunks for array in store.arrays.values())
    if damaged:
        print(
            f"{store.url}: damaged in {damaged} places, {chunks:,} chunks compared. Copy those files again, or delete "
            "the store and tokenize again."
        )
        return 2
    state = "" if store.complete else " so far; the store is not complete"
    print(
        f"{store.url}: {chunks:,} chunks match, {store.num_tokens:,} tokens in {store.num_documents:,} documents{state}"
    )
    return 0
