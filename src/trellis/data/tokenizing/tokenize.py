"""Text to a token store: on all cores, in bounded memory, and resuming where it was interrupted."""

import dataclasses
import hashlib
import json
import numbers
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trellis.cores import usable_cores
from trellis.data.arguments import flag, path, whole
from trellis.data.blocks import Block, Job, NoField
from trellis.data.order.permutation import mix64
from trellis.data.storage import open_folder
from trellis.data.store.store import Store
from trellis.data.store.writer import StoreWriter, writer_lock
from trellis.data.tokenizer import Tokenizer, byte_tokenizer, check_bpe_size, load_tokenizer, train_bpe
from trellis.data.tokenizing.chat import check_chat_tokenizer
from trellis.data.tokenizing.hf_datasets import DatasetSource
from trellis.data.tokenizing.pool import LocalPool
from trellis.data.tokenizing.progress import TokenizingProgress
from trellis.data.tokenizing.sources import FileSource, check_outside, find_files
from trellis.data.tokenizing.worker import Encoder
from trellis.errors import UserError, shortened

TRAIN_BYTES = 1 << 28


def tokenize(
    source: FileSource | str | os.PathLike | list,
    out: str | os.PathLike,
    *,
    tokenizer: Tokenizer | str | None = None,
    train_bpe: int | None = None,
    train_bytes: int = TRAIN_BYTES,
    use_bytes: bool = False,
    end_of_document: str | None = None,
    filter: Callable[[dict], bool] | str | None = None,
    chat: bool = False,
    on_error: str = "fail",
    workers: int | str | None = None,
    chunk_tokens: int = 1 << 21,
    chunk_offsets: int = 1 << 16,
    commit_seconds: float = 5.0,
    restart: bool = False,
    wait: bool = False,
    progress: bool = False,
) -> Store:
    """Tokenizes a corpus into a store and opens it.

    The store is a pure function of the inputs and of every argument down to `chat` and the chunk sizes; `workers`,
    `commit_seconds` and interruptions change nothing. A call that finds its own unfinished store continues it; one
    that finds it finished returns it.

    Args:
        source: a FileSource, or paths for `find_files`.
        out: the store's folder, local or a URL.
        tokenizer: a Tokenizer, or a path for `load_tokenizer`. Exactly one of this, `train_bpe` and `use_bytes`.
        train_bpe: size of the vocabulary of a byte-level BPE trained on the corpus first.
        train_bytes: train on about this many bytes of documents, spread evenly over the corpus.
        use_bytes: every byte is a token.
        end_of_document: the text of the token that ends a document, if the tokenizer has an unusual one.
        filter: called with every record (a dict; texts have `text`); a false result leaves the document out. A
            function of an importable module or script, or its name "module:function" or "path.py:function".
        chat: the text field, `messages` if the source names none, holds conversations; the loss counts only the
            assistant's turns.
        on_error: "fail" stops at the first document that cannot be read; "skip" leaves it out and counts it.
        workers: worker processes; 0 encodes in this process; "ray" uses the connected Ray cluster. By default one
            process a core.
        chunk_tokens, chunk_offsets: elements in a chunk of the arrays of tokens and of offsets.
        commit_seconds: how often the work is made durable, and visible to a reader of the growing store.
        restart: delete what is at `out` first.
        wait: if another process is writing the store, wait for it rather than fail.
        progress: print a progress line to standard error.

    Raises:
        UserError: for every wrong input; the store is then absent or marked incomplete, never silently short.
    """
    out, commit_seconds = path(out, "out", "tokenize"), _seconds(commit_seconds)
    given = {"use_bytes": use_bytes, "chat": chat, "restart": restart, "wait": wait, "progress": progress}
    use_bytes, chat, restart, wait, progress = (flag(value, name, "tokenize") for name, value in given.items())
    _check_tokenizer(tokenizer, train_bpe, use_bytes, end_of_document)
    if on_error not in ("fail", "skip"):
        rule = "`on_error` must be fail or skip."
        raise UserError(rule, seen=on_error, where="--on-error", fix="use fail or skip")
    sizes = {"chunk_tokens": chunk_tokens, "chunk_offsets": chunk_offsets, "train_bytes": train_bytes}
    chunk_tokens, chunk_offsets, train_bytes = (whole(sizes[name], name, "tokenize", least=1) for name in sizes)
    if train_bpe is not None:
        check_bpe_size(train_bpe, "--train-bpe")
    source = _source_of(source, chat)
    check_outside(source.files, out)
    if isinstance(tokenizer, str | os.PathLike):
        tokenizer = load_tokenizer(os.fspath(tokenizer), end_of_document=end_of_document)
    elif use_bytes:
        tokenizer = byte_tokenizer()
    filter_name = _function_name(filter)
    recipe = _recipe(
        source.describe(),
        tokenizer.sha256 if tokenizer else f"bpe {train_bpe} {train_bytes}",
        filter_name,
        chat,
        chunk_tokens,
        chunk_offsets,
    )
    folder = open_folder(out)
    with writer_lock(folder, wait=wait):
        writer = StoreWriter.open(
            folder, recipe, restart=restart, on_error=on_error, stamps=_hash([file.stamp for file in source.files])
        )
        if writer.finished:
            return Store(out)
        job = Job(
            tokenizer="",
            end_of_document=end_of_document or "",
            dtype="uint32",
            field=source.text_field,
            separator=source.separator or "\n",
            filter=filter_name,
            chat=chat,
        )
        if writer.tokenizer is not None:
            tokenizer = writer.tokenizer
        elif tokenizer is None:
            tokenizer = _train(source, train_bpe, train_bytes, job, on_error, progress)
        if chat:
            check_chat_tokenizer(tokenizer)
        files = [{"name": file.name, "size": file.size} for file in source.files]
        chunks = {"chunk_tokens": chunk_tokens, "chunk_offsets": chunk_offsets}
        writer.describe(tokenizer, **chunks, has_loss_mask=chat, files=files)
        job = dataclasses.replace(
            job, tokenizer=tokenizer.json, end_of_document=tokenizer.end_of_document_text, dtype=writer.dtype.name
        )
        bar = TokenizingProgress([file.size for file in source.files], enabled=progress, done=writer.cursor)
        with _pool(job, workers) as pool, bar:
            _run(source, writer, pool, on_error, commit_seconds, all_fields=job.all_fields, bar=bar)
    return Store(out)


