"""The manifest of a checkpoint: its commit marker, what it holds, and a checksum of each of its files."""

import errno
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from trellis.errors import UserError
from trellis.files import naming, write_json

MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{8,})")  # of a checkpoint's folder
_FORMAT = 1
_CHUNK = 1 << 22


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing or does not hold what was written."""


def finished_steps(folder: Path) -> list[int]:
    """The steps of the finished checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = (NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(m[1]) for m in found if m and (folder / m[0] / MANIFEST).exists())


def checksum(path: Path, *, settle: bool = False) -> list[int]:
    """A file's size in bytes and its CRC-32, read in pieces of 4 MiB; to `settle` it, the disk must have it first."""
    crc = size = 0
    with naming(path), open(path, "rb") as file:
        if settle:
            _settle(file.fileno())
        while piece := file.read(_CHUNK):
            crc = zlib.crc32(piece, crc)
            size += len(piece)
    return [size, crc]


def _settle(descriptor: int) -> None:
    """Returns when the disk has what was written to a file: after a loss of power a manifest must not be newer than
    what it lists. Some file systems do that only for whoever writes."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def write_checksums(folder: Path, process: int) -> None:
    """Records the checksums of the files that this process wrote in `folder/checksums-PROCESS.json`.

    Each process of a run reads back only its own files, once the disk has them. Process 0 also takes those that belong
    to no process.
    """
    mine = f"state/ocdbt.process_{process}/"
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.startswith((".", "checksums-")) or name == MANIFEST:
            continue
        if name.startswith(mine) or (process == 0 and not name.startswith("state/ocdbt.process_")):
            files[name] = checksum(path, settle=True)
    write_json(folder / f"checksums-{process}.json", files)


def commit(folder: Path, content: dict, processes: int, timeout: float) -> None:
    """Writes the manifest, which makes the checkpoint exist, once every process has left its checksums.

    Args:
        folder: the checkpoint's folder.
        content: what the manifest holds besides the files: `step`, `entries`, `data`.
        processes: how many processes write the checkpoint.
        timeout: seconds to wait for them.
    """
    sums = [folder / f"checksums-{p}.json" for p in range(processes)]
    wait_for(sums, timeout)
    files = {path.name: checksum(path) for path in sums}
    for path in sums:
        files.update(json.loads(path.read_text()))
    manifest = {"format": _FORMAT, **content, "processes": processes, "files": files}
    write_json(folder / MANIFEST, {**manifest, "crc": own_checksum(manifest)})


def own_checksum(manifest: dict) -> int:
    """The checksum of a manifest without its own checksum."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def wait_for(paths: Iterable[Path], timeout: float) -> None:
    """Returns when all `paths` exist. Raises TimeoutError after `timeout` seconds, naming those that do not."""
    end = time.monotonic() + timeout
    missing = list(paths)
    while missing := [path for path in missing if not path.exists()]:
        if time.monotonic() > end:
            where = ", ".join(map(str, missing))
            raise TimeoutError(errno.ETIMEDOUT, f"a file of a checkpoint is still missing after {timeout:g} s", where)
        time.sleep(0.01)


def read_manifest(folder: Path) -> dict:
    """A checkpoint's manifest.

    Raises:
        DamagedCheckpoint: it is none, or is gone.
        UserError: another version of Trellis wrote it.
        OSError: the system refuses to read it, as where too many files are open: it may be whole.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if not isinstance(manifest, dict) or manifest.pop("crc", None) != own_checksum(manifest):
            raise DamagedCheckpoint(f"{path} has changed since it was written (checksum)")
        if manifest["format"] != _FORMAT:
            raise UserError(
                "A checkpoint must have a format that this version of Trellis can read.",
                seen=f"format {manifest['format']}, and this version reads {_FORMAT}",
                where=str(folder),
                fix="use the version that wrote it, or move the checkpoint away to continue after the one before it",
            )
        return manifest
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: {type(error).__name__}: {error}") from error


def remove(folder: Path) -> None:
    """Removes a checkpoint; if it was moved elsewhere and there is a link to it, the link alone.

    The manifest goes first: what is half removed is not a checkpoint.
    """
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def verify(folder: Path, manifest: dict, share: int = 0, of: int = 1) -> None:
    """Reads every `of`-th file from the `share`-th on and compares it with the manifest.

    Raises:
        DamagedCheckpoint: a file is missing, shorter or longer, or its checksum differs.
    """
    for name, (size, crc) in sorted(manifest["files"].items())[share::of]:
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing")
        if path.stat().st_size != size:
            raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, and {size} were written")
        if checksum(path)[1] != crc:
            raise DamagedCheckpoint(f"{path} has changed since it was written (checksum)")
