"""A summary of a store: counts, document lengths, samples."""

import dataclasses
import math

import numpy as np

from trellis.data.store.store import Store
from trellis.data.store.token_store import TokenStore

HISTOGRAM_DOCUMENTS = 1 << 20  # larger stores are sampled: this many documents, in 64 evenly spread runs


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What `trellis data inspect` shows."""

    counts: dict
    histogram: list[tuple[int, int, int]]  # from, to (tokens, both included), documents
    sampled: bool
    samples: list[tuple[int, str]]


def summarize(store: TokenStore, *, samples: int = 3) -> Summary:
    """Counts, a histogram of document lengths in powers of two, and evenly spread decoded documents."""
    counts = {
        "store": store.url,
        "complete": store.complete,
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "vocabulary": store.vocab_size,
        "bytes per token": round(ratio, 4) if math.isfinite(ratio := store.bytes_per_token) else None,
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
    samples = min(samples, store.num_documents)
    chosen = [i * store.num_documents // samples for i in range(samples)]
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
    if store.tokenizer_sha256 is None:  # other projects' formats hold no tokenizer
        return " ".join(map(str, tokens[:40]))
    return store.tokenizer().decode(tokens)
