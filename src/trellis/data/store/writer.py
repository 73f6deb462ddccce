"""Writes a token store in such a way that killing the writer at any moment loses nothing and doubles nothing.

The group's zarr.json is the one point of commitment: it is replaced atomically, after everything that it counts is
stored. Arrays may hold more than it says; the surplus is written again, with the same values, by the next run.
"""

import contextlib
import json
import os

import numpy as np

from trellis.data.blocks import Block, Encoded
from trellis.data.store.store import FORMAT, VERSION, smallest_dtype
from trellis.data.store.zarray import ArrayWriter, Folder, group_metadata, read_metadata
from trellis.data.tokenizer import Tokenizer
from trellis.errors import UserError

_KNOWN = ("zarr.json", "tokenizer.json", "sources.json", "tokens", "offsets", "files", "loss_mask", ".lock")


class StoreWriter:
    """The store being written.

    Attributes:
        cursor: where the next block starts: file index, position in it, number of the line or record.
        finished: whether the store is already complete.
        tokenizer: the tokenizer that an earlier run decided on, or None.
    """

    def __init__(self, folder: Folder, recipe: str, stamps: str):
        self._folder, self._recipe, self._stamps = folder, recipe, stamps
        self.cursor, self.finished, self.tokenizer = (0, 0, 1), False, None
        self._counts = {"num_tokens": 0, "num_documents": 0, "text_bytes": 0, "filtered": 0, "skipped": 0}
        self._examples: list[str] = []
        self._files_done = 0
        self._started = self._resuming = False

    @classmethod
    def open(cls, folder: Folder, recipe: str, *, restart: bool, on_error: str, stamps: str) -> "StoreWriter":
        """A writer at the beginning, or where the last commit of the same recipe left off."""
        writer = cls(folder, recipe, stamps)
        if restart:
            _clear(folder)
        if not folder.exists("zarr.json"):
            _refuse_strangers(folder)
            return writer
        about = read_metadata(folder).get("attributes", {}).get("trellis")
        if not isinstance(about, dict) or about.get("format") != FORMAT or about.get("version") != VERSION:
            raise UserError(
                "The output folder of a new store must be empty or not exist yet.",
                seen="a Zarr group that is not a store of this version",
                where=folder.url,
                fix="choose another --out",
            )
        if about["recipe"] != recipe:
            raise UserError(
                "A store can be continued only with the inputs and options that it was begun with.",
                seen=f"recipe {about['recipe'][:12]} stored, {recipe[:12]} now",
                where=folder.url,
                fix="use the same files and options, choose another --out, or start over with --restart",
            )
        if about["skipped"] and on_error == "fail":
            raise UserError(
                "Every document must be readable.",
                seen=f"{about['skipped']} skipped earlier: {about['skipped_examples'][0]}",
                where=folder.url,
                fix="use --on-error skip, or fix the documents and use --restart",
            )
        if about["complete"]:
            writer.finished = True
            return writer
        if about["writing"]["stamps"] != stamps:
            raise UserError(
                "The inputs of an unfinished store cannot change.",
                seen="an input has changed since",
                where=folder.url,
                fix="start over with --restart",
            )
        writer._load(about)
        return writer

    def _load(self, about):
        self._resuming = True
        self._counts = {key: about[key] for key in self._counts}
        self._examples = about["skipped_examples"]
        self._files_done = about["num_files"]
        self.cursor = tuple(about["writing"]["cursor"])
        self.tokenizer = Tokenizer(
            self._folder.read("tokenizer.json").decode(),
            end_of_document=about["tokenizer"]["end_of_document"],
            where=self._folder.url,
        )

    def describe(
        self, tokenizer: Tokenizer, *, chunk_tokens: int, chunk_offsets: int, has_loss_mask: bool, files: list[dict]
    ) -> None:
        """Decides what the store holds. Nothing is written before the first document."""
        self.tokenizer, self._source_files = tokenizer, files
        self.dtype = smallest_dtype(tokenizer.vocab_size)
        self._about = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "vocab_size": tokenizer.vocab_size,
            "end_of_document": tokenizer.end_of_document,
            "chunk_tokens": chunk_tokens,
            "chunk_offsets": chunk_offsets,
            "has_loss_mask": has_loss_mask,
            "recipe": self._recipe,
            "tokenizer": {
                "kind": "bytes" if tokenizer.is_bytes else "tokenizer.json",
                "sha256": tokenizer.sha256,
                "end_of_document": tokenizer.end_of_document_text,
            },
        }
        self._tokens = ArrayWriter(self._folder, "tokens", self.dtype, chunk_tokens)
        self._mask = ArrayWriter(self._folder, "loss_mask", np.uint8, chunk_tokens) if has_loss_mask else None
        self._offsets = ArrayWriter(self._folder, "offsets", np.uint64, chunk_offsets)
        self._files = ArrayWriter(self._folder, "files", np.uint64, chunk_offsets)
        if self._resuming:
            self._started = True
            self._tokens.resume(self._counts["num_tokens"])
            self._offsets.resume(self._counts["num_documents"] + 1)
            self._files.resume(self._files_done + 1)
            if self._mask is not None:
                self._mask.resume(self._counts["num_tokens"])
        else:
            self._offsets.append(np.zeros(1, np.uint64))
            self._files.append(np.zeros(1, np.uint64))

    def append(self, block: Block, encoded: Encoded) -> None:
        """Adds a block's tokens; blocks come in order."""
        if not self._started and len(encoded.tokens):
            self._start()
        self._finish_files(block.file)
        ends = self._counts["num_tokens"] + np.cumsum(encoded.lengths, dtype=np.uint64)
        if not block.closed:
            ends = ends[:-1]
        self._tokens.append(encoded.tokens)
        if self._mask is not None:
            self._mask.append(encoded.mask)
        self._offsets.append(ends)
        self._counts["num_tokens"] += len(encoded.tokens)
        self._counts["num_documents"] += len(ends)
        self._counts["text_bytes"] += encoded.text_bytes
        self._counts["filtered"] += encoded.filtered
        self.cursor = (block.file, *block.end)

    def skip(self, example: str) -> None:
        """Counts a document that was left out; the first ten are recorded."""
        self._counts["skipped"] += 1
        if len(self._examples) < 10:
            self._examples.append(example.encode(errors="backslashreplace").decode())  # names need not be UTF-8

    @property
    def counts(self) -> dict[str, int]:
        return self._counts

    def commit(self) -> None:
        """Makes everything so far durable and visible."""
        if self._started:
            self._store(complete=False)

    def finish(self, num_files: int) -> None:
        """Marks the store complete.

        Raises:
            UserError: no document came in.
        """
        if not self._counts["num_documents"]:
            names = ", ".join(file["name"] for file in self._source_files[:3])
            raise UserError(
                "A corpus must have at least one document.",
                seen=f"none with text in it ({self._counts['filtered']} filtered, {self._counts['skipped']} skipped)",
                where=names,
                fix="check the files, the name of the text field and the filter",
            )
        self._finish_files(num_files)
        self._store(complete=True)

    def _finish_files(self, upto):
        while self._files_done < upto:
            self._files.append(np.array([self._counts["num_documents"]], np.uint64))
            self._files_done += 1

    def _start(self):
        self._folder.write("tokenizer.json", self.tokenizer.json.encode())
        self._folder.write("sources.json", (json.dumps({"files": self._source_files}, indent=1) + "\n").encode())
        self._started = True
        self._store(complete=False)

    def _store(self, *, complete):
        for array in (self._tokens, self._mask, self._offsets, self._files):
            if array is not None:
                array.commit()
        self._write_group(complete=complete)

    def _write_group(self, *, complete):
        about = (
            self._about
            | self._counts
            | {"complete": complete, "num_files": self._files_done, "skipped_examples": self._examples}
        )
        if not complete:
            about["writing"] = {"cursor": list(self.cursor), "stamps": self._stamps}
        self._folder.write("zarr.json", group_metadata({"trellis": about}))


