"""seqax's flat-tokens: a Zarr group of `encoded_tokens` (id * 2, plus 1 at a document's start) and `seq_starts`.

The specification is docs/flat-tokens.md of MatX-inc/seqax. Documents have no end token; before a document's first token
a model reads 0.
"""

import warnings

import numpy as np

from trellis.data.store.store import Store
from trellis.data.store.token_store import TokenStore
from trellis.data.store.zarray import Kept
from trellis.errors import UserError

CHUNK_TOKENS, CHUNK_STARTS = 1 << 22, 1 << 20
KEPT_CHUNKS = 8  # decompressed chunks held by a reader


class FlatTokens(TokenStore):
    """A flat-tokens array. Its chunks are compressed, so reads far apart are slower than in Trellis's own format."""

    start_token = 0

    def __init__(self, url: str):
        import zarr

        self.url = url
        group = zarr.open_group(url, mode="r")
        try:
            self._encoded, self._starts = group["encoded_tokens"], group["seq_starts"]
            self.vocab_size = int(group.attrs["max_token_id"]) + 1
        except KeyError as error:
            raise UserError(
                "A flat-tokens array must have encoded_tokens, seq_starts and max_token_id.",
                seen=f"no {error.args[0]}",
                where=url,
                fix="write it again with the tool that made it",
            ) from error
        self.num_tokens, self.num_documents = self._encoded.shape[0], self._starts.shape[0] - 1
        self._chunk = self._encoded.chunks[0]
        self._chunk_values = Kept(self._decoded, KEPT_CHUNKS)

    def encoded(self, start: int, stop: int) -> np.ndarray:
        """Elements of `encoded_tokens`: u32."""
        if start == stop:
            return np.empty(0, np.uint32)
        parts = []
        for index in range(start // self._chunk, (stop - 1) // self._chunk + 1):
            base = index * self._chunk
            parts.append(self._chunk_values(index)[max(start - base, 0) : stop - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decoded(self, index):
        return np.asarray(self._encoded[index * self._chunk : (index + 1) * self._chunk])

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return self.encoded(start, stop) >> np.uint32(1)

    def offsets(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._starts[start:stop]).astype(np.int64)

    def shifted(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        stream = np.zeros((len(begins), length + 1), np.uint32)
        for row, begin in zip(stream, map(int, begins), strict=True):
            first, stop = max(begin - 1, 0), min(begin + length, self.num_tokens)
            row[first - begin + 1 : stop - begin + 1] = self.encoded(first, stop)
        starts = (stream[:, 1:] & 1).astype(bool)
        ids = (stream >> np.uint32(1)).astype(np.int32)
        return np.where(starts, np.int32(0), ids[:, :-1]), ids[:, 1:], starts


def write_flat_tokens(store: TokenStore, path: str, *, split: str) -> None:
    """Writes a store as the flat-tokens array `split` of the dataset at `path`; its end-of-document ids are left out,
    as the format requires."""
    import numcodecs
    import zarr

    if split not in ("train", "validation"):
        raise UserError(
            "The split of a flat-tokens dataset must be train or validation.",
            seen=split,
            where="--split",
            fix="use train or validation",
        )
    drop = 1 if isinstance(store, Store) else 0  # leaves out the end of each document
    blosc = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(path, mode="a", zarr_format=2)
        if split in root:
            raise UserError(
                "The output cannot already contain this split.",
                seen=f"{split} exists",
                where=path,
                fix="delete it, or write to another folder",
            )
        group = root.create_group(split)
        total = store.num_tokens - drop * store.num_documents
        encoded = group.create_array(
            "encoded_tokens", shape=(total,), chunks=(CHUNK_TOKENS,), dtype="uint32", compressors=blosc
        )
        starts = group.create_array(
            "seq_starts",
            shape=(store.num_documents + 1,),
            chunks=(CHUNK_STARTS,),
            dtype="uint64",
            compressors=blosc,
            filters=numcodecs.Delta(dtype="i8"),
        )
    largest, at, waiting = 0, 0, 0
    buffer: list[np.ndarray] = []
    for first in range(0, store.num_documents, CHUNK_STARTS):
        last = min(first + CHUNK_STARTS, store.num_documents)
        offsets = store.offsets(first, last + 1)
        starts[first : last + 1] = (offsets - drop * np.arange(first, last + 1)).astype(np.uint64)
        for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
            tokens = store.tokens(int(begin), int(end) - drop).astype(np.uint32) << np.uint32(1)
            if tokens.size:
                tokens[0] |= np.uint32(1)
                largest = max(largest, int(tokens.max() >> 1))
            buffer.append(tokens)
            waiting += len(tokens)
            while waiting >= CHUNK_TOKENS:
                values = np.concatenate(buffer)
                encoded[at : at + CHUNK_TOKENS] = values[:CHUNK_TOKENS]
                buffer, at, waiting = [values[CHUNK_TOKENS:]], at + CHUNK_TOKENS, waiting - CHUNK_TOKENS
    if buffer:
        encoded[at:] = np.concatenate(buffer)
    group.attrs["max_token_id"] = largest
