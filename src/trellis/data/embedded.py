"""Stores of the embedded corpus, which a first run trains on: made once and kept."""

import hashlib
import os

from trellis.data.arguments import path
from trellis.data.store.token_store import TokenStore
from trellis.data.tokenizer import check_bpe_size
from trellis.data.tokenizing.sources import embedded_corpus
from trellis.data.tokenizing.tokenize import tokenize
from trellis.errors import UserError
from trellis.files import CACHE_ELSEWHERE, cache_folder


def embedded_stores(
    cache_dir: str | os.PathLike | None = None, vocab_size: int = 4096, *, progress: bool = False
) -> dict[str, TokenStore]:
    """The embedded corpus as token stores, `{"train": ..., "validation": ...}`, with a BPE trained on "train".

    The stores are under `cache_dir` (Trellis's folder in the user's cache if not given), in a folder named after the
    contents of the corpus and the vocabulary, so a second call opens them at once and another Python gets its own.

    Raises:
        UserError: they cannot be written there.
    """
    check_bpe_size(vocab_size, "embedded_stores")
    cache_dir = cache_dir if cache_dir is None else path(cache_dir, "cache_dir", "embedded_stores")
    digest = hashlib.sha256(f"{vocab_size}".encode())
    splits = {split: embedded_corpus(split) for split in ("train", "validation")}
    for source in splits.values():
        for file in source.files:
            digest.update(file.name.encode())
            with open(file.url, "rb") as text:
                digest.update(hashlib.sha256(text.read()).digest())
    folder = os.path.join(
        os.fspath(cache_dir or cache_folder("data")), f"embedded-{vocab_size}-{digest.hexdigest()[:16]}"
    )
    if cache_dir is None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            rule = "The user's cache folder must be writable: the training text is kept there."
            raise UserError(rule, seen=error.strerror, where=folder, fix=CACHE_ELSEWHERE) from error
    train = tokenize(splits["train"], os.path.join(folder, "train"), train_bpe=vocab_size, wait=True, progress=progress)
    validation = tokenize(
        splits["validation"],
        os.path.join(folder, "validation"),
        tokenizer=train.tokenizer(),
        wait=True,
        progress=progress,
    )
    return {"train": train, "validation": validation}
