"""`trellis tokenize` and `trellis data`: arguments in, one clear message out."""

import argparse
import sys

from ..errors import UserError
from .sources import FORMATS, FileSource, find_files


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis tokenize`."""
    parser.description = (
        "Any corpus to a token store. Interrupted and started again, it continues where it was. "
        "Without FILES it tokenizes the sources of Python's standard library."
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="files, folders or patterns, local or s3://, gs://, hf://, https://; or "
        "dataset:NAME[@SPLIT], a dataset of Hugging Face",
    )
    parser.add_argument("--out", required=True, metavar="STORE", help="the store's folder, local or a URL")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N tokens first")
    kind.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder or repository with one")
    kind.add_argument("--bytes", action="store_true", help="every byte is a token")
    parser.add_argument(
        "--train-bytes",
        type=int,
        default=1 << 28,
        metavar="N",
        help="train the BPE on about N bytes of documents, spread evenly (default: 256 MiB)",
    )
    parser.add_argument("--end-of-document", metavar="TEXT", help="the tokenizer's token that ends a document")
    parser.add_argument("--format", choices=FORMATS, help="the format of all files (default: by their names)")
    parser.add_argument("--field", help="the field that holds the text (default: text); a.b goes into objects")
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
    parser.add_argument("--workers", help="worker processes, or ray (default: one a core)")
    parser.add_argument(
        "--chunk-tokens", type=int, default=1 << 21, metavar="N", help="tokens in a chunk of the store (default: 2 Mi)"
    )
    parser.add_argument("--restart", action="store_true", help="delete what is at STORE first")
    parser.add_argument("--quiet", action="store_true", help="no progress line")


def run_tokenize(args: argparse.Namespace) -> int:
    """`trellis tokenize`."""
    from .tokenizing import tokenize

    store = tokenize(
        _source(args),
        args.out,
        tokenizer=args.tokenizer,
        train_bpe=args.train_bpe,
        train_bytes=args.train_bytes,
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
    about = store.about
    if about["filtered"] or about["skipped"]:
        print(f"left out: {about['filtered']:,} by the filter, {about['skipped']:,} that could not be read")
    for example in about["skipped_examples"]:
        print(f"  {example}", file=sys.stderr)
    return 0


def _source(args):
    from .hf_datasets import dataset_source
    from .sources import embedded_corpus

    if args.chat and args.field is None:
        args.field = "messages"
    separator = args.separator.encode().decode("unicode_escape") if args.separator is not None else None
    if not args.files:
        return embedded_corpus("train")
    if any(file.startswith("dataset:") for file in args.files):
        if len(args.files) > 1:
            raise UserError(
                "A dataset of Hugging Face is tokenized by itself.",
                seen=" ".join(args.files),
                where="FILES",
                fix="tokenize each into a store of its own, and mix them in training",
            )
        return dataset_source(args.files[0].removeprefix("dataset:"), field=args.field)
    return FileSource(files=find_files(args.files), format=args.format, field=args.field, separator=separator)


def _workers(text):
    if text is None or text == "ray":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise UserError(
            "Workers are a number of processes, or a Ray cluster.",
            seen=text,
            where="--workers",
            fix="use 0 (this process), a number, or ray",
        ) from error


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis data`."""
    parser.description = "Look into token stores and check them."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser(
        "inspect",
        help="counts, document lengths and decoded samples",
        description="Counts, a histogram of document lengths and decoded samples of a store.",
    )
    inspect.add_argument("store", metavar="STORE")
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show (default: 3)")
    inspect.add_argument("--json", action="store_true", help="print an object instead")
    verify = actions.add_parser(
        "verify",
        help="find damaged chunks and the documents in them",
        description="Compare every chunk of a store with its checksum and name the documents "
        "in those that are damaged. Exit code 2 if there are any.",
    )
    verify.add_argument("store", metavar="STORE")
    convert = actions.add_parser(
        "convert",
        help="write a store in another project's format",
        description="Write a store in another project's format, or take one in.",
    )
    convert.add_argument("store", metavar="STORE")
    convert.add_argument("out", metavar="OUT")
    convert.add_argument("--to", required=True, choices=("seqax", "nanogpt", "megatron", "levanter"))
    convert.add_argument("--split", default="train", help="seqax: the group inside OUT (default: train)")


def run_data(args: argparse.Namespace) -> int:
    """`trellis data`."""
    from . import looking

    if args.action == "inspect":
        return looking.inspect(args.store, samples=args.samples, as_json=args.json)
    if args.action == "verify":
        return looking.verify(args.store)
    from .foreign import convert
    from .store import Store

    convert(Store.open(args.store), args.out, to=args.to, split=args.split)
    print(f"{args.out}: written")
    return 0
