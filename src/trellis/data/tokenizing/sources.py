"""Where documents come from: an ordered list of files, each read in blocks from any recorded position."""

import dataclasses
import functools
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence

from trellis.data.arguments import path as as_path
from trellis.data.blocks import Block
from trellis.data.storage import filesystem, is_remote, local_path, open_folder, with_retries
from trellis.data.store.opening import is_own
from trellis.data.tokenizing import formats
from trellis.data.tokenizing.json_files import json_records
from trellis.errors import UserError, shortened

FORMATS = ("text", "jsonl", "json", "csv", "tar", "parquet", "arrow")
EMBEDDED_VALIDATION_PERCENT = 5


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
    """One input. `name` is what the store records; `stamp` changes when the contents may have."""

    url: str
    name: str
    size: int | None
    stamp: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource:
    """Files of documents, in order.

    Attributes:
        files: the inputs.
        format: one of `FORMATS` for all of them, or None to go by each file's name.
        field: the field that holds the text; dots go into nested objects. By default `text`, and `txt` in tars.
        separator: what divides documents in texts; None makes each file one document.
    """

    files: tuple[SourceFile, ...]
    format: str | None = None
    field: str | None = None
    separator: str | None = None

    def __post_init__(self):
        if not isinstance(self.files, list | tuple) or not all(isinstance(file, SourceFile) for file in self.files):
            raise UserError(
                "The files of a source must be those that `find_files` finds.",
                seen=f"files={shortened(repr(self.files), 80)}",
                where="FileSource",
                fix="write FileSource(files=find_files(paths))",
            )
        if self.format is not None and self.format not in FORMATS:
            raise UserError(
                "The format must be one that Trellis reads.",
                seen=self.format,
                where="--format",
                fix="use one of " + ", ".join(FORMATS),
            )
        if self.separator == "":
            raise UserError(
                "The separator cannot be empty.",
                seen="''",
                where="--separator",
                fix="leave it out to make each file one document",
            )

        if self.separator is not None and not any(self._format(file) == "text" for file in self.files):
            raise UserError(
                "A separator can be used only with text files.",
                seen=f"{self.separator!r}, and no text file among {len(self.files)}",
                where="--separator",
                fix="leave it out, or use --format text",
            )

        if self.field is not None and self.all_text:
            raise UserError(
                "A field can be used only with records: text files have none.",
                seen=f"{self.field}, and {len(self.files)} text file{'s' * (len(self.files) > 1)}",
                where="--field",
                fix="leave it out, or set the format of the files, as in --format jsonl",
            )

    @property
    def all_text(self) -> bool:
        """Whether there are files, and all of them are texts."""
        return bool(self.files) and all(self._format(file) == "text" for file in self.files)

    @property
    def text_field(self) -> str:
        """The field that holds the text."""
        if self.field is not None:
            return self.field
        tars = self.files and all(self._format(file) == "tar" for file in self.files)
        return "txt" if tars else "text"

    def describe(self) -> dict:
        """What the tokens depend on, besides the files' contents; it goes into the store's recipe."""
        return {
            "files": [[file.name, file.size] for file in self.files],
            "format": self.format,
            "field": self.text_field,
            "separator": self.separator,
        }

    def blocks(self, index: int, start: tuple[int, int], *, all_fields: bool) -> Iterator[Block]:
        """Blocks of file `index` from `start` (a block's `end`, or (0, 1)) on.

        Args:
            all_fields: records keep every field; otherwise only the text's, if that saves reading.
        """
        file = self.files[index]
        read = self._reader(file, all_fields)
        yield from read(file.url, file.name, start)

    def _format(self, file):
        return self.format or formats.format_of(file.name)

    def _reader(self, file, all_fields) -> formats.Reader:
        match self._format(file):
            case "jsonl":
                return functools.partial(formats.lines, kind="json")
            case "text" if self.separator is not None:
                return functools.partial(formats.lines, kind="text", separator=self.separator)
            case "text":
                return formats.whole
            case "json":
                return json_records
            case "csv":
                return formats.csv_records
            case "tar":
                return formats.tar_records
            case table:
                columns = None if all_fields else [self.text_field, self.text_field.split(".")[0]]
                read = formats.parquet_records if table == "parquet" else formats.arrow_records
                return functools.partial(read, columns=columns)


