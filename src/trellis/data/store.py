"""The token store: every token of a corpus in one Zarr group, any range or document of it one read away."""

import concurrent.futures
import json
import math
import os
import time
from collections.abc import Callable

import numpy as np

from trellis.data.storage import open_folder
from trellis.data.tokenizer import Tokenizer
from trellis.data.zarray import ArrayReader, DamagedChunk, read_metadata
from trellis.errors import UserError

FORMAT, VERSION = "trellis-tokens", 1
REQUESTS_AT_ONCE = 32  # to the server of a remote store
CHECK_UP_TO = 1 << 30  # bytes of tokens; larger stores are checked by `trellis data verify` alone


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that holds ids below ``vocab_size``.

    >>> smallest_dtype(257).name, smallest_dtype(65_536).name, smallest_dtype(65_537).name
    ('uint16', 'uint16', 'uint32')
    """
    return np.dtype(next(t for t in (np.uint8, np.uint16, np.uint32) if vocab_size - 1 <= np.iinfo(t).max))


class TokenStore:
    """What every kind of token store offers; a subclass reads one format.

    Attributes:
        url: where it is.
        num_tokens, num_documents, vocab_size: counts.
        start_token: the id a model reads before the first token of a document.
        text_bytes: UTF-8 bytes of text that the tokens stand for, or None where the format does not say.
        complete: False while the store is being written.
        has_loss_mask: some tokens do not count in the loss.
        tokenizer_sha256: which tokenizer made the tokens, or None where the format does not say.
    """

    url: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    start_token: int
    text_bytes: int | None = None
    complete: bool = True
    has_loss_mask: bool = False
    tokenizer_sha256: str | None = None

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of the corpus, as stored: unsigned[tokens]."""
        raise NotImplementedError

    def offsets(self, start: int, stop: int) -> np.ndarray:
        """Where documents start..stop-1 begin; entry ``num_documents`` is the end of the last: i64."""
        raise NotImplementedError

    def shifted(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For spans of ``length`` tokens: what the model reads, what it predicts, and where documents begin.

        Args:
            begins: i64[rows], the first token of each span; spans past the end are filled up with zeros.

        Returns:
            inputs i32[rows, length]: the token before each target, ``start_token`` before a document's first;
            targets i32[rows, length]; starts bool[rows, length]: the target is the first token of a document.
        """
        raise NotImplementedError

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Which of the tokens start..stop-1 count in the loss: u8[tokens]."""
        return np.ones(stop - start, np.uint8)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        raise UserError(
            "Decoding needs the store's tokenizer.",
            seen="this format holds none",
            where=self.url,
            fix="convert it with `trellis tokenize`, or decode with a tokenizer of your own",
        )

    def refresh(self) -> None:
        """Look again how far a store that is still being written has come."""

    def each(self, function: Callable[[int], None], count: int) -> None:
        """``function`` of 0..count-1: one after the other, or many at once where reads have to wait for a server."""
        for i in range(count):
            function(i)

    def document(self, i: int) -> np.ndarray:
        """The tokens of document ``i``, its end included."""
        if not 0 <= i < self.num_documents:
            raise IndexError(f"document {i} of {self.num_documents}")
        start, stop = self.offsets(i, i + 2)
        return self.tokens(int(start), int(stop))

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token stands for, on average: nats per token / ln 2 / this are bits per byte."""
        return self.text_bytes / self.num_tokens if self.text_bytes and self.num_tokens else math.nan

    def wait_for(self, num_tokens: int, *, timeout: float = 600.0, poll: float = 0.5) -> None:
        """Return once ``num_tokens`` tokens are there or the store is complete.

        Raises:
            UserError: the store has not grown for ``timeout`` seconds.
        """
        seen, since = self.num_tokens, time.monotonic()
        while self.num_tokens < num_tokens and not self.complete:
            self.refresh()
            if self.num_tokens != seen:
                seen, since = self.num_tokens, time.monotonic()
            elif not self.complete and time.monotonic() - since > timeout:
                raise UserError(
                    "A store that is read while it is written keeps growing.",
                    seen=f"{seen:,} tokens for {timeout:g} s, {num_tokens:,} needed",
                    where=self.url,
                    fix="run the `trellis tokenize` command again; it continues where it was",
                )
            elif not self.complete and self.num_tokens < num_tokens:
                time.sleep(poll)


class Store(TokenStore):
    """A store written by `trellis tokenize`; the format is in docs/data.md. Open with `Store.open`."""

    def __init__(self, url: str, *, growing: bool = False, check: bool | None = None, keep: int = 0):
        self._folder, self._growing, self._check_wanted, self._keep = open_folder(url), growing, check, keep
        self.url = self._folder.url
        self._tokenizer = None
        self.refresh()
        if not self.complete and not growing:
            raise UserError(
                "A store is complete before it is used.",
                seen=f"{self.num_tokens:,} tokens of {self.num_documents:,} documents so far",
                where=self.url,
                fix="run the same `trellis tokenize` command again; it continues where it was (or open it "
                "with growing=True to train while it is written)",
            )

    @classmethod
    def open(
        cls, url: str | os.PathLike, *, growing: bool = False, check: bool | None = None, keep: int = 0
    ) -> TokenStore:
        """Open a token store: Trellis's own, or a format it reads (seqax, nanoGPT, Megatron, Levanter).

        Args:
            growing: accept a store that is still being written.
            check: compare the checksum of each chunk when it is first read. By default this is done for local
                stores up to 1 GiB.
            keep: read whole chunks, and keep so many of them in memory. For stores on a server: with
                ``Shuffle(block=rows of a chunk, window=w)`` keep two times w, and every chunk is fetched once an epoch.

        Raises:
            UserError: nothing there, damaged metadata, another version, or incomplete without ``growing``.
        """
        from trellis.data.foreign import open_foreign

        return open_foreign(os.fspath(url)) or cls(os.fspath(url), growing=growing, check=check, keep=keep)

    def refresh(self) -> None:
        metadata = read_metadata(self._folder, "zarr.json")
        about = metadata.get("attributes", {}).get("trellis")
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(
                "A token store is a Zarr group whose attributes name its format.",
                seen=f"attributes {sorted(metadata.get('attributes', {}))}",
                where=self.url,
                fix="give the path that `trellis tokenize --out` was given",
            )
        if about["version"] != VERSION:
            raise UserError(
                f"This version of Trellis reads version {VERSION} of the store format.",
                seen=f"version {about['version']}",
                where=self.url,
                fix="use the Trellis that wrote it, or tokenize again",
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
            raise DamagedChunk(
                f"{self.url}, tokens {start:,} to {stop:,}",
                f"id {largest} in a vocabulary of {self.vocab_size}",
                "tokens",
                start // self.arrays["tokens"].chunk,
            )
        return values

    def offsets(self, start: int, stop: int) -> np.ndarray:
        return self.arrays["offsets"].read(start, stop).astype(np.int64)

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
                    "A store holds the tokenizer that made it.",
                    seen="no tokenizer.json",
                    where=self.url,
                    fix="copy the store again, or tokenize again",
                ) from error
            self._tokenizer = Tokenizer(
                serialized,
                end_of_document=self.about["tokenizer"]["end_of_document"],
                where=f"{self.url}/tokenizer.json",
            )
            if self._tokenizer.sha256 != self.about["tokenizer"]["sha256"]:
                raise UserError(
                    "A store's tokenizer is the one that made its tokens.",
                    seen=f"sha256 {self._tokenizer.sha256[:16]}, recorded {self.about['tokenizer']['sha256'][:16]}",
                    where=f"{self.url}/tokenizer.json",
                    fix="copy the store again, or tokenize again",
                )
        return self._tokenizer

    def each(self, function: Callable[[int], None], count: int) -> None:
        if not self._folder.remote or count < 2:
            return super().each(function, count)
        with concurrent.futures.ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            list(pool.map(function, range(count)))

    def sources(self) -> list[dict]:
        """The input files in order: name, size in bytes (None where unknown)."""
        return json.loads(self._folder.read("sources.json"))["files"]


def check_vocabulary(store: TokenStore, vocab_size: int) -> None:
    """Refuse a model of ``vocab_size`` ids if the store has more."""
    if store.vocab_size > vocab_size:
        raise UserError(
            "A model has a row of its embedding for every token id.",
            seen=f"{store.vocab_size:,} ids in the store, {vocab_size:,} in the model",
            where=store.url,
            fix=f"set the model's vocab_size to {store.vocab_size:,} or more",
        )


def check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> None:
    """Refuse a store that another tokenizer made."""
    if store.tokenizer().sha256 != tokenizer.sha256:
        raise UserError(
            "A run's data and its model use one tokenizer.",
            seen=f"sha256 {store.tokenizer().sha256[:16]} in the store, {tokenizer.sha256[:16]} expected",
            where=store.url,
            fix="tokenize the corpus with the model's tokenizer",
        )
