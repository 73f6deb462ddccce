"""Source files as streams of bytes: local or remote, decompressed, with retries after the network's faults."""

import functools
import io
import os

from trellis.data.storage import filesystem, is_remote, local_path, with_retries
from trellis.errors import UserError

COMPRESSIONS = (".gz", ".tgz", ".zst", ".xz", ".bz2")
PART_BYTES = 8 << 20  # bytes of one request to a server


def plain_name(name: str) -> str:
    """A file's name without a query and without a compression suffix.

    >>> plain_name("c4/part-0.jsonl.zst"), plain_name("https://host/a.JSONL.GZ?download=true")
    ('c4/part-0.jsonl', 'https://host/a.JSONL')
    """
    name = _without_query(name)
    if name.lower().endswith(".tgz"):
        return name[:-4] + ".tar"
    return name[: name.rindex(".")] if name.lower().endswith(COMPRESSIONS) else name


def _without_query(name):
    return name.split("?")[0] if name.startswith(("http://", "https://")) else name


class RemoteStream(io.RawIOBase):
    """A remote file read from start to end in parts; a part that fails is requested again."""

    def __init__(self, url: str):
        self._fs, self._path = filesystem(url)
        self._url, self._position = url, 0
        self._size = with_retries(lambda: self._fs.size(self._path), what="ask a file's size", url=url)
        self._whole = None if self._size is not None else self._read_whole()

    def _read_whole(self):  # a server that does not say how long a file is
        return with_retries(lambda: self._fs.cat_file(self._path), what="read", url=self._url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._size if self._whole is None else len(self._whole)
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer) -> int:
        if self._whole is not None:
            data = self._whole[self._position : self._position + len(buffer)]
        else:
            stop = min(self._position + len(buffer), self._size)
            data = (
                with_retries(lambda: self._part(self._position, stop), what="read", url=self._url)
                if stop > self._position
                else b""
            )
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _part(self, start, stop):
        data = self._fs.cat_file(self._path, start=start, end=stop)
        if len(data) == self._size and stop - start < self._size:  # no ranges: keep the whole file
            self._whole = data
            return data[start:stop]
        if len(data) != stop - start:
            raise OSError(f"{len(data)} bytes for a range of {stop - start}")
        return data


class _Frames(io.RawIOBase):
    """Reads compressed frames, one after the other, with zeros between them or none. The libraries' own readers take
    some files for whole ones: cut short (Zstandard), empty (gzip), or damaged where a frame begins (xz, bzip2)."""

    def __init__(self, raw, opened):
        self._raw, self._opened, self._ready, self._inside = raw, opened, b"", True
        self._frame = opened()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            data = self._raw.read(1 << 14)
            if not data:
                if self._inside:
                    raise EOFError("the last frame is cut short")
                return 0
            parts = []
            while data := data if self._inside else data.lstrip(b"\0"):
                self._inside = True
                parts.append(self._frame.decompress(data))
                data = self._frame.unused_data
                if self._frame.eof:
                    self._frame, self._inside = self._opened(), False
            self._ready = memoryview(b"".join(parts))  # which is not copied to take a part of it
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


class Stream:
    """A source file's decompressed bytes.

    Attributes:
        seekable: whether any position can be reached at once.
    """

    def __init__(self, url: str):
        self._url = url
        try:
            self._raw = (
                io.BufferedReader(RemoteStream(url), PART_BYTES) if is_remote(url) else open(local_path(url), "rb")
            )
        except OSError as error:
            raise UserError(
                "Every input must be readable.",
                seen=f"{type(error).__name__}: {error}",
                where=url,
                fix="check the path, the permissions and the credentials",
            ) from error
        self._name = _without_query(url).lower()
        self.seekable = not self._name.endswith(COMPRESSIONS)
        self.file = self._decompressed()

    def _decompressed(self):
        match os.path.splitext(self._name)[1]:
            case ".gz" | ".tgz":
                import zlib

                opened = functools.partial(zlib.decompressobj, wbits=31)  # with gzip's header and checksum
            case ".bz2":
                import bz2

                opened = bz2.BZ2Decompressor
            case ".xz":
                import lzma

                opened = lzma.LZMADecompressor
            case ".zst":
                import zstandard

                opened = zstandard.ZstdDecompressor().decompressobj
            case _:
                return self._raw
        return io.BufferedReader(_Frames(self._raw, opened), 1 << 17)

    @property
    def raw_position(self) -> int:
        """The number of bytes read of the file as stored."""
        return self._raw.tell()

    def skip(self, count: int) -> None:
        """Goes to `count` bytes from the start of a fresh stream."""
        if self.seekable:
            self._raw.seek(count)
            return
        while count > 0:
            data = self.read(min(count, 1 << 20))
            if not data:
                return
            count -= len(data)

    def read(self, size: int) -> bytes:
        """The next bytes, fewer than `size` only at the end.

        Raises:
            UserError: the file is cut short or is not compressed the way its name says.
        """
        import lzma
        import zlib

        try:
            return self.file.read(size)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise self._broken(error) from error
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise self._broken(error) from error
            raise

    def _broken(self, error):
        return UserError(
            "A compressed file must be complete, and of the kind that its name says.",
            seen=f"{type(error).__name__}: {error}",
            where=self._url,
            fix="download the file again, or leave it out",
        )

    def close(self) -> None:
        self.file.close()
        self._raw.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
