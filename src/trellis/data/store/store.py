"""The store that `trellis tokenize` writes: one Zarr group; the format is in docs/data.md."""

import concurrent.futures
import json
from collections.abc import Callable

import numpy as np

from trellis.data.storage import open_folder
from trellis.data.store.token_store import TokenStore
from trellis.data.store.zarray import ArrayReader, DamagedChunk, read_metadata
from trellis.data.tokenizer import Tokenizer
from trellis.errors import UserError

FORMAT, VERSION = "trellis-tokens", 1
# What is read of the metadata.
_READ = (
    *("complete", "num_tokens", "num_documents", "num_files", "text_bytes", "dtype", "vocab_size", "end_of_document"),
    *("chunk_tokens", "chunk_offsets", "has_loss_mask", "tokenizer"),
)
REQUESTS_AT_ONCE = 32  # requests to the server of a remote store
CHECK_UP_TO = 1 << 30  # bytes of tokens; larger stores are checked only by `trellis data verify`


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds ids below `vocab_size`.

    >>> smallest_dtype(257).name, smallest_dtype(65_536).name, smallest_dtype(65_537).name
    ('uint16', 'uint16', 'uint32')
    """
    return np.dtype(next(t for t in (np.uint8, np.uint16, np.uint32) if vocab_size - 1 <= np.iinfo(t).max))


class Store(TokenStore):
    """A store written by `trellis tokenize`. `open_store` opens one.

    Args:
        url: where it is.
        growing: accept a store that is still being written.
        check: compare the checksum of each chunk when it is first read; None does so for local stores up to 1 GiB.
        keep: how many whole chunks are kept in memory.

    Raises:
        UserError: nothing there, damaged metadata, another version, or incomplete without `growing`.
    """

    def __init__(self, url: str, *, growing: bool = False, check: bool | None = None, keep: int = 0):
        self._folder, self._check_wanted, self._keep = open_folder(url), check, keep
        self.url = self._folder.url
        self._tokenizer = None
        self.refresh()
        if not self.complete and not growing:
            raise UserError(
                "A store must be complete before it is read.",
                seen=f"{self.num_tokens:,} tokens of {self.num_documents:,} documents so far",
                where=self.url,
                fix="run the same `trellis tokenize` command again; it continues where it left off (or open it "
                "with growing=True to train while it is written)",
            )

    def refresh(self) -> None:
        metadata = read_metadata(self._folder)
        about = metadata.get("attributes", {}).get("trellis")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(
                "A token store must be a Zarr group whose attributes name its format.",
                seen=f"attributes {sorted(metadata.get('attributes', {}))}",
                where=self.url,
                fix="use the path that `trellis tokenize --out` was given",
            )
        if about.get("version") != VERSION:
            raise UserError(
                f"This version of Trellis can read only version {VERSION} of the store format.",
                seen=f"version {about.get('version')}",
                where=self.url,
                fix="use the version of Trellis that wrote it, or tokenize again",
            )
        if missing := [name for name in _READ if name not in about]:
            raise UserError(
                "The metadata of a token store must be complete.",
                seen=f"no {', '.join(missing)}",
                where=f"{self.url}/zarr.json",
                fix="copy the store again, or tokenize again: the file is damaged",
            )
        self.about = about
        self.complete = about["complete"]
        self.num_tokens, self.num_documents = about["num_tokens"], about["num_documents"]
        self.text_bytes, self.vocab_size = about["text_bytes"], about["vocab_size"]
        self.start_token = self.end_of_document = about["end_of_document"]
        self.has_loss_mask = about["has_loss_mask"]
        self.tokenizer_sha256 = about["tokenizer"]["sha256"]
        self.dtype = np.dtype(about["dtype"])
        check = self._check_wanted
        if check is None:
            check = not self._folder.remote and self.num_tokens * self.dtype.itemsize <= CHECK_UP_TO
        check = check and self.complete
        chunk, small = about["chunk_tokens"], about["chunk_offsets"]

        def reader(name, dtype, chunk, length):
            keep = self._keep if name in ("tokens", "loss_mask") else 0
            return ArrayReader(self._folder, name, dtype, chunk, length, check=check, keep=keep)

        self.arrays = {
            "tokens": reader("tokens", self.dtype, chunk, self.num_tokens),
            "offsets": reader("offsets", np.uint64, small, self.num_documents + 1),
            "files": reader("files", np.uint64, small, about["num_files"] + 1),
        }
        if self.has_loss_mask:
            self.arrays["loss_mask"] = reader("loss_mask", np.uint8, chunk, self.num_tokens)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        values = self.arrays["tokens"].read(start, stop)
        if values.size and (largest := int(values.max())) >= self.vocab_size:
            raise self._damaged("tokens", start, stop, f"id {largest} in a vocabulary of {self.vocab_size}")
        return values

    def offsets(self, start: int, stop: int) -> np.ndarray:
        values = self.arrays["offsets"].read(start, stop).astype(np.int64)
        if (np.diff(values) < 0).any() or (values.size and int(values[-1]) > self.num_tokens):
            raise self._damaged("offsets", start, stop, f"no increasing numbers up to {self.num_tokens:,}")
        return values

    def _damaged(self, name: str, start: int, stop: int, problem: str) -> DamagedChunk:
        where = f"{self.url}, {name} {start:,} to {stop:,}"
        return DamagedChunk(where, problem, name, start // self.arrays[name].chunk)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        if not self.has_loss_mask:
            return super().loss_mask(start, stop)
        return self.arrays["loss_mask"].read(start, stop)

    def shifted(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Documents end in end_of_document, so the stream shifted by one already has it before every first token:
        #   stream   a b E c d E      targets  a b E c d E      inputs  E a b E c d
        stream = np.zeros((len(begins), length + 1), np.int32)

        def fill(i):
            row, begin = stream[i], int(begins[i])
            stop = min(begin + length, self.num_tokens)
            if begin == 0:
                row[0] = self.end_of_document
                row[1 : 1 + stop] = self.tokens(0, stop)
            else:
                row[: 1 + stop - begin] = self.tokens(begin - 1, stop)

        self.each(fill, len(begins))
        inputs = stream[:, :-1]
        return inputs, stream[:, 1:], inputs == self.end_of_document

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            try:
                serialized = self._folder.read("tokenizer.json").decode()
            except FileNotFoundError as error:
                raise UserError(
                    "A store must contain its tokenizer.",
                    seen="no tokenizer.json",
                    where=self.url,
                    fix="copy the store again, or tokenize again",
                ) from error
            except UnicodeDecodeError as error:
                raise UserError(
                    "A store's tokenizer must be valid UTF-8.",
                    seen=f"byte {error.object[error.start]:#04x} at {error.start}",
                    where=f"{self.url}/tokenizer.json",
                    fix="copy the store again, or tokenize again",
                ) from error
            tokenizer = Tokenizer(
                serialized,
                end_of_document=self.about["tokenizer"]["end_of_document"],
                where=f"{self.url}/tokenizer.json",
            )
            if tokenizer.sha256 != self.about["tokenizer"]["sha256"]:
                raise UserError(
                    "A store's tokenizer must be the one that made its tokens.",
                    seen=f"sha256 {tokenizer.sha256[:16]}, recorded {self.about['tokenizer']['sha256'][:16]}",
                    where=f"{self.url}/tokenizer.json",
                    fix="copy the store again, or tokenize again",
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    def each(self, function: Callable[[int], None], count: int) -> None:
        if not self._folder.remote or count < 2:
            return super().each(function, count)
        with concurrent.futures.ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(function, range(count)))

    def sources(self) -> list[dict]:
        """The input files in order: name, size in bytes (None if unknown)."""
        return json.loads(self._folder.read("sources.json"))["files"]