def _source_of(source, chat: bool) -> Any:
    """The source that is given, or that paths lead to; of conversations, with the field that holds them.

    Raises:
        UserError: text files are to hold conversations, or the paths lead nowhere.
    """
    if not hasattr(source, "blocks"):
        source = FileSource(files=find_files(source))
    if chat and isinstance(source, FileSource) and source.all_text:
        raise UserError(
            "Conversations can be read only from records: text files have none.",
            seen=f"{len(source.files)} text file{'s' * (len(source.files) > 1)}",
            where="--chat",
            fix="leave it out, or set the format of the files, as in --format jsonl",
        )
    if chat and isinstance(source, FileSource | DatasetSource) and source.field is None:
        return dataclasses.replace(source, field="messages")
    return source


def _check_tokenizer(tokenizer, train_bpe: int | None, use_bytes: bool, end_of_document: str | None) -> None:
    """Refuses a tokenizer of another type, none or several, and an end of documents for one that has its own."""
    if not isinstance(tokenizer, Tokenizer | str | os.PathLike | None):
        rule, fix = "A tokenizer must be a `Tokenizer`, or a path to one.", "write load_tokenizer(path), or the path"
        raise UserError(rule, seen=f"tokenizer={shortened(repr(tokenizer), 80)}", where="tokenize", fix=fix)
    if sum([tokenizer is not None, train_bpe is not None, use_bytes]) != 1:
        raise UserError(
            "Tokenizing needs exactly one tokenizer.",
            seen=f"tokenizer={tokenizer!r}, train_bpe={train_bpe}, use_bytes={use_bytes}",
            where="trellis tokenize",
            fix="use one of --tokenizer PATH, --train-bpe N, --bytes",
        )
    if end_of_document is not None and not isinstance(tokenizer, str | os.PathLike):
        raise UserError(
            "The end-of-document token can be chosen only for a tokenizer that is read from a path.",
            seen=f"{end_of_document}, of a tokenizer that is {'given' if tokenizer else 'made here'}",
            where="--end-of-document",
            fix="leave it out, or use --tokenizer PATH",
        )


def _seconds(value) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        rule, fix = "`commit_seconds` must be a number of seconds, 0 or more.", "use 5.0, or leave it out"
        raise UserError(rule, seen=f"commit_seconds={value!r}", where="tokenize", fix=fix)
    return float(value)


