"""Errors for checkpoints that the disk has no room for."""

import logging
from pathlib import Path

from trellis.checkpoints.manifest import finished_steps
from trellis.errors import UserError
from trellis.files import no_room, refused


class NoRoom(UserError):
    """A checkpoint could not be written for lack of space. What was written before it is whole. Exit code 3."""

    exit_code = 3


def explained(error: BaseException, folder: Path) -> BaseException:
    """The error to raise when writing a checkpoint failed: `NoRoom` if the disk is full, else the error itself."""
    reason = no_room(error)
    if not reason:
        return error
    told = NoRoom(
        "The disk must have room for the run's checkpoints.",
        seen=reason,
        where=str(folder),
        fix="free some space, then run the same command again, which "
        + ("continues after the last good checkpoint" if finished_steps(folder.parent) else "starts over"),
    )
    told.__cause__ = error
    return told


class _ToldElsewhere(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and (no_room(record.exc_info[1]) or refused(record.exc_info[1])))


def tell_once() -> None:
    """Keeps out of the log what many of Orbax's tasks repeat when files cannot be written."""
    logger = logging.getLogger("asyncio")
    if not any(isinstance(filter, _ToldElsewhere) for filter in logger.filters):
        logger.addFilter(_ToldElsewhere())
