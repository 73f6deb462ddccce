"""The units of work of tokenizing: a block of documents as read, and the same block as tokens."""

import dataclasses

import numpy as np

BLOCK_BYTES = 1 << 20  # bytes of documents handed to a worker at a time
PIECE_BYTES = 1 << 20  # longer texts are encoded in pieces of one to two times this: part of the format


@dataclasses.dataclass(slots=True)
class Block:
    """Some consecutive documents of one file, not yet parsed.

    Attributes:
        kind: "records" (`payload` is a list of dict and `Unreadable`), "json" (JSON lines, as bytes), "text" (texts
            divided by the job's separator, as bytes) or "piece" (part of one text that may continue in the next
            block, as bytes).
        name: the file, for messages.
        first: number of the first line or record, from 1.
        end: where the next block starts: position in the file (bytes after decompression, or records), number.
        raw: bytes of the file read so far, for progress.
        closed: False for a piece whose document continues.
        file: the index of the input that it is from.
    """

    kind: str
    payload: object
    name: str
    first: int
    end: tuple[int, int]
    raw: int = 0
    closed: bool = True
    file: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Unreadable:
    """A record of which its reader knows that it cannot be read.

    Attributes:
        problem: what is wrong with it.
    """

    problem: str


class NoField(str):
    """What is wrong with a record that has no field of the text's name: another name may be right."""


@dataclasses.dataclass(slots=True)
class Encoded:
    """The tokens of a block.

    Attributes:
        tokens: the documents' tokens, end-of-document ids included, one after the other.
        lengths: tokens of each document; if the block is not closed, the last is part of a document that continues.
        mask: u8, 1 where a token counts in the loss, or None if all do.
        text_bytes: UTF-8 bytes of the texts.
        filtered: documents that the user's filter left out.
        errors: (line or record number, what is wrong) of documents that cannot be used.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None
    text_bytes: int
    filtered: int
    errors: list[tuple[int, str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to turn blocks into tokens.

    Attributes:
        tokenizer: the serialized tokenizer.
        end_of_document: the text of its end-of-document token.
        dtype: name of the type of the tokens.
        field: the field of a record that holds its text; dots go into nested objects.
        separator: what divides the texts of a "text" block.
        filter: "module:function" or "path.py:function", called with each record; a false result leaves it out.
        chat: records are conversations, `field` holding a list of messages.
    """

    tokenizer: str
    end_of_document: str
    dtype: str
    field: str
    separator: str = "\n"
    filter: str | None = None
    chat: bool = False

    @property
    def all_fields(self) -> bool:
        """Whether other fields are needed, too: for the filter, or to see what a conversation has beside it."""
        return self.filter is not None or self.chat
