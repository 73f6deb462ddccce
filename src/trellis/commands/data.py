"""`trellis data`."""

import argparse

from trellis.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis data`."""
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


def execute(args: argparse.Namespace) -> int:
    """`trellis data`."""
    from trellis.data import looking

    if args.action == "inspect":
        return looking.inspect(args.store, samples=args.samples, as_json=args.json)
    if args.action == "verify":
        return looking.verify(args.store)
    from trellis.data.foreign import convert
    from trellis.data.store import Store

    convert(Store.open(args.store), args.out, to=args.to, split=args.split)
    print(f"{args.out}: written")
    return 0


COMMAND = Command(
    name="data",
    summary="look into token stores and check them",
    description="Look into token stores and check them.",
    arguments=arguments,
    execute=execute,
)
