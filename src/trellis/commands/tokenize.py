"""`trellis tokenize`."""

import argparse
import sys

from trellis.commands.command import Command, some_path, whole
from trellis.errors import UserError
from trellis.files import check_utf8


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis tokenize`."""
    from trellis.data.tokenizing.sources import FORMATS

    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="files, folders or patterns, local or s3://, gs://, hf://, https://; or "
        "dataset:NAME[@SPLIT], a Hugging Face dataset",
    )
    parser.add_argument(
        "--out", type=some_path, required=True, metavar="STORE", help="the store's folder, local or a URL"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--train-bpe", type=whole(), metavar="N", help="train a byte-level BPE of N tokens first")
    kind.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder or repository with one")
    kind.add_argument("--bytes", action="store_true", help="every byte is a token")
    parser.add_argument(
        "--train-bytes",
        type=whole(most=2**63 - 1),
        metavar="N",
        help="train the BPE on about N bytes of documents, spread evenly (default: 256 MiB)",
    )
    parser.add_argument("--end-of-document", metavar="TEXT", help="the tokenizer's end-of-document token")
    parser.add_argument("--format", choices=FORMATS, help="the format of all files (default: by their names)")
    parser.add_argument(
        "--field", help="the field with the text (default: text, or txt in tars); a.b names a field of an object"
    )
    parser.add_argument(
        "--separator",
        help=r"for text files, what divides documents, such as '\n' or "
        "'<|endoftext|>' (default: each file is one document)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the field (default: messages) holds conversations; only the assistant's turns count in the loss",
    )
    parser.add_argument(
        "--filter", metavar="WHERE:FUNCTION", help="keep records for which module:function or path.py:function is true"
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with a document that cannot be read (default: fail)",
    )
    parser.add_argument("--workers", help="worker processes, or ray (default: one per core)")
    parser.add_argument(
        "--chunk-tokens",
        type=whole(),
        default=1 << 21,
        metavar="N",
        help="tokens in a chunk of the store (default: 2 Mi)",
    )
    parser.add_argument("--restart", action="store_true", help="delete what is at STORE first")
    parser.add_argument("--quiet", action="store_true", help="no progress line")


def execute(args: argparse.Namespace) -> int:
    """`trellis tokenize`."""
    from trellis.data.tokenizing.chat import BEGINNING
    from trellis.data.tokenizing.sources import changed_since
    from trellis.data.tokenizing.tokenize import TRAIN_BYTES, tokenize

    check_utf8(args.end_of_document or "", "A token must be valid UTF-8.", "--end-of-document")
    if args.end_of_document == "":
        rule, fix = "A token must have a letter.", "name a token of the tokenizer, or leave it out"
        raise UserError(rule, seen="''", where="--end-of-document", fix=fix)
    if args.train_bytes is not None and args.train_bpe is None:
        raise _unheeded("train-bytes", args.train_bytes, "an existing tokenizer", "use --train-bpe N")
    source = _source(args)
    store = tokenize(
        source,
        args.out,
        tokenizer=args.tokenizer,
        train_bpe=args.train_bpe,
        train_bytes=TRAIN_BYTES if args.train_bytes is None else args.train_bytes,
        use_bytes=args.bytes,
        end_of_document=args.end_of_document,
        filter=args.filter,
        chat=args.chat,
        on_error=args.on_error,
        workers=_workers(args.workers),
        chunk_tokens=args.chunk_tokens,
        restart=args.restart,
        progress=not args.quiet,
    )
    print(
        f"{store.url}: {store.num_tokens:,} tokens in {store.num_documents:,} documents, vocabulary "
        f"{store.vocab_size:,}, {store.bytes_per_token:.2f} bytes a token"
    )
    if args.chat and len(store.tokenizer().encode_markup(BEGINNING)) > 1:
        print(f"the tokenizer has no {BEGINNING}: what begins and ends a message is written as text")
    about = store.about
    if about["filtered"] or about["skipped"]:
        print(f"left out: {about['filtered']:,} by the filter, {about['skipped']:,} that could not be read")
    for example in about["skipped_examples"]:
        print(f"  {example}", file=sys.stderr)
    if changed := changed_since(source.files, args.out):
        more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
        print(f"written to after the store was finished: {changed[0]}{more}; --restart reads again", file=sys.stderr)
    return 0


def _source(args):
    from trellis.data.tokenizing.hf_datasets import dataset_source
    from trellis.data.tokenizing.sources import FileSource, embedded_corpus, find_files

    separator = None if args.separator is None else _unescaped(args.separator)
    dataset = [file for file in args.files if file.startswith("dataset:")]
    for name in ("format", "separator") + ("field",) * (not args.files):
        if getattr(args, name) is not None and (dataset or not args.files):
            of = dataset[0] if dataset else "the sources of Python's standard library"
            raise _unheeded(name, getattr(args, name), of, "name files")
    if not args.files:
        return embedded_corpus("train")
    if any(file.startswith("dataset:") for file in args.files):
        if len(args.files) > 1:
            raise UserError(
                "A Hugging Face dataset must be tokenized on its own.",
                seen=" ".join(args.files),
                where="FILES",
                fix="tokenize each into a store of its own, and mix them in training",
            )
        return dataset_source(args.files[0].removeprefix("dataset:"), field=args.field)
    return FileSource(files=find_files(args.files), format=args.format, field=args.field, separator=separator)


def _unescaped(text: str) -> str:
    r"""A text with its escapes interpreted, and all other characters as they are.

    >>> _unescaped(r"—\n")
    '—\n'
    """
    try:
        found = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        rule, fix = "A separator must be text with valid Python escapes.", r"write \\ for a backslash"
        raise UserError(rule, seen=f"`{text}`: {error.reason}", where="--separator", fix=fix) from None
    check_utf8(found, "A separator must be valid UTF-8.", "--separator")
    return found


def _unheeded(name: str, value: object, of: str, fix: str) -> UserError:
    rule = "An option of `trellis tokenize` must apply to the inputs and the tokenizer."
    return UserError(
        rule, seen=f"{value}, for {of}: it has no effect", where=f"--{name}", fix=f"{fix}, or leave it out"
    )


def _workers(text):
    if text is None or text == "ray":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise UserError(
            "Workers must be a number of processes, or a Ray cluster.",
            seen=text,
            where="--workers",
            fix="use 0 (this process), a number, or ray",
        ) from error


COMMAND = Command(
    name="tokenize",
    summary="turn any corpus into a token store",
    description=(
        "Turns any corpus into a token store. If it is interrupted, the same command continues where it left off. "
        "Without FILES, it tokenizes the sources of Python's standard library."
    ),
    arguments=arguments,
    execute=execute,
)
