"""One-dimensional Zarr version 3 arrays of plain chunks: numbers in little-endian order, then their CRC-32C.

With these codecs ("bytes", then "crc32c") a chunk file is the numbers themselves, so any range of elements is a range
of bytes, one read or one request away, and any Zarr reader can still open and check the array.
"""

import collections
import concurrent.futures
import json
import os
import threading

import numpy as np

from trellis.data.storage import LocalFolder, RemoteFolder
from trellis.errors import UserError

Folder = LocalFolder | RemoteFolder


def crc32c(data: bytes) -> int:
    """The CRC-32C (RFC 3720, appendix B.4) of the given bytes."""
    import google_crc32c

    return google_crc32c.value(data)


def array_metadata(dtype: np.dtype, length: int, chunk: int) -> bytes:
    """The zarr.json of a plain array."""
    return _json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [length],
            "data_type": np.dtype(dtype).name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "attributes": {},
        }
    )


def group_metadata(attributes: dict) -> bytes:
    """The zarr.json of a group."""
    return _json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def _json(value):
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_metadata(folder: Folder) -> dict:
    """The zarr.json of a folder.

    Raises:
        UserError: it is missing or is not JSON.
    """
    try:
        value = json.loads(folder.read("zarr.json"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        return value
    except (FileNotFoundError, NotADirectoryError) as error:
        file, there = os.path.isfile(folder.url), folder.remote or os.path.isdir(folder.url)
        texts = file or (there and not folder.remote and bool(os.listdir(folder.url)))
        fix = f"; to make one from text: trellis tokenize {folder.url} --out stores/mine --train-bpe 512"
        seen = "no such folder" if os.path.isabs(folder.url) else f"no such folder in {os.getcwd()}"
        raise UserError(
            "A token store must be a Zarr group.",
            seen="a file" if file else "no zarr.json" if there else seen,
            where=folder.url,
            fix="use the path that `trellis tokenize --out` was given" + (fix if texts else ""),
        ) from error
    except ValueError as error:
        raise UserError(
            "The metadata of a token store must be valid JSON.",
            seen=error,
            where=f"{folder.url}/zarr.json",
            fix="copy the store again, or tokenize again: the file is damaged",
        ) from error


class ArrayWriter:
    """Appends to a plain array. Whole chunks are written once, the last, partial one again at every commit."""

    def __init__(self, folder: Folder, name: str, dtype, chunk: int):
        self._folder, self._name, self._chunk = folder, name, chunk
        self.dtype = np.dtype(dtype)
        self._buffer, self._filled, self._chunks_written = np.zeros(chunk, self.dtype), 0, 0

    def __len__(self) -> int:
        return self._chunks_written * self._chunk + self._filled

    def resume(self, length: int) -> None:
        """Continues after the first `length` elements of what is stored."""
        self._chunks_written, self._filled = divmod(length, self._chunk)
        self._buffer[:] = 0
        if self._filled:
            reader = ArrayReader(self._folder, self._name, self.dtype, self._chunk, length, check=True)
            self._buffer[: self._filled] = reader.read(length - self._filled, length)

    def append(self, values: np.ndarray) -> None:
        """Adds `values` to the end; every chunk that fills up is written."""
        values = np.asarray(values, self.dtype)
        while values.size:
            taken = min(values.size, self._chunk - self._filled)
            self._buffer[self._filled : self._filled + taken] = values[:taken]
            self._filled += taken
            values = values[taken:]
            if self._filled == self._chunk:
                self._write_chunk()
                self._chunks_written, self._filled = self._chunks_written + 1, 0
                self._buffer[:] = 0

    def commit(self) -> None:
        """Writes the partial chunk and the array's length."""
        if self._filled:
            self._write_chunk()
        self._folder.write(f"{self._name}/zarr.json", array_metadata(self.dtype, len(self), self._chunk))

    def _write_chunk(self):
        data = self._buffer.astype(self.dtype.newbyteorder("<"), copy=False).tobytes()
        self._folder.write(f"{self._name}/c/{self._chunks_written}", data + crc32c(data).to_bytes(4, "little"))


class ArrayReader:
    """Reads ranges of a plain array: one read of exactly those bytes for each chunk it touches, nothing kept.

    Args:
        check: read a chunk whole and compare its checksum when it is first touched.
        keep: read chunks whole, checked, and keep this many of them in memory. For remote folders, with a shuffle that
            stays in a few chunks for a while.
    """

    def __init__(self, folder: Folder, name: str, dtype, chunk: int, length: int, *, check: bool, keep: int = 0):
        self._folder, self.name, self.chunk, self.length = folder, name, chunk, length
        self.dtype, self._check = np.dtype(dtype), check
        self._stored = self.dtype.newbyteorder("<")
        self._checked: set[int] = set()
        self._kept = Kept(self.chunk_values, keep) if keep else None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Elements start..stop-1, read-only."""
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"{self.name}[{start}:{stop}] of {self.length}")
        if start == stop:
            return np.empty(0, self._stored)
        parts = []
        for index in range(start // self.chunk, (stop - 1) // self.chunk + 1):
            base = index * self.chunk
            parts.append(self._part(index, max(start - base, 0), min(stop - base, self.chunk)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def num_chunks(self) -> int:
        return -(-self.length // self.chunk)

    def chunk_values(self, index: int) -> np.ndarray:
        """A whole chunk, whose size and checksum have been checked."""
        data = self._fetch(index)
        expected = self.chunk * self._stored.itemsize + 4
        if len(data) != expected:
            raise self._damaged(index, f"{len(data):,} bytes instead of {expected:,}")
        stored, found = int.from_bytes(data[-4:], "little"), crc32c(data[:-4])
        if stored != found:
            raise self._damaged(index, f"CRC-32C {found:08x}, stored {stored:08x}")
        return np.frombuffer(data, self._stored, self.chunk)

    def _part(self, index, start, stop):
        if self._kept is not None and (stop - start > 1 or index in self._kept):
            return self._kept(index)[start:stop]  # the one token before a row is not worth reading a chunk
        if self._check and index not in self._checked:
            values = self.chunk_values(index)
            self._checked.add(index)
            return values[start:stop]
        size = self._stored.itemsize
        data = self._fetch(index, start * size, stop * size)
        if len(data) != (stop - start) * size:
            raise self._damaged(index, f"{len(data):,} of bytes {start * size:,} to {stop * size:,}")
        return np.frombuffer(data, self._stored)

    def _fetch(self, index, start=0, stop=None):
        try:
            return self._folder.read(f"{self.name}/c/{index}", start, stop)
        except FileNotFoundError as error:
            raise self._damaged(index, "the chunk is missing") from error

    def _damaged(self, index, seen):
        return DamagedChunk(f"{self._folder.url}/{self.name}/c/{index}", seen, self.name, index)


class Kept:
    """The latest `size` results of a function; threads that ask for the same result at once wait for one call."""

    def __init__(self, function, size: int):
        self._function, self._size, self._lock = function, size, threading.Lock()
        self._found: collections.OrderedDict[int, concurrent.futures.Future] = collections.OrderedDict()

    def __contains__(self, index: int) -> bool:
        return index in self._found

    def __call__(self, index: int):
        with self._lock:
            found = self._found.get(index)
            mine = found is None
            if mine:
                found = self._found[index] = concurrent.futures.Future()
            self._found.move_to_end(index)
            while len(self._found) > self._size:
                self._found.popitem(last=False)
        if mine:
            try:
                found.set_result(self._function(index))
            except BaseException as error:
                with self._lock:
                    self._found.pop(index, None)
                found.set_exception(error)
        return found.result()


class DamagedChunk(UserError):
    """A chunk of a store is missing, has a wrong size, or does not match its checksum."""

    def __init__(self, where: str, seen: str, array: str, index: int):
        self.array, self.index = array, index
        super().__init__(
            "A chunk of a token store must match its size and checksum.",
            seen=seen,
            where=where,
            fix="`trellis data verify STORE` names the documents; copy the chunk again, or delete the "
            "store and tokenize again",
        )

    def __reduce__(self):
        return DamagedChunk, (self.where, self.seen, self.array, self.index)
