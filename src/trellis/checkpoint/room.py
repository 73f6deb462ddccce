"""Checkpoints that the disk has no room for."""

from pathlib import Path

from trellis.errors import UserError
from trellis.files import no_room


class NoRoom(UserError):
    """A checkpoint could not be written for want of space. What was written before it is whole. Exit code 3."""

    exit_code = 3


def explained(error: BaseException, folder: Path) -> BaseException:
    """What to tell of an error that ended the writing of a checkpoint: `NoRoom`, or the error itself."""
    reason = no_room(error)
    if not reason:
        return error
    told = NoRoom(
        "The disk of a run has room for its checkpoints.",
        seen=reason,
        where=str(folder),
        fix="free some space, then run the same command again; it continues after the last good checkpoint",
    )
    told.__cause__ = error
    return told
