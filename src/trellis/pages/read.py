"""Reads what a run's folder holds, for its page."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trellis.errors import UserError
from trellis.run.folder import check_path, no_folder, was_left
from trellis.train.timeline import read_events
from trellis.train.trackers import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The files of a run that its page shows. Any but the metrics may be missing, and those in a run without a step.

    Attributes:
        name: the folder's name.
        run: the text of `run.yaml`.
        lines: those of `metrics.jsonl`, by step.
        about: model, mesh, memory, communication and machine, as `trellis train` leaves them in `about.json`.
        ledger: the text of `ledger.txt`.
        samples: those of `samples.jsonl`.
        events: those of `timeline.jsonl`, by time.
        left: whether it is known that no process trains in the folder.
    """

    name: str
    run: str
    lines: list[dict[str, Any]]
    about: dict[str, Any]
    ledger: str
    samples: list[dict[str, Any]]
    events: list[dict[str, Any]]
    left: bool = False


def read_folder(folder: Path, *, begun: bool = True) -> RunFolder:
    """Reads a run's folder.

    Args:
        folder: the run's folder.
        begun: whether the run must have made a step. If not, it has no lines before that.

    Raises:
        UserError: it holds no metrics, or damaged files.
    """
    check_path(folder)
    if not (folder / "metrics.jsonl").is_file() and (begun or not (folder / "run.yaml").is_file()):
        raise UserError(
            "The folder of a run must contain its metrics.",
            seen="no metrics.jsonl" if folder.is_dir() else no_folder(folder),
            where=str(folder),
            fix="name the folder of a run, as in runs/NAME-DATE",
        )
    return RunFolder(
        name=folder.absolute().name,
        run=_text(folder / "run.yaml"),
        lines=read_lines(folder / "metrics.jsonl"),
        about=_about(folder / "about.json"),
        ledger=_text(folder / "ledger.txt"),
        samples=read_lines(folder / "samples.jsonl", str),
        events=read_events(folder / "timeline.jsonl"),
        left=was_left(folder),
    )


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(_text(path) or "{}")
        if not isinstance(about, dict):
            raise ValueError(f"{type(about).__name__} instead of an object")
    except ValueError as error:
        raise UserError(
            "The file about a run must be valid JSON.",
            seen=error,
            where=str(path),
            fix="remove the file: the page leaves it out, and a resumed run writes it again",
        ) from error
    return about
