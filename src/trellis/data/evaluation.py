"""How much text the tokens of a validation set stand for."""

import numpy as np

from trellis.data.batch import Batch
from trellis.data.store.token_store import TokenStore


def count_bytes(store: TokenStore, batch: Batch) -> float:
    """The UTF-8 bytes of text that a batch's counted targets stand for.

    The count is exact if the store holds a byte-level tokenizer, and nearly so if that puts a space before texts or is
    one of SentencePiece's. Where tokens' lengths do not add up to their text's, and without a tokenizer, it uses the
    store's average.
    """
    mask = np.asarray(batch.loss_mask)
    tokenizer = None if store.tokenizer_sha256 is None else store.tokenizer()
    if tokenizer is None or not tokenizer.counts_bytes:
        return float(mask.sum()) * store.bytes_per_token
    each = tokenizer.token_bytes[np.asarray(batch.targets)]
    if tokenizer.prefix_bytes:  # the space before a document, unless it begins with one of its own
        each = each - tokenizer.prefix_bytes * (np.asarray(batch.tokens) == store.start_token)
    return float((each * mask).sum())
