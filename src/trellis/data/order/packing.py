"""Rows of a fixed length from a token store: concatenated and cut, or whole documents, packed or padded."""

import dataclasses

import numpy as np

from trellis.data.batch import Batch
from trellis.data.store.token_store import TokenStore
from trellis.errors import UserError

PACKINGS = ("chunk", "best_fit", "pad")
PACK_DOCUMENTS = 1 << 14  # documents that are packed among each other


def pick(batches: list[Batch], rows: np.ndarray) -> Batch:
    """The given rows of the concatenation of several batches."""
    fields = [f.name for f in dataclasses.fields(Batch)]
    return Batch(**{name: np.concatenate([np.asarray(getattr(b, name)) for b in batches])[rows] for name in fields})


def padding(rows: int, sequence_length: int) -> Batch:
    """Rows that are all padding."""
    zeros = np.zeros((rows, sequence_length), np.int32)
    return Batch(tokens=zeros, targets=zeros, loss_mask=zeros.astype(np.float32), segment_ids=zeros, positions=zeros)


class ChunkRows:
    """The corpus as one stream, cut every `sequence_length` tokens; row r predicts tokens [r*S, (r+1)*S).

    Every token of every document is a target exactly once in all rows together; the last row is padded.
    """

    def __init__(self, store: TokenStore, sequence_length: int):
        self.store, self.sequence_length = store, sequence_length

    @property
    def num_rows(self) -> int:
        """The number of rows that the tokens written so far make."""
        whole, rest = divmod(self.store.num_tokens, self.sequence_length)
        return whole + (1 if rest and self.store.complete else 0)

    def wait_for(self, rows: int) -> None:
        """Returns once `rows` rows are there or the store is complete."""
        if self.num_rows < rows:
            self.store.wait_for(rows * self.sequence_length)

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens in the given rows (`i64["batch"]`), without padding."""
        left = self.store.num_tokens - np.asarray(rows, np.int64) * self.sequence_length
        return int(np.clip(left, 0, self.sequence_length).sum())

    def read(self, rows: np.ndarray) -> Batch:
        """The given rows (`i64["batch"]`)."""
        length = self.sequence_length
        # The last pieces of a longer row may lie past the end.
        begins = np.minimum(np.asarray(rows, np.int64) * length, self.store.num_tokens)
        inputs, targets, starts = self.store.shifted(begins, length)
        starts[:, 0] = True
        real = np.arange(length) < np.minimum(self.store.num_tokens - begins, length)[:, None]
        batch = _empty(len(begins), length)
        batch.loss_mask[:] = real
        if self.store.has_loss_mask:

            def fill(i):
                begin, stop = int(begins[i]), min(int(begins[i]) + length, self.store.num_tokens)
                batch.loss_mask[i, : stop - begin] = self.store.loss_mask(begin, stop)

            self.store.each(fill, len(begins))
        return _finish(batch, inputs, targets, starts, real)


class PieceRows:
    """Whole documents in rows: one to a row ("pad"), or several by best fit ("best_fit").

    A document longer than a row is cut into pieces of a whole row and a rest. "best_fit" packs the pieces of
    `PACK_DOCUMENTS` documents at a time: the longest first, each into the fullest row that has room for it, else into a
    new one; among equal rows or pieces the earlier comes first. Opening reads the offset of every document once, and
    keeps 24 bytes for each piece.
    """

    def __init__(self, store: TokenStore, sequence_length: int, *, pack: bool):
        if not store.complete:
            raise UserError(
                "Packing whole documents needs a complete store.",
                seen=f"{store.num_tokens:,} tokens so far",
                where=store.url,
                fix="wait until it is complete, or use packing chunk",
            )
        self.store, self.sequence_length = store, sequence_length
        begins, lengths, counts = [], [], [[0]]
        for start in range(0, store.num_documents, PACK_DOCUMENTS):
            stop = min(start + PACK_DOCUMENTS, store.num_documents)
            piece_begins, piece_lengths = _pieces(store.offsets(start, stop + 1), sequence_length)
            if pack:
                order, sizes = best_fit(piece_lengths, sequence_length)
            else:
                order, sizes = np.arange(len(piece_begins)), np.ones(len(piece_begins), np.int64)
            begins.append(piece_begins[order])
            lengths.append(piece_lengths[order])
            counts.append(sizes)
        self._begins, self._lengths = np.concatenate(begins), np.concatenate(lengths)
        self._first = np.cumsum(np.concatenate(counts))

    @property
    def num_rows(self) -> int:
        return len(self._first) - 1

    def wait_for(self, rows: int) -> None:
        """The store is complete: nothing to wait for."""

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens in the given rows (`i64["batch"]`), without padding."""
        return sum(int(self._lengths[self._first[row] : self._first[row + 1]].sum()) for row in rows)

    def read(self, rows: np.ndarray) -> Batch:
        """The given rows (`i64["batch"]`)."""
        shape = (len(rows), self.sequence_length)
        inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        batch, starts, real = _empty(*shape), np.zeros(shape, bool), np.zeros(shape, bool)
        batch.loss_mask[:] = 0

        def fill(i):
            at = 0
            for piece in range(self._first[rows[i]], self._first[rows[i] + 1]):
                begin, size = int(self._begins[piece]), int(self._lengths[piece])
                here = slice(at, at + size)
                a, b, _ = self.store.shifted(np.array([begin]), size)
                inputs[i, here], targets[i, here] = a[0], b[0]
                batch.loss_mask[i, here] = self.store.loss_mask(begin, begin + size)
                starts[i, at], real[i, here] = True, True
                at += size

        self.store.each(fill, len(rows))
        return _finish(batch, inputs, targets, starts, real)


