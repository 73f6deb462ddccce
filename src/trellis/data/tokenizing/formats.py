"""Readers that each read one source file: blocks of whole documents, from a position on."""

import codecs
import collections
import contextlib
import io
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from trellis.data.blocks import BLOCK_BYTES, PIECE_BYTES, Block, Unreadable
from trellis.data.tokenizing.streams import Stream, plain_name
from trellis.errors import UserError

Reader = Callable[..., Iterator[Block]]


def format_of(name: str) -> str:
    """The format that a file's name indicates.

    >>> format_of("a/b.jsonl.gz"), format_of("x.tsv"), format_of("README.md")
    ('jsonl', 'csv', 'text')
    """
    suffix = os.path.splitext(plain_name(name))[1].lower()
    return {
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".json": "json",
        ".parquet": "parquet",
        ".arrow": "arrow",
        ".feather": "arrow",
        ".csv": "csv",
        ".tsv": "csv",
        ".tar": "tar",
        ".tgz": "tar",
    }.get(suffix, "text")


def lines(url: str, name: str, start: tuple[int, int], *, kind: str, separator: str = "\n") -> Iterator[Block]:
    """Blocks of about a MiB, cut after a separator: JSON lines, or texts with a separator between them."""
    cut = separator.encode()
    with Stream(url) as stream:
        (position, rest), number = _begin(stream, start[0]), start[1]
        while True:
            data = stream.read(BLOCK_BYTES)
            rest += data
            if not data:
                at = len(rest)
            elif len(cut) == 1:
                at = rest.rfind(cut) + 1
            else:  # from the left, as texts are split: separators such as "\n\n" may overlap
                at = len(rest) - len(rest.split(cut)[-1])
            if data and not at:
                continue
            payload, rest = rest[:at], rest[at:]
            if payload:
                end = position + len(payload), number + payload.count(b"\n")
                body = payload[: -len(cut)] if payload.endswith(cut) else payload
                yield Block(kind, body, name, number, end, stream.raw_position)
                position, number = end
            if not data:
                return


def _begin(stream: Stream, position: int) -> tuple[int, bytes]:
    """Goes to a position: where that is, and bytes that were read there. A byte-order mark is not part of a text."""
    stream.skip(position)
    first = b"" if position else stream.read(len(codecs.BOM_UTF8))
    return (len(first), b"") if first == codecs.BOM_UTF8 else (position, first)


def whole(url: str, name: str, start: tuple[int, int]) -> Iterator[Block]:
    """One text in pieces of one to two MiB, cut after a line end if there is one: the first after each MiB counted from
    the last cut."""
    with Stream(url) as stream:
        (position, rest), number, ended = _begin(stream, start[0]), start[1], False
        while not ended or rest:
            while not ended and len(rest) <= 2 * PIECE_BYTES:
                data = stream.read(PIECE_BYTES)
                rest, ended = rest + data, not data
            if ended and len(rest) <= 2 * PIECE_BYTES:
                at = len(rest)
            else:
                at = rest.find(b"\n", PIECE_BYTES, 2 * PIECE_BYTES) + 1 or _character_end(rest, 2 * PIECE_BYTES)
            payload, rest = rest[:at], rest[at:]
            if payload:
                end = position + at, max(number + payload.count(b"\n"), 2)  # 1 is the first piece's alone
                yield Block("piece", payload, name, number, end, stream.raw_position, closed=ended and not rest)
                position, number = end


def _character_end(data, at):
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def in_blocks(records, name, position, raw):
    batch, held = [], 0
    for record in records:
        batch.append(record)
        held += len(str(record))
        if held >= BLOCK_BYTES:
            yield Block("records", batch, name, position + 1, (position + len(batch), position + len(batch) + 1), raw())
            position += len(batch)
            batch, held = [], 0
    if batch:
        yield Block("records", batch, name, position + 1, (position + len(batch), position + len(batch) + 1), raw())


def csv_records(url: str, name: str, start: tuple[int, int]) -> Iterator[Block]:
    """Rows of a CSV (or, by its name, TSV) file whose first row names the columns.

    A row with more fields than columns cannot be read.
    """
    import csv
    import sys

    csv.field_size_limit(sys.maxsize)
    with Stream(url) as stream:
        text = io.TextIOWrapper(io.BufferedReader(RawFile(stream)), encoding="utf-8-sig", newline="")
        rows = csv.DictReader(text, delimiter="\t" if plain_name(name).lower().endswith(".tsv") else ",", strict=True)

        def records():
            try:
                _check_columns(rows.fieldnames or (), f"{name}, line 1")
                for number, row in enumerate(rows):
                    if number >= start[0]:  # further fields of a row are under None
                        further = row.get(None)
                        yield Unreadable(f"{len(further)} more fields than columns: {further}") if further else row
            except UnicodeDecodeError as error:
                raise UserError(
                    "A CSV file must be UTF-8.",
                    seen=f"byte {error.object[error.start]:#04x}",
                    where=f"{name}, after line {rows.line_num}",
                    fix="convert the file to UTF-8",
                ) from error
            except csv.Error as error:
                raise UserError(
                    "A CSV file must be well formed: every quoted field must end with a closing quote.",
                    seen=error,
                    where=f"{name}, line {rows.line_num}",
                    fix="close the quote; write a quote inside a quoted field twice",
                ) from error

        yield from in_blocks(records(), name, start[0], lambda: stream.raw_position)


def _check_columns(names, where):
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise UserError(
            "A table cannot have two columns of the same name.",
            seen=f"{twice[0]!r} twice",
            where=where,
            fix="rename one of them",
        )


