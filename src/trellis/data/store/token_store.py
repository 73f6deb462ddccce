"""The interface of every kind of token store."""

import math
import time
from collections.abc import Callable

import numpy as np

from trellis.data.arguments import whole
from trellis.data.tokenizer import Tokenizer
from trellis.errors import UserError


class TokenStore:
    """The interface of every kind of token store; a subclass reads one format.

    Attributes:
        url: where it is.
        num_tokens, num_documents, vocab_size: counts.
        start_token: the id a model reads before the first token of a document.
        text_bytes: UTF-8 bytes of text that the tokens stand for, or None if the format does not say.
        complete: False while the store is being written.
        has_loss_mask: whether some tokens do not count in the loss.
        tokenizer_sha256: which tokenizer made the tokens, or None if the format does not say.
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
        """Where documents start..stop-1 begin; entry `num_documents` is the end of the last: i64."""
        raise NotImplementedError

    def shifted(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For spans of `length` tokens: what the model reads, what it predicts, and where documents begin.

        Args:
            begins: `i64["rows"]`, the first token of each span; spans past the end are filled up with zeros.

        Returns:
            inputs `i32["rows length"]`: the token before each target, `start_token` before a document's first;
            targets `i32["rows length"]`; starts `bool["rows length"]`: the target is the first token of a document.
        """
        raise NotImplementedError

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Which of the tokens start..stop-1 count in the loss: `u8["tokens"]`."""
        return np.ones(stop - start, np.uint8)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            UserError: the store has none, or one that cannot be read.
        """
        raise UserError(
            "Decoding needs the store's tokenizer.",
            seen="this format stores none",
            where=self.url,
            fix="make the store with `trellis tokenize`, or decode with your own tokenizer",
        )

    def refresh(self) -> None:
        """Checks again how far a store that is still being written has come."""

    def each(self, function: Callable[[int], None], count: int) -> None:
        """Calls `function` with 0..count-1: one after the other, or many at once if reads have to wait for a server."""
        for i in range(count):
            function(i)

    def document(self, i: int) -> np.ndarray:
        """The tokens of document `i`, including its end: the store's `dtype`, `["tokens"]`.

        Raises:
            IndexError: there is no such document.
            UserError: `i` is no number.
        """
        i = i if type(i) is int else whole(i, "i", "document")
        if not 0 <= i < self.num_documents:
            raise IndexError(
                f"a store's documents are counted from 0, got document {i} of {self.num_documents}, in {self.url}: use "
                f"one from 0 to {self.num_documents - 1}"
            )
        start, stop = self.offsets(i, i + 2)
        return self.tokens(int(start), int(stop))

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text that a token stands for, on average: nats per token / ln 2 / this are bits per byte."""
        return self.text_bytes / self.num_tokens if self.text_bytes and self.num_tokens else math.nan

    def wait_for(self, num_tokens: int, *, timeout: float = 600.0, poll: float = 0.5) -> None:
        """Returns once `num_tokens` tokens are there or the store is complete.

        Raises:
            UserError: the store has not grown for `timeout` seconds.
        """
        seen, since = self.num_tokens, time.monotonic()
        while self.num_tokens < num_tokens and not self.complete:
            self.refresh()
            if self.num_tokens != seen:
                seen, since = self.num_tokens, time.monotonic()
            elif not self.complete and time.monotonic() - since > timeout:
                raise UserError(
                    "A store that is read while it is written must keep growing.",
                    seen=f"{seen:,} tokens for {timeout:g} s, {num_tokens:,} needed",
                    where=self.url,
                    fix="run the `trellis tokenize` command again; it continues where it left off",
                )
            elif not self.complete and self.num_tokens < num_tokens:
                time.sleep(poll)


def check_vocabulary(store: TokenStore, vocab_size: int) -> None:
    """Refuses a model of `vocab_size` ids if the store has more.

    Raises:
        UserError: with both numbers.
    """
    if store.vocab_size > vocab_size:
        raise UserError(
            "The model's vocabulary must include every token id of the store.",
            seen=f"{store.vocab_size:,} ids in the store, {vocab_size:,} in the model",
            where=store.url,
            fix=f"use --model.vocab {store.vocab_size} or more; for a model that was imported, import and tokenize "
            f"with a tokenizer.json without the tokens from {vocab_size} on",
        )


def check_tokenizer(store: TokenStore, tokenizer: Tokenizer, fix: str | None = None) -> None:
    """Refuses a store that another tokenizer made; `fix` says what to do instead, if not to tokenize it again.

    Raises:
        UserError: with the hashes of both.
    """
    if store.tokenizer().sha256 != tokenizer.sha256:
        raise UserError(
            "A run's data and its model must use the same tokenizer.",
            seen=f"sha256 {store.tokenizer().sha256[:16]} in the store, {tokenizer.sha256[:16]} expected",
            where=store.url,
            fix=fix or "tokenize the corpus with the model's tokenizer",
        )
