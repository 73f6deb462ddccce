"""A run that lacks its checkpoints or its metrics: whether it may go on, and what it says."""

from pathlib import Path

from trellis.checkpoints.manifest import finished_steps
from trellis.errors import UserError
from trellis.files import typed
from trellis.run.folder import IMPORTED
from trellis.train.timeline import last_saved, read_events
from trellis.train.trackers import read_lines


def told_of_starting_over(folder: Path) -> str:
    """A line about a run without a checkpoint that made steps before; "" for one that has just begun.

    Args:
        folder: the run's folder.

    Raises:
        UserError: checkpoints of the run were finished, and they are gone; or its model was to be an imported one.
    """
    saved = last_saved(read_events(folder / "timeline.jsonl"))
    if saved is not None:
        raise UserError(
            "A run whose state was saved can continue only from a checkpoint.",
            seen=f"no checkpoint, where {folder / 'timeline.jsonl'} tells of one after step {saved}",
            where=str((folder / "checkpoints").absolute()),
            fix="bring its checkpoints back, or start anew with another --run-dir",
        )
    if is_cut_off_import(folder):
        raise UserError(
            "An imported model must be whole before it is trained.",
            seen=f"no checkpoint, where {folder / IMPORTED} tells of an import, which was cut off",
            where=str((folder / "checkpoints").absolute()),
            fix=f"import it again: trellis import ... --to {typed(folder)}; or use another --run-dir",
        )
    lines = read_lines(folder / "metrics.jsonl")
    return f"starting over: {lines[-1]['step']:,} steps were made, and no checkpoint was finished" if lines else ""


def is_cut_off_import(folder: Path) -> bool:
    """Whether a model was to be imported into a folder, and no checkpoint ever held it whole."""
    saved = finished_steps(folder / "checkpoints") or last_saved(read_events(folder / "timeline.jsonl")) is not None
    return (folder / IMPORTED).is_file() and not saved


def told_of_no_lines(folder: Path, step: int) -> str:
    """A line about a run without a line of metrics that is resumed after a step; "" if it has some."""
    path = folder / "metrics.jsonl"
    if not step or read_lines(path):
        return ""
    return f"{path} has no line up to step {step:,}: the curves of this run begin after it"
