"""Tokenizers: any Hugging Face `tokenizer.json`, one trained here, or bytes; all as one `tokenizers.Tokenizer`."""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trellis.data.arguments import path as as_path
from trellis.data.arguments import whole
from trellis.errors import UserError, shortened

END_OF_DOCUMENT = "<|endoftext|>"
# Spaces and characters that tokenizers are known to drop, to write as others, or not to know.
_SAMPLE = " Two  spaces,\tnaïve cafés: ﬁ Ｗ ™ ☃ 中文 😀\n "
NO_END = "A tokenizer must have an end-of-document token."
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[SEP]")


class Tokenizer:
    """Text to token ids and back, with the id that ends a document.

    Special tokens written out in a text are encoded as ordinary text, so an end-of-document id among the tokens is
    always the end of a document.

    >>> t = byte_tokenizer()
    >>> t.encode("hé").tolist(), t.vocab_size, t.end_of_document
    ([104, 195, 169], 257, 256)
    >>> t.decode([104, 195, 169])
    'hé'
    """

    def __init__(self, serialized: str, *, end_of_document: str | None = None, where: str = "tokenizer.json"):
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_str(serialized)
        except Exception as error:
            raise UserError(
                "A tokenizer must be a tokenizer.json of Hugging Face tokenizers.",
                seen=error,
                where=where,
                fix="use a tokenizer.json, or a folder that contains one",
            ) from error
        if dropout := getattr(self._inner.model, "dropout", None):
            raise UserError(
                "A tokenizer must encode a text alike every time.",
                seen=f"a model with dropout {dropout:g}",
                where=where,
                fix='set "dropout": null in the model of the tokenizer.json',
            )
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        self.json, self._where = serialized, where
        self.end_of_document_text = self._end_text(end_of_document, where)
        self.end_of_document = self._inner.token_to_id(self.end_of_document_text)
        self.is_bytes = _is_bytes(serialized)

    def _end_text(self, wanted, where):
        for text in (wanted,) if wanted else _END_NAMES:
            if self._inner.token_to_id(text) is not None:
                return text
        raise UserError(
            NO_END,
            seen=f"no {wanted}" if wanted else "none of " + " ".join(_END_NAMES),
            where=where,
            fix="name one with --end-of-document",
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def sha256(self) -> str:
        """The hash of the serialized tokenizer and its end-of-document text."""
        return hashlib.sha256((self.json + "\0" + self.end_of_document_text).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text, without special tokens: `i64["tokens"]`."""
        with self._encoding(text):
            return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.int64)

    @property
    def around(self) -> list[str]:
        """The special tokens that `transformers` puts around a text unless told not to; they are never put here."""
        found = self._inner.encode("", add_special_tokens=True)
        return [token for token, special in zip(found.tokens, found.special_tokens_mask, strict=True) if special]

    def encode_markup(self, text: str) -> np.ndarray:
        """The ids of one text in which special tokens that are written out are recognized: `i64["tokens"]`."""
        with self._encoding(text):
            return np.asarray(self._markup.encode(text, add_special_tokens=False).ids, np.int64)

    @functools.cached_property
    def _markup(self):
        import tokenizers

        found = tokenizers.Tokenizer.from_str(self.json)
        found.no_truncation()
        found.no_padding()
        return found

    def encode_batch(self, texts: list[str], dtype=np.uint32) -> list[np.ndarray]:
        """The ids of many texts, without special tokens."""
        if self.is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in texts]
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        with self._encoding():
            return [np.array(e.ids, dtype) for e in encode(texts, add_special_tokens=False)]

    @contextlib.contextmanager
    def _encoding(self, text: Any = None):
        """Explains what the library raises: exceptions without a class of their own, and a TypeError for no text."""
        try:
            yield
        except Exception as error:
            if type(error) is TypeError and text is not None:
                raise UserError(
                    "A tokenizer can encode only a text, in valid UTF-8.",
                    seen=shortened(ascii(text), 80),
                    where=self._where,
                    fix="pass one text, as in encode('def ')",
                ) from error
            if type(error) is not Exception:
                raise
            raise UserError(
                "The tokenizer must be able to encode any text.",
                seen=error,
                where=self._where,
                fix="add the token to its vocabulary, or set its unk_token to one that is in it",
            ) from error

    def decode(self, ids, *, special: bool = True) -> str:
        """The text of some ids; special tokens are written out unless `special` is False."""
        found = np.asarray(ids if hasattr(ids, "__array__") else [*ids] if isinstance(ids, Iterable) else ids)
        whole_numbers = found.size == 0 or (found.dtype.kind in "iu" and 0 <= found.min() <= found.max() < 1 << 32)
        if found.ndim != 1 or not whole_numbers:
            raise UserError(
                "A tokenizer can decode only a sequence of token ids, each a whole number, 0 or more.",
                seen=shortened(repr(ids), 80),
                where=self._where,
                fix="pass what encode() returns, as in decode([100, 101])",
            )
        return self._inner.decode(found.tolist(), skip_special_tokens=not special)

    @functools.cached_property
    def counts_bytes(self) -> bool:
        """Whether tokens' own lengths add up to their text's, as `token_bytes` has them: not where a tokenizer drops
        spaces, as WordPiece does, marks the parts of a word, writes other characters than the text's, or knows few."""
        model = json.loads(self.json)["model"]
        marks = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model.get("type") in ("WordPiece", "WordLevel") or marks:
            return False
        try:
            return self._bytes_beyond(_SAMPLE) in (0, 1)  # of a space before it
        except UserError:  # it cannot encode all of it
            return False

    @functools.cached_property
    def prefix_bytes(self) -> int:
        """The bytes that the tokens of a text have more than the text: 1 if a space is put before it, else 0."""
        return max(0, self._bytes_beyond("a"))

    def _bytes_beyond(self, text):
        return int(self.token_bytes[self.encode(text)].sum()) - len(text.encode())

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """How many UTF-8 bytes of text each id stands for: `i32["vocab"]`; special tokens stand for none.

        The count is exact if the tokenizer works on bytes; for others it is that of the decoded text.
        """
        out = np.zeros(self.vocab_size, np.int32)
        special = {i for i, token in self._inner.get_added_tokens_decoder().items() if token.special}
        byte_level = "ByteLevel" in self.json
        characters = _byte_characters()
        for text, i in self._inner.get_vocab(with_added_tokens=True).items():
            if i in special:
                continue
            if byte_level and all(c in characters for c in text):
                out[i] = len(text)
            elif re.fullmatch("<0x[0-9A-F]{2}>", text):  # a byte that the vocabulary has no character for
                out[i] = 1
            else:
                out[i] = len(text.replace("\u2581", " ").encode())
        return out


def load_tokenizer(path: str, *, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer in a tokenizer.json, a Hugging Face folder, or (with the `hf` extra) a repository name.

    A folder's tokenizer_config.json names the end-of-document token, if it has an `eos_token`. From a token store comes
    the tokenizer that made it, with its end of documents.

    Raises:
        UserError: there is none, it cannot be read, or it has no end-of-document token.
    """
    where = path = as_path(path, "path", "load_tokenizer")
    if end_of_document is not None and not isinstance(end_of_document, str):
        rule, fix = "The end-of-document token must be given by its text.", "write it as it is in the tokenizer.json"
        raise UserError(rule, seen=f"end_of_document={end_of_document!r}", where="load_tokenizer", fix=fix)
    if os.path.isdir(path):
        config = os.path.join(path, "tokenizer_config.json")
        if end_of_document is None:
            end_of_document = _end_in(config) if os.path.exists(config) else _end_in_store(path)
        path = os.path.join(path, "tokenizer.json")
    elif not os.path.exists(path) and "/" in path and not path.endswith(".json") and "://" not in path:
        path = _from_hub(path)
    try:
        with open(path, encoding="utf-8") as file:
            serialized = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "A tokenizer must be a tokenizer.json of Hugging Face tokenizers.",
            seen=error,
            where=where,
            fix="use a tokenizer.json, or a folder that contains one",
        ) from error
    return Tokenizer(serialized, end_of_document=end_of_document, where=where)


def _end_in(config):
    """The end-of-document token that a tokenizer_config.json names, or None."""
    with open(config, encoding="utf-8") as file:
        text = file.read()
    try:
        eos = json.loads(text).get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
    except (ValueError, AttributeError, KeyError) as error:
        eos, wrong = None, str(error)
    else:
        wrong = None if eos is None or isinstance(eos, str) else f"eos_token: {eos!r}"
    if wrong:
        raise UserError(
            "A tokenizer_config.json must be a JSON object whose eos_token is a text or has one.",
            seen=wrong,
            where=config,
            fix="download it again, or name the token with --end-of-document",
        )
    return eos


def _end_in_store(path):
    """The end-of-document token of the store that a folder is, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(path, "zarr.json"), encoding="utf-8") as file:
            return json.load(file)["attributes"]["trellis"]["tokenizer"]["end_of_document"]
    return None


def _from_hub(name):
    try:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(name, "tokenizer.json")
    except ImportError as error:
        raise UserError(
            "Loading a tokenizer from the Hugging Face hub needs the package huggingface_hub.",
            seen=f"no such file: {name}",
            where="--tokenizer",
            fix="use an existing path, or pip install 'trellis[hf]'",
        ) from error
    except Exception as error:
        raise UserError(
            "A tokenizer must be a file, a folder or a repository on the Hugging Face hub.",
            seen=error,
            where=f"--tokenizer {name}",
            fix="check the name and the network",
        ) from error


def byte_tokenizer() -> Tokenizer:
    """Every byte is its own token (ids 0-255); the end of a document is 256."""
    vocab = _byte_characters() | {END_OF_DOCUMENT: 256}
    return Tokenizer(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [
                    {
                        "id": 256,
                        "content": END_OF_DOCUMENT,
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                        "special": True,
                    }
                ],
                "normalizer": None,
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": False,
                    "use_regex": False,
                },
                "post_processor": None,
                "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": False,
                    "byte_fallback": False,
                    "ignore_merges": False,
                    "vocab": vocab,
                    "merges": [],
                },
            },
            ensure_ascii=False,
            sort_keys=True,
        )
    )


