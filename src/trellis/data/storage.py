"""Folders of files, on this machine or behind fsspec (S3, GCS, Hugging Face, HTTP), read by byte range."""

import os
import time

from trellis.errors import UserError
from trellis.files import no_room

ATTEMPTS = 5
FIRST_PAUSE = 0.2  # seconds; doubled after every failed attempt


def is_remote(url: str) -> bool:
    """Whether `url` names a protocol other than the local file system.

    >>> is_remote("s3://bucket/corpus"), is_remote("file:///corpus"), is_remote("corpus")
    (True, False, False)
    """
    return "://" in url and not url.startswith(("file://", "local://"))


def local_path(url: str) -> str:
    """The path of a local `url`."""
    return url.split("://", 1)[1] if "://" in url else os.fspath(url)


def filesystem(url: str):
    """The fsspec file system of `url` and the path inside it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        protocol = url.split("://", 1)[0]
        extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf", "http": "http", "https": "http"}.get(protocol)
        fix = f"pip install 'trellis[{extra}]'" if extra else f"install the fsspec package for {protocol}"
        raise UserError(
            f"Reading {protocol}:// needs a package that is not installed.", seen=error, where=url, fix=fix
        ) from error
    except ValueError as error:
        raise UserError(
            "The protocol of a URL must be one that fsspec knows.",
            seen=error,
            where=url,
            fix="check the spelling, or install the package of that protocol",
        ) from error


def with_retries(action, *, what: str, url: str):
    """The result of `action()`, which is tried again after a passing fault of the network, with growing pauses.

    A missing file or a refused permission is final at once.

    Raises:
        UserError: after the last attempt.
    """
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except (FileNotFoundError, PermissionError, IsADirectoryError, UserError):
            raise
        except Exception as error:
            if attempt == ATTEMPTS:
                raise UserError(
                    "The server must answer every request in full.",
                    seen=f"{type(error).__name__}: {error} ({ATTEMPTS} attempts to {what})",
                    where=url,
                    fix="check the network and the server, then run the same command again; finished work is kept",
                ) from error
            time.sleep(pause)
            pause *= 2


class LocalFolder:
    """Files under a local folder. Writes are atomic: another reader sees the old file or the new one."""

    remote = False

    def __init__(self, url: str):
        self.url = local_path(url)

    def path(self, name: str) -> str:
        return os.path.join(self.url, name)

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def size(self, name: str) -> int:
        return os.path.getsize(self.path(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file from `start` on, up to `stop` if it is given, or to the end of the file."""
        descriptor = os.open(self.path(name), os.O_RDONLY)
        try:
            end = os.fstat(descriptor).st_size if stop is None else stop
            parts = [os.pread(descriptor, end - start, start)]
            while parts[-1] and (start := start + len(parts[-1])) < end:  # Linux reads 2 GiB at a time
                parts.append(os.pread(descriptor, end - start, start))
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes) -> None:
        path = self.path(name)
        folder, base = os.path.split(path)
        temporary = os.path.join(folder, f".{base}.part")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            try:
                os.unlink(temporary)
            except OSError:
                pass
            raise _cannot_write(error, path, len(data)) from error

    def delete(self, name: str) -> None:
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass


class RemoteFolder:
    """Files under a URL. Objects are replaced whole; every request is retried."""

    remote = True

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._fs, self._root = filesystem(self.url)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def exists(self, name: str) -> bool:
        return with_retries(lambda: self._fs.exists(self.path(name)), what="look for a file", url=self._where(name))

    def size(self, name: str) -> int:
        size = with_retries(lambda: self._fs.size(self.path(name)), what="ask a file's size", url=self._where(name))
        if size is None:
            raise FileNotFoundError(self._where(name))
        return int(size)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        def get():
            if stop is None:
                return self._fs.cat_file(self.path(name), start=start or None)
            data = self._fs.cat_file(self.path(name), start=start, end=stop)
            if len(data) > stop - start:
                raise UserError(
                    "A server of stored tokens must support byte ranges (RFC 9110, section 14).",
                    seen=f"{len(data)} bytes for a range of {stop - start}",
                    where=self._where(name),
                    fix="serve the folder with a server that supports Range, or copy it here",
                )
            if len(data) < stop - start:
                raise OSError(f"{len(data)} bytes for a range of {stop - start}")
            return data

        return with_retries(get, what="read", url=self._where(name))

    def write(self, name: str, data: bytes) -> None:
        with_retries(lambda: self._fs.pipe_file(self.path(name), data), what="write", url=self._where(name))

    def delete(self, name: str) -> None:
        try:
            with_retries(lambda: self._fs.rm_file(self.path(name)), what="delete", url=self._where(name))
        except FileNotFoundError:
            pass

    def _where(self, name):
        return f"{self.url}/{name}" if name else self.url


def open_folder(url: str) -> LocalFolder | RemoteFolder:
    """The folder at `url`; it need not exist yet."""
    url = os.fspath(url)
    return RemoteFolder(url) if is_remote(url) else LocalFolder(url)


def _cannot_write(error, path, size):
    if no_room(error):
        return UserError(
            "The disk must have room for the store.",
            seen=f"{error.strerror} while writing {size:,} bytes",
            where=path,
            fix="free some space, then run the same command again; it continues where it left off",
        )
    return UserError(
        "The folder of a store must be writable.",
        seen=error.strerror or str(error),
        where=path,
        fix="check the path and its permissions",
    )