def find_files(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> tuple[SourceFile, ...]:
    """The files of a path, a folder, a glob, or a list of those, local or remote, in sorted order within each.

    Folders are searched to any depth, through links too; names that begin with a dot are left out, and stores.

    Raises:
        UserError: nothing is found, or the same file twice, or something that is no file, such as a pipe.
    """
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
        paths = [paths]
    paths = [as_path(path, "paths", "find_files") for path in paths]
    found = [file for path in paths for file in (_remote(path) if is_remote(os.fspath(path)) else _local(path))]
    if not found:
        raise UserError(
            "A corpus must have at least one file.",
            seen="none",
            where=", ".join(os.fspath(path) for path in paths) or "no path given",
            fix="name files, folders or patterns that exist",
        )
    first: dict[str, str] = {}
    for file in found:
        _check_once(first, file.name, file.url if is_remote(file.url) else os.path.realpath(file.url))
    return tuple(found)


def _check_once(first: dict[str, str], name: str, place: str) -> None:
    """Refuses a second name of a place: its text would be read as often as it is named. `first` has the others'."""
    if place in first:
        raise UserError(
            "A text must be named once.",
            seen=f"{first[place]}, and {name}, which is the same",
            where="the files to tokenize",
            fix="name it once, or remove the link; to read a text more often than others, train on a mixture",
        )
    first[place] = name


def check_outside(files: Sequence[SourceFile], out: str | os.PathLike) -> None:
    """Refuses files that lie in the store that is to be made of them.

    Raises:
        UserError: one does.
    """
    root = os.path.join(os.path.realpath(local_path(os.fspath(out))), "")
    inside = [] if is_remote(os.fspath(out)) else [f for f in files if os.path.realpath(f.url).startswith(root)]
    if inside:
        raise UserError(
            "The files to tokenize must lie outside of the store.",
            seen=inside[0].name,
            where=os.fspath(out),
            fix="move the store to another place, and choose it with --out",
        )


def changed_since(files: Sequence[SourceFile], out: str | os.PathLike) -> list[str]:
    """The names of local files that were written to after a finished local store.

    A store's recipe has the sizes of its files, but no times, which another copy of the same files does not have.
    """
    if is_remote(os.fspath(out)):
        return []
    finished = os.stat(os.path.join(local_path(os.fspath(out)), "zarr.json")).st_mtime_ns
    local = [file for file in files if file.stamp and not is_remote(file.url)]
    return [file.name for file in local if int(file.stamp) > finished]


def _local(path):
    path = local_path(os.fspath(path))
    if os.path.isdir(path):
        if is_own(open_folder(path)):
            fix = "name the texts that it was made of; `trellis data inspect` shows what is in it"
            raise UserError("Every input must be text.", seen="a token store", where=path, fix=fix)
        names = sorted(_inside(path))
    elif os.path.exists(path):
        names = [path]
    else:
        names = sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name))
    if not names:
        raise UserError(
            "Every input must exist.", seen="no such file, folder or pattern", where=path, fix="check the path"
        )
    for name in names:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for somebody to write to it
            raise UserError(
                "Every input must be a file, which can be read from its beginning again.",
                seen=f"{name}, a pipe, socket or device",
                where=path,
                fix="write its text to a file, or remove it from the folder",
            )
        yield SourceFile(name, name, status.st_size, str(status.st_mtime_ns))


def _inside(path):
    """The files of a folder, without those of stores in it, such as the one that an interrupted command made of it.

    A folder that cannot be read is an error, and so is a link that leads back.
    """

    def refuse(error):
        raise error

    names, first = [], {}
    for folder, folders, files in os.walk(path, followlinks=True, onerror=refuse):
        _check_once(first, folder, os.path.realpath(folder))
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not is_own(open_folder(os.path.join(folder, name)))
        )
        names += [os.path.join(folder, name) for name in files if not name.startswith(".")]
    return names


def _remote(url):
    fs, path = filesystem(url)
    protocol = url.split("://", 1)[0]

    def expand():
        if any(c in path for c in "*[") or (protocol not in ("http", "https") and "?" in path):
            return fs.glob(path)
        if protocol not in ("http", "https") and fs.isdir(path):
            return fs.find(path)
        return [path] if fs.exists(path) else []

    names = sorted(name for name in with_retries(expand, what="list", url=url) if not name.endswith("/"))
    if not names:
        raise UserError(
            "Every input must exist.",
            seen="no such object, folder or pattern",
            where=url,
            fix="check the URL and the credentials",
        )
    for name in names:
        full = name if "://" in name else f"{protocol}://{name}"
        info = with_retries(lambda name=name: fs.info(name), what="ask a file's size", url=full)
        yield SourceFile(full, full, info.get("size"), str(info.get("ETag") or info.get("mtime") or ""))


def embedded_corpus(split: str = "train") -> FileSource:
    """The Python standard library's own sources, from the installation that runs this: about 12 MB of real text.

    Each file is one document, named by its path in the library, in sorted order; tests and installed packages are
    left out. A file belongs to "validation" if the SHA-256 of its name, as a number, modulo 100 is below 5, else to
    "train"; so the split is the same for every Python that has the file.

    Raises:
        UserError: the split is neither, or this Python has no source files.
    """
    if split not in ("train", "validation"):
        raise UserError(
            "The split of the embedded corpus must be train or validation.",
            seen=split,
            where="embedded_corpus(split)",
            fix="use train or validation",
        )
    root = sysconfig.get_paths()["stdlib"]
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith(("config-", ".")))
        for name in names:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, root).replace(os.sep, "/")
            if name.endswith(".py") and _in_split(relative, split):
                files.append(SourceFile(path, relative, os.path.getsize(path)))
    if not files:
        raise UserError(
            "The Python standard library must be installed with its source files.",
            seen="no .py files",
            where=root,
            fix="use a Python with its sources, or files of your own",
        )
    return FileSource(files=tuple(sorted(files, key=lambda file: file.name)), format="text")


def _in_split(name, split):
    held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < EMBEDDED_VALIDATION_PERCENT
    return held_out == (split == "validation")