# The trainer reserves memory for every token that it is asked for, and ends the process if there is not enough.
_MOST_TOKENS = 1_000_000


def check_bpe_size(vocab_size: int, where: str) -> None:
    """Refuses vocabularies that no byte-level BPE can have.

    Args:
        vocab_size: the number of tokens, including the end of a document.
        where: the option or field that asks for them.
    """
    vocab_size = vocab_size if type(vocab_size) is int else whole(vocab_size, "vocab_size", where, least=257)
    if not 257 <= vocab_size <= _MOST_TOKENS:
        raise UserError(
            f"A byte-level vocabulary must have 257 (256 bytes and the end of a document) to {_MOST_TOKENS:,} tokens.",
            seen=vocab_size,
            where=where,
            fix="use a size in that range, as in 32768",
        )


def train_bpe(texts, vocab_size: int) -> Tokenizer:
    """A byte-level BPE trained on an iterator of texts, with `vocab_size` ids, the last of them special.

    Sennrich, Haddow and Birch (2016), over bytes as in GPT-2 (2019).

    Args:
        texts: texts, or lists of texts.
        vocab_size: the number of ids.

    Raises:
        UserError: it is a single text, whose letters would be texts, or the size is one that no such BPE has.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    check_bpe_size(vocab_size, "--train-bpe")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        _several(texts),
        trainers.BpeTrainer(
            vocab_size=vocab_size - 1, show_progress=False, initial_alphabet=sorted(_byte_characters())
        ),
    )
    inner.add_special_tokens([END_OF_DOCUMENT])
    return Tokenizer(inner.to_str())


def _several(texts: Any) -> Iterator[str | list[str]]:
    """Texts, or lists of texts, if that is what they are."""
    wrong = isinstance(texts, str) or not isinstance(texts, Iterable)
    for text in (None,) if wrong else texts:
        if wrong or not isinstance(text, str | list | tuple):
            raise UserError(
                "A BPE is trained on several texts.",
                seen=shortened(repr(texts if wrong else text), 80),
                where="train_bpe",
                fix="pass a list of texts, or another iterable of them",
            )
        yield text


def _byte_characters():
    """The character for each byte in byte-level vocabularies (GPT-2); printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _is_bytes(serialized):
    """Whether a serialized tokenizer gives every byte as its id, as `byte_tokenizer` does, and nothing else."""
    found = json.loads(serialized)
    model, pieces = found["model"], found.get("pre_tokenizer") or {}
    return (
        model["vocab"] == _byte_characters() | {END_OF_DOCUMENT: 256}
        and not model.get("merges")
        and not found.get("normalizer")
        and pieces.get("type") == "ByteLevel"
        and not pieces.get("add_prefix_space")
        and all(token["special"] for token in found.get("added_tokens") or ())
    )
