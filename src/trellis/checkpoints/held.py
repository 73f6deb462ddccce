"""Makes a folder of checkpoints, and holds it while one is written: nobody is to take it for one that was cut off."""

import contextlib
import os
from pathlib import Path

from trellis.errors import UserError


def make(folder: Path) -> None:
    """Makes a folder, and those around it, unless it is there.

    Raises:
        UserError: a file has its name, or a link that leads nowhere, as to a disk that is not mounted.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        linked = folder.is_symlink()
        raise UserError(
            "Checkpoints must be in a folder.",
            seen=f"a link to {os.readlink(folder)}, which is not there" if linked else "a file",
            where=str(folder),
            fix="mount the disk that it is on, or remove the link" if linked else "move the file away",
        ) from None


def hold(folder: Path) -> int | None:
    """Holds a folder, until `let_go` or the end of the process; None if somebody else holds it.

    Some file systems of clusters have no locks: there everybody may hold it.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def let_go(held: int | None) -> None:
    """Ends what `hold` began."""
    import fcntl

    if held is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # of processes that were forked meanwhile, too
        os.close(held)


def held_by_another(folder: Path) -> UserError:
    """The error of a second one that writes into a folder."""
    return UserError(
        "Only one `Checkpoints` at a time can write into a folder.",
        seen="another one, which is writing a checkpoint",
        where=str(folder),
        fix="close the other first, or use another folder; to restore alone, open it with read_only=True",
    )
