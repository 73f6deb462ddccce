"""A run that made steps before and has no checkpoint: whether it may start over, and what it says then."""

from pathlib import Path

from trellis.errors import UserError
from trellis.train.timeline import last_saved, read_events
from trellis.train.trackers import read_lines


def told_of_starting_over(folder: Path) -> str:
    """A line about a run without a checkpoint that made steps before; "" for one that has just begun.

    Args:
        folder: the run's folder.

    Raises:
        UserError: checkpoints of the run were finished, and they are gone.
    """
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        return ""
    saved = last_saved(read_events(folder / "timeline.jsonl"))
    if saved is not None:
        raise UserError(
            "A run whose state was saved can continue only from a checkpoint.",
            seen=f"no checkpoint, where {folder / 'timeline.jsonl'} tells of one after step {saved}",
            where=str((folder / "checkpoints").absolute()),
            fix="bring its checkpoints back, or start anew with another --run-dir",
        )
    return f"starting over: {lines[-1]['step']:,} steps were made, and no checkpoint was finished"
