"""How much text the tokens of a validation set stand for."""

import numpy as np

from trellis.data.batch import Batch
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError


def count_bytes(store: TokenStore, batch: Batch) -> float:
    """The UTF-8 bytes of text that a batch's counted targets stand for.

    The count is exact if the store holds a byte-level tokenizer, and nearly so for SentencePiece's. For others, and
    without a tokenizer, it uses the store's average.
    """
    mask = np.asarray(batch.loss_mask)
    try:
        tokenizer = store.tokenizer()
    except UserError:
        tokenizer = None
    if tokenizer is None or not tokenizer.counts_bytes:
        return float(mask.sum()) * store.bytes_per_token
    return float((tokenizer.token_bytes[np.asarray(batch.targets)] * mask).sum())