def _run(source, writer, pool, on_error, commit_seconds, *, all_fields, bar):
    committed = time.monotonic()
    for block, encoded in pool.encode(_blocks(source, writer.cursor, all_fields)):
        if encoded.errors:
            _complain(block, encoded.errors, on_error, writer)
        writer.append(block, encoded)
        bar.update(block, encoded, writer)
        if time.monotonic() - committed >= commit_seconds:
            writer.commit()
            committed = time.monotonic()
    writer.finish(len(source.files))


def _blocks(source, cursor, all_fields) -> Iterator[Block]:
    first, position, number = cursor
    for index in range(first, len(source.files)):
        start = (position, number) if index == first else (0, 1)
        for block in source.blocks(index, start, all_fields=all_fields):
            block.file = index
            yield block


def _complain(block, errors, on_error, writer=None):
    """Refuses a block with documents that cannot be read, or has the writer, if there is one yet, count them."""
    number, problem = errors[0]
    unit = "record" if block.kind == "records" else "line"
    part_of_text = block.kind == "piece" and not (block.closed and block.first == 1)
    if on_error == "fail" or part_of_text:
        if writer is not None:
            writer.commit()
        name_it = "name the field of the text with --field, " if isinstance(problem, NoField) else ""
        raise UserError(
            "Every document must be readable.",
            seen=problem,
            where=f"{block.name}, {unit} {number}",
            fix="fix or remove the file"
            if part_of_text
            else f"{name_it}fix the document, or skip such documents with --on-error skip",
        )
    for number, problem in errors if writer is not None else ():
        writer.skip(f"{block.name}, {unit} {number}: {problem}")


def _pool(job: Job, workers: int | str | None):
    if workers == "ray":
        from trellis.data.tokenizing.ray_pool import RayPool

        return RayPool(job)
    if workers is None:
        workers = usable_cores()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise UserError(
            "Workers must be a number of processes, or a Ray cluster.",
            seen=workers,
            where="--workers",
            fix="use 0 (this process), a number, or ray",
        )
    return LocalPool(job, workers)


def _train(source, vocab_size, train_bytes, job, on_error, progress) -> Tokenizer:
    total = sum(file.size or 0 for file in source.files)
    share = min(1.0, train_bytes / total) if total else 1.0
    threshold = int(share * (2**64 - 1))
    encoder = Encoder(dataclasses.replace(job, tokenizer=byte_tokenizer().json, end_of_document=""))
    empty = True

    def texts():
        nonlocal empty
        seen = 0
        for block in _blocks(source, (0, 0, 1), job.all_fields):
            batch, errors = encoder.texts(block)
            if errors:
                _complain(block, errors, on_error)
            keys = mix64(np.arange(seen, seen + len(batch), dtype=np.uint64))
            seen += len(batch)
            chosen = [text for text, key in zip(batch, keys, strict=True) if int(key) <= threshold]
            empty = empty and not any(chosen)
            yield chosen

    with TokenizingProgress([], enabled=progress).note(f"training a BPE of {vocab_size:,} tokens"):
        trained = train_bpe(texts(), vocab_size)
    if empty:
        raise empty_corpus(source.files)
    return trained


def empty_corpus(files) -> UserError:
    """The error for a corpus without a single document."""
    names = ", ".join(file.name for file in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return UserError(
        "A corpus must have at least one document.",
        seen="no document with text in it",
        where=names,
        fix="check the files, the name of the text field and the filter",
    )


def _function_name(function) -> str | None:
    if function is None:
        return None
    if isinstance(function, str):
        if ":" in function:
            return function
        raise UserError(
            "A filter must be named by its module or file.",
            seen=function,
            where="--filter",
            fix="write module:function or path.py:function",
        )
    name, module = getattr(function, "__qualname__", repr(function)), getattr(function, "__module__", None)
    if "<" in name or module is None:
        raise UserError(
            "A filter must be a function that worker processes can import.",
            seen=name,
            where="filter",
            fix="define it with def at the top level of a module or script",
        )
    if module == "__main__":
        import __main__

        return f"{os.path.abspath(__main__.__file__)}:{name}"
    return f"{module}:{name}"


def _recipe(inputs, tokenizer, filter_name, chat, chunk_tokens, chunk_offsets) -> str:
    return _hash(
        {
            "inputs": inputs,
            "tokenizer": tokenizer,
            "filter": filter_name,
            "chat": chat,
            "chunks": [chunk_tokens, chunk_offsets],
        }
    )


def _hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