def tar_records(url: str, name: str, start: tuple[int, int]) -> Iterator[Block]:
    """Samples of a WebDataset-style tar: files that share a name up to its first dot are one record.

    A `.json` member's keys become fields; every other member is a field called by its suffix (`txt`); the name is
    `__key__`.
    """
    import tarfile

    def records(stream):
        raw = RawFile(stream)
        with tarfile.open(fileobj=raw, mode="r|") as tar:
            files = ((*_key_and_suffix(file.name), tar.extractfile(file).read()) for file in tar if file.isfile())
            for key, of_record in itertools.groupby(files, key=lambda file: file[0]):
                yield _tar_record(key, of_record)
        if not raw.is_zero_from(tar.offset):  # tarfile takes a damaged header for the end
            raise tarfile.ReadError(f"no end at byte {tar.offset:,}, after the last file that can be read")

    with Stream(url) as stream:
        try:
            numbered = (r for i, r in enumerate(records(stream)) if i >= start[0])
            yield from in_blocks(numbered, name, start[0], lambda: stream.raw_position)
        except tarfile.ReadError as error:
            raise UserError(
                "A .tar file must be one complete tar archive.",
                seen=error,
                where=url,
                fix="download the file again, or leave it out; keep archives apart that were joined",
            ) from error


def _key_and_suffix(name):
    folder, base = os.path.split(name)
    stem, _, suffix = base.partition(".")
    return os.path.join(folder, stem), suffix


def _tar_record(key, files):
    record, suffixes = dict[str, Any](__key__=key), set()
    for _, suffix, data in files:
        if suffix in suffixes:
            return Unreadable(f"two files {key}.{suffix}")
        suffixes.add(suffix)
        try:
            if suffix == "json":
                record |= json.loads(data)
            else:
                record[suffix] = data.decode() if suffix in ("txt", "text", "md") else data
        except (ValueError, TypeError) as error:
            return Unreadable(f"file {key}.{suffix}: {error}")
    return record


class RawFile(io.RawIOBase):
    """A Stream as a file object for the standard library's readers."""

    def __init__(self, stream):
        self._stream, self._position, self._filled = stream, 0, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        if filled := len(data.rstrip(b"\0")):
            self._filled = self._position + filled
        self._position += len(data)
        return len(data)

    def is_zero_from(self, position):
        """Reads to the end, and returns whether all from `position` on are zeros, a tar's block or more."""
        while self.readinto(bytearray(1 << 16)):
            pass
        return self._filled <= position <= self._position - 512


def parquet_records(url: str, name: str, start: tuple[int, int], *, columns: list[str] | None) -> Iterator[Block]:
    """Rows of a Parquet file, read by row group."""
    parquet = _arrow("pyarrow.parquet", url)

    with Stream(url) as stream, _seekable(stream) as seekable, _arrow_errors(url):
        file = parquet.ParquetFile(seekable)
        columns = _columns(file.schema_arrow.names, columns, name)
        first, groups = 0, list(range(file.num_row_groups))
        while groups and first + (rows := file.metadata.row_group(groups[0]).num_rows) <= start[0]:
            first += rows
            groups.pop(0)

        def records():
            skip = start[0] - first
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=columns):
                yield from _rows(batch.slice(min(skip, len(batch))))
                skip = max(0, skip - len(batch))

        yield from in_blocks(records(), name, start[0], lambda: stream.raw_position)


def arrow_records(url: str, name: str, start: tuple[int, int], *, columns: list[str] | None) -> Iterator[Block]:
    """Rows of an Arrow IPC file or stream (also those that Hugging Face datasets store)."""
    ipc = _arrow("pyarrow.ipc", url)

    with Stream(url) as stream, _seekable(stream) as seekable, _arrow_errors(url):
        is_file = seekable.read(6) == b"ARROW1"
        seekable.seek(0)
        reader = (ipc.open_file if is_file else ipc.open_stream)(seekable)
        columns = _columns(reader.schema.names, columns, name)

        def records():
            skip = start[0]
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                chosen = batch.select(columns)
                for begin in range(min(skip, len(batch)), len(batch), 1024):
                    yield from _rows(chosen.slice(begin, 1024))
                skip = max(0, skip - len(batch))

        yield from in_blocks(records(), name, start[0], lambda: stream.raw_position)


def _arrow(module, url):
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            "Reading Parquet and Arrow needs pyarrow.", seen=error, where=url, fix="pip install 'trellis[parquet]'"
        ) from error


@contextlib.contextmanager
def _seekable(stream):
    """A file whose bytes can be read in any order: if they are compressed, in a file without a name."""
    if stream.seekable:
        yield stream.file
        return
    with tempfile.TemporaryFile() as file:
        while data := stream.read(1 << 20):
            file.write(data)
        file.seek(0)
        yield file


def _columns(names, wanted, where):
    """Those of the columns that are wanted; all, if there are none."""
    columns = [name for name in names if wanted and name in wanted] or names
    _check_columns(columns, where)
    return columns


def _rows(batch):
    """The rows of a batch. pyarrow does not check that a file's strings are UTF-8 before it makes Python's of them."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [Unreadable(f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}")]
        return [row for i in range(len(batch)) for row in _rows(batch.slice(i, 1))]


class _arrow_errors:
    """Turns pyarrow's complaints about a file's contents into the user's error."""

    def __init__(self, url):
        self._url = url

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        own = kind is not None and (kind.__module__ or "").startswith("pyarrow")
        if own or (isinstance(error, OSError) and error.errno is None):  # pyarrow's: a system's has a number
            raise UserError(
                "A Parquet or Arrow file must be complete.",
                seen=str(error).splitlines()[0],
                where=self._url,
                fix="download the file again, or leave it out",
            ) from error
