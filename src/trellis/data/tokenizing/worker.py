"""A worker of the tokenizing pool: blocks in, tokens out. Imports neither JAX nor the rest of Trellis."""

import importlib
import importlib.util
import json
import os
import pickle
import struct
import sys

import numpy as np

from trellis.data.blocks import Block, Encoded, Job, NoField, Unreadable
from trellis.data.tokenizer import Tokenizer
from trellis.data.tokenizing.chat import check_messages, encode_messages
from trellis.errors import UserError
from trellis.files import is_utf8


class Encoder:
    """Turns blocks into tokens, alike in a worker process, in this process and on Ray."""

    def __init__(self, job: Job):
        self._job, self._dtype = job, np.dtype(job.dtype)
        self._tokenizer = Tokenizer(job.tokenizer, end_of_document=job.end_of_document)
        self._end = self._tokenizer.end_of_document
        self._filter = load_function(job.filter) if job.filter else None

    def __call__(self, block: Block) -> Encoded:
        errors: list[tuple[int, str]] = []
        numbers, records = self._records(block, errors)
        kept, kept_numbers, filtered = [], [], 0
        for number, record in zip(numbers, records, strict=True):
            if not self._wanted(record, block.name, number):
                filtered += 1
                continue
            text, problem = self._text(record)
            if problem:
                errors.append((number, problem))
            elif text:
                kept.append(text)
                kept_numbers.append(number)
        tokens, masks, text_bytes = self._encode(kept)
        if self._ends(tokens):  # for a reader, the document would end there
            ending = [self._ends([one]) for one in tokens]
            problem = f"its text is encoded with {self._tokenizer.end_of_document_text!r}, which ends documents"
            errors += [(number, problem) for number, ends in zip(kept_numbers, ending, strict=True) if ends]
            kept = [text for text, ends in zip(kept, ending, strict=True) if not ends]
            tokens, masks, text_bytes = self._encode(kept)
        if block.closed:
            end = np.array([self._end], self._dtype)
            parts = [part for t in tokens for part in (t, end)]
            lengths = [len(t) + 1 for t in tokens]
            if self._job.chat:
                masks = [part for m in masks for part in (m, np.zeros(1, np.uint8))]
        else:
            parts, lengths = tokens, [len(t) for t in tokens]
        return Encoded(
            _join(parts, self._dtype),
            np.array(lengths, np.uint32),
            _join(masks, np.dtype(np.uint8)) if self._job.chat else None,
            text_bytes,
            filtered,
            sorted(errors),
        )

    def texts(self, block: Block) -> tuple[list[str], list[tuple[int, str]]]:
        """The texts of a block's documents, for training a tokenizer, and what is wrong with those without one."""
        errors: list[tuple[int, str]] = []
        numbers, records = self._records(block, errors)
        texts = []
        for number, record in zip(numbers, records, strict=True):
            if not self._wanted(record, block.name, number):
                continue
            text, problem = self._text(record)
            if problem:
                errors.append((number, problem))
            else:
                texts.extend([m["content"] for m in text] if self._job.chat else [text])
        return texts, sorted(errors)

    def _wanted(self, record, name, number):
        if self._filter is None:
            return True
        try:
            return bool(self._filter({"text": record} if isinstance(record, str) else record))
        except Exception as error:
            raise UserError(
                "A filter must return true or false for every record.",
                seen=f"{type(error).__name__}: {error}",
                where=f"{name}, line {number}, filter {self._job.filter}",
                fix="fix the filter",
            ) from error

    def _records(self, block, errors):
        if block.kind == "records":
            numbered = list(enumerate(block.payload, block.first))
            errors += [(number, record.problem) for number, record in numbered if isinstance(record, Unreadable)]
            kept = [(number, record) for number, record in numbered if not isinstance(record, Unreadable)]
            return [number for number, _ in kept], [record for _, record in kept]
        if block.kind == "piece":
            pieces = [(block.first, block.payload)]
        else:
            separator = "\n" if block.kind == "json" else self._job.separator
            pieces = []
            number = block.first
            for part in block.payload.split(separator.encode()):
                pieces.append((number, part))
                number += 1 if separator == "\n" else part.count(b"\n") + separator.count("\n")
        numbers, records = [], []
        for number, part in pieces:
            if not part.strip(b" \t\r\n") and not (block.kind == "piece" and (number > 1 or not block.closed)):
                continue  # an empty document; blank pieces of a longer text are kept
            try:
                text = part.decode()
                record = json.loads(text) if block.kind == "json" else text
            except UnicodeDecodeError as error:
                problem = f"not UTF-8: byte {part[error.start]:#04x} at {error.start}"
                zipped = part.startswith(b"PK\3\4")
                errors.append((number, "a zip archive, which has to be unpacked" if zipped else problem))
                continue
            except (ValueError, RecursionError) as error:
                errors.append((number, f"not JSON: {error}"))
                continue
            if block.kind == "text" and separator == "\n":
                record = record.removesuffix("\r")
            numbers.append(number)
            records.append(record)
        return numbers, records

    def _text(self, record):
        value, holder = record, None
        if not isinstance(record, str):
            for key in self._keys(record):
                if not isinstance(value, dict):
                    return None, f"not an object: {str(value)[:40]!r}"
                if key not in value:
                    names = ", ".join(map(repr, list(value)[:8]))
                    return None, NoField(f"no field {self._job.field!r} among {names}")
                value, holder = value[key], value
        if self._job.chat:
            return value, check_messages(value, holder)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            return None, f"field {self._job.field!r} is {kind}, not a string"
        return (value, None) if is_utf8(value) else (None, "not UTF-8: half of a surrogate pair")

    def _keys(self, record):
        """The field's name, if the record has one of this very name, or the names that lead into nested objects."""
        field = self._job.field
        return [field] if isinstance(record, dict) and field in record else field.split(".")

    def _ends(self, tokens) -> bool:
        return self._end in _join(tokens, self._dtype)

    def _encode(self, kept):
        if not self._job.chat:
            return self._tokenizer.encode_batch(kept, self._dtype), None, sum(len(t.encode()) for t in kept)
        tokens, masks, size = [], [], 0
        for messages in kept:
            ids, mask = encode_messages(messages, self._tokenizer.encode, self._tokenizer.encode_markup)
            tokens.append(ids.astype(self._dtype))
            masks.append(mask)
            size += sum(len(m["content"].encode()) for m in messages)
        return tokens, masks, size


