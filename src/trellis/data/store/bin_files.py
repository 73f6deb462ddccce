"""Token streams in .bin files: nanoGPT's (nothing but tokens) and Megatron's (beside an .idx of documents)."""

import functools
import os
import struct

import numpy as np

from trellis.data.arguments import path, whole
from trellis.data.storage import local_path
from trellis.data.store.offsets import OffsetStore
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError

GPT2_END, GPT2_VOCABULARY = 50256, 50257
# The first number of llm.c's files of tokens of GPT-2 and of Llama 3.
_LLM_C = tuple(struct.pack("<i", magic) for magic in (20240520, 20240801))
SCAN_TOKENS = 1 << 24
# Megatron-LM, megatron/core/datasets/indexed_dataset.py: the index's header, version and codes of types.
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def _dtype(dtype) -> np.dtype:
    """The type of a file's numbers."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.kind not in "iu":
        rule, fix = "The numbers of a .bin file must be whole ones.", 'use "uint16", or "uint32"'
        raise UserError(rule, seen=f"dtype={dtype!r}", where="BinStore", fix=fix)
    return kind


class BinStore(TokenStore):
    """nanoGPT's .bin: tokens one after the other, each document followed by its end.

    The file does not record its type or its vocabulary; by default they are GPT-2's.
    """

    def __init__(self, url: str, *, dtype="uint16", vocab_size: int = GPT2_VOCABULARY, end_of_document: int = GPT2_END):
        url, kind = path(url, "url", "BinStore"), _dtype(dtype)
        vocab_size = whole(vocab_size, "vocab_size", "BinStore", least=1)
        end_of_document = whole(end_of_document, "end_of_document", "BinStore")
        if end_of_document >= vocab_size:
            raise UserError(
                "The token that ends documents must be in the vocabulary.",
                seen=f"end_of_document={end_of_document}, vocab_size={vocab_size}",
                where="BinStore",
                fix="give both, as in BinStore(path, vocab_size=50257, end_of_document=50256)",
            )
        self.url, self._stream = url, _map(local_path(url), kind.newbyteorder("<"))
        self.num_tokens, self.vocab_size = len(self._stream), vocab_size
        self.start_token = self.end_of_document = end_of_document
        self._check_kind()

    def _check_kind(self):
        """Refuses what begins in a way that no text does: llm.c's header, or numbers of twice the width."""
        begin = self._stream[:1024]
        values = begin[: len(begin) // 2 * 2].reshape(-1, 2)
        if begin.tobytes()[:4] in _LLM_C:
            raise UserError(
                "A .bin file must hold nothing but tokens, unless an .idx is beside it.",
                seen="the header that llm.c writes, 1,024 bytes",
                where=self.url,
                fix="leave the header out, as `tail -c +1025 FILE` does",
            )
        if len(values) >= 32 and values[:, 0].any() and not values[:, 1].any():
            raise UserError(
                "A .bin file must hold numbers of the type that it is opened with.",
                seen=f"every second {begin.dtype.name} is 0, as in numbers of {16 * begin.dtype.itemsize} bits",
                where=self.url,
                fix=f'open it with BinStore(path, dtype="uint{16 * begin.dtype.itemsize}", ...)',
            )

    def tokens(self, start: int, stop: int) -> np.ndarray:
        values = self._stream[start:stop]
        if values.size and int(values.max()) >= self.vocab_size:
            raise UserError(
                "Every id in a .bin file must be in its vocabulary.",
                seen=f"id {int(values.max())} in a vocabulary of {self.vocab_size:,}",
                where=f"{self.url}, tokens {start:,} to {stop:,}",
                fix="open it with BinStore(path, vocab_size=..., end_of_document=...)",
            )
        return values

    def shifted(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        stream = np.full((len(begins), length + 1), 0, np.int32)
        for row, begin in zip(stream, map(int, begins), strict=True):
            first, stop = max(begin - 1, 0), min(begin + length, self.num_tokens)
            row[first - begin + 1 : stop - begin + 1] = self.tokens(first, stop)
            if begin == 0:
                row[0] = self.end_of_document
        inputs = stream[:, :-1]
        return inputs, stream[:, 1:], inputs == self.end_of_document

    @functools.cached_property
    def _offsets(self) -> np.ndarray:
        """The offsets of documents, found by one pass over the file."""
        ends = [
            np.flatnonzero(self._stream[at : at + SCAN_TOKENS] == self.end_of_document) + at + 1
            for at in range(0, self.num_tokens, SCAN_TOKENS)
        ]
        found = np.concatenate([np.zeros(1, np.int64), *ends])
        return found if found[-1] == self.num_tokens else np.append(found, self.num_tokens)

    @property
    def num_documents(self) -> int:  # ty: ignore[incompatible-property-override]
        return len(self._offsets) - 1

    def offsets(self, start: int, stop: int) -> np.ndarray:
        return self._offsets[start:stop]


class MegatronStore(OffsetStore):
    """Megatron-LM's .bin with its .idx. By the index, a document is one or more sequences."""

    def __init__(self, url: str):
        self.url = url
        path = local_path(url)
        with open(path[:-4] + ".idx", "rb") as file:
            data = file.read()
        header = len(_MAGIC) + 8 + 1 + 8 + 8
        if data[: len(_MAGIC)] != _MAGIC or len(data) < header:
            raise self._broken("no index header")
        version, code, sequences, documents = struct.unpack_from("<QBQQ", data, len(_MAGIC))
        if version != _VERSION or code not in _TYPES:
            raise self._broken(f"version {version}, type {code}")
        if len(data) < header + 12 * sequences + 8 * documents:
            raise self._broken(f"{len(data):,} bytes for {sequences:,} sequences")
        lengths = np.frombuffer(data, "<i4", sequences, header)
        boundaries = np.frombuffer(data, "<i8", documents, header + 12 * sequences)
        self._stream = _map(path, np.dtype(_TYPES[code]).newbyteorder("<"))
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self.num_tokens = len(self._stream)
        if ends[-1] != self.num_tokens:
            raise self._broken(f"{int(ends[-1]):,} tokens in the index, {self.num_tokens:,} in the .bin")
        self._offsets = ends[boundaries]
        self._settle()

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return self._stream[start:stop]

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, found by one pass over the file."""
        return 1 + max(int(self._stream[at : at + SCAN_TOKENS].max()) for at in range(0, self.num_tokens, SCAN_TOKENS))

    def _broken(self, seen):
        return UserError(
            "A Megatron .bin needs a matching .idx file of version 1.",
            seen=seen,
            where=self.url,
            fix="copy both files again",
        )


def _map(path, dtype):
    if not os.path.exists(path):
        raise UserError("The token store must exist.", seen="no such file", where=path, fix="check the path")
    if not os.path.getsize(path):
        raise UserError(
            "A corpus must have at least one document.", seen="0 bytes", where=path, fix="give another file"
        )
    if os.path.getsize(path) % dtype.itemsize:
        raise UserError(
            "A .bin file must hold whole numbers of its type.",
            seen=f"{os.path.getsize(path):,} bytes for {dtype.name}",
            where=path,
            fix="copy it again, or open it with BinStore(path, dtype=..., ...)",
        )
    return np.memmap(path, dtype, mode="r")


def write_bin(store: TokenStore, path: str, *, index: bool) -> None:
    """Writes a store's tokens as a .bin; with `index` also Megatron's .idx, each document being one sequence.

    The type is u16 if the vocabulary fits, else i32 (Megatron) or u32.
    """
    if not path.endswith(".bin"):
        raise UserError("The name of a .bin file must end in .bin.", seen=path, where="OUT", fix=f"write to {path}.bin")
    if there := [name for name in (path, path[:-4] + ".idx") if os.path.exists(name)]:
        rule, fix = "A converted store must be written to a place of its own.", "write to another file"
        raise UserError(rule, seen="a file", where=there[0], fix=fix)
    wide = (np.int32, 4) if index else (np.uint32, None)
    dtype, code = (np.uint16, 8) if store.vocab_size <= 2**16 else wide
    with open(path + ".part", "wb") as file:
        for at in range(0, store.num_tokens, SCAN_TOKENS):
            file.write(store.tokens(at, min(at + SCAN_TOKENS, store.num_tokens)).astype(dtype).tobytes())
    if index:
        offsets = store.offsets(0, store.num_documents + 1)
        lengths = np.diff(offsets)
        with open(path[:-4] + ".idx", "wb") as file:
            file.write(_MAGIC + struct.pack("<QBQQ", _VERSION, code, len(lengths), len(lengths) + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write((offsets[:-1] * np.dtype(dtype).itemsize).astype("<i8").tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    os.replace(path + ".part", path)
