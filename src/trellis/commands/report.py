"""`trellis report`."""

import argparse
from pathlib import Path

from trellis.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis report`."""
    parser.add_argument("folder", metavar="RUN", help="the run's folder")


def execute(args: argparse.Namespace) -> int:
    """`trellis report`."""
    from trellis.pages.run import write_report

    print(write_report(Path(args.folder)))
    return 0


COMMAND = Command(
    name="report",
    summary="write one self-contained HTML page about a run",
    description="Writes the page of a run: report.html in its folder. It can be written while the run trains, too.",
    arguments=arguments,
    execute=execute,
)