@contextlib.contextmanager
def writer_lock(folder: Folder, *, wait: bool = False):
    """Locks a local store for one writer, waiting for another if asked; a killed writer's lock ends with it."""
    if folder.remote or os.name != "posix":
        yield
        return
    import fcntl

    path = folder.url.rstrip("/") + ".lock"
    while True:
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            file = open(path, "w")
        except OSError as error:
            raise UserError(
                "The folder of a store must be writable.",
                seen=error.strerror,
                where=folder.url,
                fix="check the path and its permissions",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            file.close()
            raise UserError(
                "Only one process at a time can write a store.",
                seen="another process is writing it",
                where=folder.url,
                fix="wait for it, or stop it",
            ) from error
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            break
        file.close()  # the previous writer removed the file that we waited for
    with file:
        try:
            yield
        finally:
            os.unlink(path)


def _refuse_strangers(folder):
    if folder.remote or not os.path.exists(folder.url):
        return
    if not os.path.isdir(folder.url):
        raise UserError(
            "The output path of a store must be a folder.", seen="a file", where=folder.url, fix="choose another --out"
        )
    strangers = sorted(set(os.listdir(folder.url)) - set(_KNOWN) - {f".{name}.part" for name in _KNOWN})
    if strangers:
        raise UserError(
            "The output folder of a new store must be empty or not exist yet.",
            seen=", ".join(strangers[:5]),
            where=folder.url,
            fix="choose another --out",
        )


def _clear(folder):
    if folder.remote:
        if folder.exists("zarr.json"):
            read_metadata(folder)
            folder.delete("zarr.json")
        return
    import shutil

    _refuse_strangers(folder)
    for name in _KNOWN:
        path = folder.path(name)
        shutil.rmtree(path) if os.path.isdir(path) else folder.delete(name)
