"""JSON files as records, of which no more is in memory than a block and the longest record."""

import io
import itertools
import json
import re
from collections.abc import Iterator

from trellis.data.blocks import BLOCK_BYTES, Block
from trellis.data.tokenizing.formats import RawFile, in_blocks, lines
from trellis.data.tokenizing.streams import Stream
from trellis.errors import UserError

_SPACE = re.compile(r"[ \t\n\r]*")
_AFTER_A_NUMBER = frozenset(", ]\n\r\t")


def json_records(url: str, name: str, start: tuple[int, int]) -> Iterator[Block]:
    """A .json file: JSON lines, objects one after the other, or an array of objects."""
    with Stream(url) as stream:
        head = stream.read(1 << 16)
    first, _, rest = head.lstrip().partition(b"\n")
    if first.startswith(b"{") and _is_json(first) and rest.strip():
        yield from lines(url, name, start, kind="json")
        return
    with Stream(url) as stream:
        text = io.TextIOWrapper(
            io.BufferedReader(RawFile(stream)), encoding=json.detect_encoding(head), errors="surrogatepass", newline=""
        )
        values = Values(text)
        try:
            records = itertools.islice(values.elements(), start[0], None)
            yield from in_blocks(records, name, start[0], lambda: stream.raw_position)
        except (ValueError, RecursionError) as error:
            raise UserError(
                "A .json file must contain one array of objects, one object, or an object on each line.",
                seen=values.place(error) if isinstance(error, json.JSONDecodeError) else error,
                where=url,
                fix="fix the file, or name it .jsonl if it has an object on each line",
            ) from error


def _is_json(line):
    try:
        json.loads(line)
        return True
    except (ValueError, RecursionError):
        return False


class Values:
    """The values in a text that is read as far as they need it."""

    def __init__(self, text: io.TextIOBase):
        self._text, self._decode = text, json.JSONDecoder().raw_decode
        self._data, self._at, self._ended = "", 0, False
        self._lines, self._characters = 1, 0  # before `data`

    def elements(self) -> Iterator[object]:
        """The elements of the array that the text is, or the values that it has one after the other.

        Raises:
            json.JSONDecodeError: it is not JSON.
        """
        if self._next() != "[":
            while self._next():
                yield self._value()
            return
        self._at += 1
        if self._next() != "]":
            yield self._value()
        while self._next() == ",":
            self._at += 1
            yield self._value()
        if self._next() != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", self._data, self._at)
        self._at += 1
        if self._next():
            raise json.JSONDecodeError("Extra data", self._data, self._at)

    def place(self, error: json.JSONDecodeError) -> str:
        """What an error says, with its place in the whole text."""
        line, character = self._lines + self._data.count("\n", 0, error.pos), self._characters + error.pos
        return f"{error.msg}: line {line} (char {character})"

    def _value(self):
        self._next()
        while True:
            try:
                value, end = self._decode(self._data, self._at)
                if self._ended or not isinstance(value, int | float) or self._data[end : end + 1] in _AFTER_A_NUMBER:
                    self._at = end  # other numbers may go on in what is not read yet
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise
            self._read()

    def _next(self):
        """The next character that is not space, or nothing at the end."""
        while True:
            self._at = _SPACE.match(self._data, self._at).end()
            if self._at < len(self._data) or self._ended:
                return self._data[self._at : self._at + 1]
            self._read()

    def _read(self):
        """Reads on, twice as far each time that a value does not end before."""
        self._lines += self._data.count("\n", 0, self._at)
        self._characters += self._at
        self._data, self._at = self._data[self._at :], 0
        more = self._text.read(max(BLOCK_BYTES, len(self._data)))
        self._data, self._ended = self._data + more, not more
