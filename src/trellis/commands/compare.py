"""`trellis compare`."""

import argparse
from pathlib import Path

from trellis.commands.command import Command, check_place, some_path


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis compare`."""
    parser.add_argument("folders", metavar="RUN", nargs="+", help="the runs' folders")
    parser.add_argument(
        "--page",
        type=some_path,
        metavar="FILE.html",
        default="compare.html",
        help="the page to write (default: compare.html)",
    )


def execute(args: argparse.Namespace) -> int:
    """`trellis compare`."""
    from trellis.files import write_whole
    from trellis.pages.compare import page, text
    from trellis.pages.read import read_folder

    check_place(Path(args.page))
    runs = [read_folder(Path(folder), begun=False) for folder in args.folders]
    begun = [run for run in runs if run.lines]
    if len(begun) > 1:
        for run in runs:
            if not run.lines:
                print(f"{run.name} is left out: it has no step yet\n")
        runs = begun
    print(text(runs))
    write_whole(Path(args.page), page(runs))
    print(f"\npage     {args.page}")
    return 0


COMMAND = Command(
    name="compare",
    summary="compare runs side by side",
    description="Shows how the files of runs differ, and their curves over steps, tokens and time, here and as a page.",
    arguments=arguments,
    execute=execute,
)
