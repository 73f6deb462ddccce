"""`trellis data`."""

import argparse
import dataclasses
import json

from trellis.commands.command import Command, some_path, whole
from trellis.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis data`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser(
        "inspect",
        help="counts, document lengths and decoded samples",
        description="Counts, a histogram of document lengths and decoded samples of a store.",
    )
    inspect.add_argument("store", metavar="STORE")
    inspect.add_argument("--samples", type=whole(0), default=3, metavar="N", help="documents to show (default: 3)")
    inspect.add_argument("--json", action="store_true", help="print a JSON object instead")
    verify = actions.add_parser(
        "verify",
        help="find damaged chunks and the documents in them",
        description="Compare every chunk of a store with its checksum and name the documents "
        "in those that are damaged. The exit code is 2 if there are any.",
    )
    verify.add_argument("store", metavar="STORE")
    convert = actions.add_parser(
        "convert",
        help="write a store in another project's format",
        description="Write a store in another project's format.",
    )
    convert.add_argument("store", metavar="STORE")
    convert.add_argument("out", type=some_path, metavar="OUT", help="a folder; NAME.bin for nanogpt and megatron")
    convert.add_argument("--to", required=True, choices=("seqax", "nanogpt", "megatron", "levanter"))
    convert.add_argument("--split", help="seqax: the group inside OUT, train or validation (default: train)")


def execute(args: argparse.Namespace) -> int:
    """`trellis data`."""
    if args.action == "inspect":
        return _inspect(args.store, args.samples, args.json)
    if args.action == "verify":
        return _verify(args.store)
    from trellis.data.store.opening import convert, open_store

    if args.split is not None and args.to != "seqax":
        rule = "Only seqax's format has groups inside OUT."
        seen = f"--split {args.split} --to {args.to}: it has no effect"
        raise UserError(rule, seen=seen, where="--split", fix="use --to seqax, or leave it out")
    convert(open_store(args.store), args.out, to=args.to, split="train" if args.split is None else args.split)
    print(f"{args.out}: written")
    return 0


def _inspect(url: str, samples: int, as_json: bool) -> int:
    from trellis.data.store.opening import open_store
    from trellis.data.store.summary import summarize

    summary = summarize(open_store(url, growing=True), samples=samples)
    if as_json:
        print(json.dumps(dataclasses.asdict(summary), indent=1, ensure_ascii=False))
        return 0
    for name, value in summary.counts.items():
        counted = isinstance(value, int) and not isinstance(value, bool)
        print(f"{name:<16} " + (f"{value:,}" if counted else "not known" if value is None else f"{value}"))
    print("\ndocument lengths in tokens" + (" (a sample of the documents)" if summary.sampled else ""))
    most = max((n for *_, n in summary.histogram), default=1)
    for low, high, n in summary.histogram:
        print(f"{low:>12,} to {high:<12,} {n:>12,} {'#' * round(40 * n / most)}")
    for i, text in summary.samples:
        print(f"\n--- document {i:,}\n{text}")
    return 0


def _verify(url: str) -> int:
    from trellis.data.store.damage import find_damage
    from trellis.data.store.opening import open_store
    from trellis.data.store.store import Store

    store = open_store(url, growing=True, check=False)
    if not isinstance(store, Store):
        raise UserError(
            "Only Trellis's own stores have checksums.",
            seen=type(store).__name__,
            where=url,
            fix="check it with the tool that wrote it",
        )
    damaged = 0
    for damage in find_damage(store):
        damaged += 1
        print(damage)
    chunks = sum(array.num_chunks for array in store.arrays.values())
    if damaged:
        print(
            f"{store.url}: damaged in {damaged} places, {chunks:,} chunks compared. Copy those files again, or delete "
            "the store and tokenize again."
        )
        return 2
    state = "" if store.complete else " so far; the store is not complete"
    print(
        f"{store.url}: {chunks:,} chunks match, {store.num_tokens:,} tokens in {store.num_documents:,} documents{state}"
    )
    return 0


COMMAND = Command(
    name="data",
    summary="inspect, check and convert token stores",
    description="Inspect, check and convert token stores.",
    arguments=arguments,
    execute=execute,
)