def open_rows(store: TokenStore, sequence_length: int, packing: str) -> ChunkRows | PieceRows:
    """The rows of a store under one of `PACKINGS`."""
    if packing not in PACKINGS:
        raise UserError(
            "The packing must be one that Trellis knows.",
            seen=packing,
            where="packing",
            fix="use one of " + ", ".join(PACKINGS),
        )
    if store.complete and not store.num_tokens:
        raise UserError(
            "A corpus must have at least one document.",
            seen="0 tokens",
            where=store.url,
            fix="give a store with tokens in it",
        )
    if packing == "chunk":
        return ChunkRows(store, sequence_length)
    return PieceRows(store, sequence_length, pack=packing == "best_fit")


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the pieces in the order in which rows hold them, and the number of pieces in each row.

    Args:
        lengths: `i64["pieces"]`, each from 1 to `capacity`.

    Returns:
        order `i64["pieces"]`; sizes `i64["rows"]`.

    >>> order, sizes = best_fit(np.array([3, 5, 2, 4]), 8)
    >>> order.tolist(), sizes.tolist()
    ([1, 0, 3, 2], [2, 2])
    """
    rows: list[list[int]] = []
    room_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by room left, latest first
    rooms = 0  # bit r is set if some row has r left
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + ((fitting & -fitting).bit_length() - 1)
            row = room_rows[room].pop()
            if not room_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(int(piece))
        left = room - length
        if left:
            room_rows[left].append(row)
            rooms |= 1 << left
    return (
        np.array([piece for row in rows for piece in row], np.int64),
        np.array([len(row) for row in rows], np.int64),
    )


def _pieces(offsets, capacity):
    """Documents cut into pieces of at most `capacity` tokens: where each piece begins, and its length."""
    lengths = np.diff(offsets)
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = offsets[:-1][document] + within * capacity
    return begins, np.minimum(lengths[document] - within * capacity, capacity)


def _empty(rows, length):
    fields = {f.name: np.empty((rows, length), np.int32) for f in dataclasses.fields(Batch)}
    return Batch(**fields | {"loss_mask": np.empty((rows, length), np.float32)})


def _finish(batch, inputs, targets, starts, real):
    """Fills a batch whose segments begin at `starts`; what is not `real` is padding."""
    index = np.arange(inputs.shape[1], dtype=np.int32)
    np.maximum.accumulate(np.where(starts, index, np.int32(0)), axis=1, out=batch.positions)
    np.subtract(index, batch.positions, out=batch.positions)
    np.cumsum(starts, axis=1, dtype=np.int32, out=batch.segment_ids)
    batch.tokens[:], batch.targets[:] = inputs, targets
    if not real.all():
        for array in (batch.tokens, batch.targets, batch.segment_ids, batch.positions):
            array[~real] = 0
    return batch
