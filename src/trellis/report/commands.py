"""`trellis report`."""

import argparse
from pathlib import Path


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis report`."""
    parser.description = "Writes the page of a run: report.html in its folder. Works while the run trains, too."
    parser.add_argument("folder", metavar="RUN", help="the run's folder")


def run_report(args: argparse.Namespace) -> int:
    """`trellis report`."""
    from .page import write_report

    print(write_report(Path(args.folder)))
    return 0