def load_function(spec: str):
    """The function called "module:function" or "path.py:function".

    Raises:
        UserError: there is none.
    """
    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            found = importlib.util.spec_from_file_location("_trellis_user_" + os.path.basename(place)[:-3], place)
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        for part in name.split("."):
            module = getattr(module, part)
    except Exception as error:  # whatever a user's file does on import
        raise UserError(
            "A filter must be a function of a module or file that can be imported.",
            seen=f"{type(error).__name__}: {error}",
            where=f"--filter {spec}",
            fix="write module:function or path.py:function, with one that exists",
        ) from error
    return module


def _join(parts, dtype):
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def send(stream, value: object) -> None:
    """Writes one message: its length (u64, little-endian), then its pickle."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def receive(stream) -> object:
    """Reads one message; raises EOFError if the other side is gone."""
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    size = struct.unpack("<Q", header)[0]
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    """Serves blocks from standard input until it closes."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a user's filter prints must not enter the protocol
    encoder = None
    while True:
        try:
            message = receive(source)
        except EOFError:
            return
        try:
            if encoder is None:
                encoder, answer = Encoder(message), None
            else:
                answer = encoder(message)
        except Exception as error:
            answer = error if _pickles(error) else RuntimeError(f"{type(error).__name__}: {error}")
        send(sink, answer)


def _pickles(error):
    try:
        pickle.loads(pickle.dumps(error))
        return True
    except Exception:
        return False
