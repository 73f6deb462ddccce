"""Stores of any size without a corpus: of random tokens, or of nothing but metadata."""

import json
import pathlib

import numpy as np

from trellis.data import Batches, Store
from trellis.data.blocks import Block, Encoded
from trellis.data.storage import LocalFolder, open_folder
from trellis.data.store.writer import StoreWriter
from trellis.data.tokenizer import train_bpe


def write_random(folder: pathlib.Path, num_tokens: int, chunk_tokens: int) -> None:
    """A store of random documents of 1,000 tokens on average, written as `trellis tokenize` writes."""
    rng = np.random.default_rng(0)
    writer = StoreWriter.open(open_folder(folder), "benchmark", restart=False, on_error="fail", stamps="")
    files = [{"name": "generated", "size": None}]
    writer.describe(
        train_bpe(iter([["a"]]), 257),
        chunk_tokens=chunk_tokens,
        chunk_offsets=1 << 16,
        has_loss_mask=False,
        files=files,
    )
    step = 1 << 22
    for at in range(0, num_tokens, step):
        size = min(step, num_tokens - at)
        ends = np.unique(np.append(rng.integers(1, size, max(1, size // 1000)), size))
        tokens = rng.integers(0, 256, size).astype(np.uint16)
        tokens[ends - 1] = 256
        encoded = Encoded(tokens, np.diff(ends, prepend=0).astype(np.uint32), None, 4 * size, 0, [])
        writer.append(Block("records", None, "generated", 0, (at, 0)), encoded)
    writer.finish(1)


def claim(folder: pathlib.Path, num_tokens: int) -> None:
    """Writes into a store's metadata that it has so many tokens."""
    path = folder / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"]["trellis"] |= {"num_tokens": num_tokens, "num_documents": num_tokens // 1000}
    path.write_text(json.dumps(metadata))


class _Zeros(LocalFolder):
    def read(self, name, start=0, stop=None):
        return super().read(name, start, stop) if "/c/" not in name else bytes(stop - start)


def read_zeros(store: Store) -> None:
    """Lets an open store read zeros where it has no chunks."""
    store._folder.__class__ = _Zeros


def rows_of(batches: Batches, step: int, size: int) -> np.ndarray:
    """Which rows a step of so many reads, without reading them."""
    return batches._rows._order(np.arange(step * size, (step + 1) * size))
