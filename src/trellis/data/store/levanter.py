"""Levanter's token caches: a jagged array of `input_ids` in two Zarr arrays, `offsets` and `data`.

As levanter.store.JaggedArrayStore writes them, both are larger than what they hold; `offsets[0]` is the number of
documents and `offsets[i]` the end of document i (from 1).
"""

import json

import numpy as np

from trellis.data.storage import open_folder
from trellis.data.store.offsets import OffsetStore
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError

LENGTH = 2**54  # the length of both arrays
CHUNK, SHARD = 1 << 18, 1 << 24


class LevanterStore(OffsetStore):
    """One split of a Levanter cache: the folder that holds `input_ids`. The vocabulary size is found by one pass."""

    def __init__(self, url: str):
        import zarr

        self.url = url
        folder = open_folder(url)
        if folder.exists("shard_ledger.json"):
            ledger = json.loads(folder.read("shard_ledger.json"))
            if not ledger.get("is_finished", True):
                raise UserError(
                    "A Levanter cache must be finished before it is read.",
                    seen=f"{ledger.get('total_num_rows')} documents so far",
                    where=url,
                    fix="let Levanter finish it",
                )
        offsets = zarr.open_array(f"{url}/input_ids/offsets", mode="r")
        self._data = zarr.open_array(f"{url}/input_ids/data", mode="r")
        count = int(np.asarray(offsets[0]))
        ends = np.asarray(offsets[: count + 1], np.int64)
        ends[0] = 0
        self._offsets, self.num_tokens = ends, int(ends[-1])
        self._vocab_size = None
        self._settle()

    @property
    def vocab_size(self) -> int:  # ty: ignore[incompatible-property-override]
        if self._vocab_size is None:
            step = 1 << 22
            self._vocab_size = 1 + max(
                int(self.tokens(at, min(at + step, self.num_tokens)).max()) for at in range(0, self.num_tokens, step)
            )
        return self._vocab_size

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._data[start:stop]).astype(np.uint32)


def write_levanter(store: TokenStore, path: str) -> None:
    """Writes a store as one split of a Levanter cache, ends of documents included."""
    import zarr
    from zarr.codecs import BloscCodec

    folder = open_folder(path)
    if folder.exists("shard_ledger.json"):
        raise UserError(
            "The output folder cannot already contain a Levanter cache.",
            seen="a shard_ledger.json",
            where=path,
            fix="write to another folder",
        )

    def create(name, dtype):
        return zarr.create_array(
            f"{path}/input_ids/{name}",
            shape=(LENGTH,),
            shards=(SHARD,),
            chunks=(CHUNK,),
            dtype=dtype,
            compressors=BloscCodec(clevel=5),
            fill_value=0,
        )

    tokens = create("data", "int32")
    for at in range(0, store.num_tokens, SHARD):
        stop = min(at + SHARD, store.num_tokens)
        tokens[at:stop] = store.tokens(at, stop).astype(np.int32)
    offsets = create("offsets", "int64")
    for at in range(0, store.num_documents + 1, SHARD):
        stop = min(at + SHARD, store.num_documents + 1)
        values = store.offsets(at, stop)
        if at == 0:
            values = values.copy()
            values[0] = store.num_documents
        offsets[at:stop] = values
    ledger = {
        "total_num_rows": store.num_documents,
        "shard_rows": {"trellis": store.num_documents},
        "is_finished": True,
        "finished_shards": ["trellis"],
        "field_counts": {"input_ids": store.num_tokens},
        "metadata": {"preprocessor_metadata": {}},
    }
    folder.write("shard_ledger.json", json.dumps(ledger).encode())
