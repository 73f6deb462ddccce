"""Checks of several processes of one run: they were started alike, see one folder, and read the same text."""

import collections
import contextlib
import importlib.metadata
import json
import secrets
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trellis.errors import UserError
from trellis.run.config import Run
from trellis.run.folder import alone, told_apart
from trellis.run.schema import plain
from trellis.train.distributed import is_first

# Seconds after which a file that another process wrote is visible, on file systems that cache missing files.
_SEEN_AFTER = 40.0
_LIBRARIES = ("jax", "jaxlib", "trellis")


def gathered(value: Any) -> list[Any]:
    """A plain value from every process, in their order. All processes call it, each with its own value."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(data.size, np.int32)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def alone_together(folder: Path) -> Generator[None]:
    """Keeps a run's folder for all processes of this start while they train.

    Raises:
        UserError: another start trains in the folder, or the first process cannot write there; raised in all processes.
    """
    with contextlib.ExitStack() as held:
        refused: list[str] = []
        try:
            if is_first():
                held.enter_context(alone(folder))
        except UserError as error:
            if jax.process_count() == 1:
                raise
            refused = [error.rule, error.seen, error.where, error.fix]
        if jax.process_count() > 1 and (refused := gathered(refused)[0]):
            rule, seen, where, fix = refused
            raise UserError(rule, seen=seen, where=where, fix=fix)
        yield


def check_folder(folder: Path, *, wait: float = _SEEN_AFTER, clock: Callable[[], float] = time.monotonic) -> None:
    """Refuses processes that do not see what the first of them writes into the run's folder.

    Args:
        folder: the run's folder, which the first process sees.
        wait: seconds within which a new file becomes visible.
        clock: what tells the time.

    Raises:
        UserError: a process does not see it; raised in all processes.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    name = gathered(f".seen-{secrets.token_hex(8)}")[0]
    if is_first():
        (folder / name).touch()
    multihost_utils.sync_global_devices(name)  # it is written
    until = clock() + wait
    while not (seen := folder.is_dir() and name in {path.name for path in folder.iterdir()}) and clock() < until:
        time.sleep(0.5)
    found = gathered([str(folder.resolve()), seen])
    if is_first():
        (folder / name).unlink()
    blind = [(number, path) for number, (path, sees) in enumerate(found) if not sees]
    if blind:
        number, path = blind[0]
        raise UserError(
            "All processes must see the run's folder.",
            seen=f"process {number} does not see in {path} what process 0 writes in {found[0][0]}",
            where="--run-dir",
            fix="use one folder that all of them share, by its absolute path",
        )


def check_devices() -> None:
    """Refuses processes that differ in their number of devices.

    Raises:
        UserError: a process differs; raised in all processes, each of which sees the devices of all.
    """
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} in process {number}" for number, count in sorted(counts.items()))
        raise UserError(
            "All processes of a run must have the same number of devices.",
            seen=told,
            where="--devices",
            fix=f"start all with --devices {min(counts.values())}, or with the same number of accelerators",
        )


def check_alike(run: Run, *, until: int | None = None) -> None:
    """Refuses processes that were started with options or versions other than the first's.

    Args:
        run: what this process was asked to train.
        until: the step after which it is to pause.

    Raises:
        UserError: a process differs; raised in all processes.
    """
    if jax.process_count() == 1:
        return
    mine = plain(run) | {"distributed": {"processes": run.distributed.processes}}  # the rest is each process's own
    mine["until"] = until
    mine["versions"] = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    first, *others = gathered(mine)
    for number, other in enumerate(others, 1):
        if other != first:
            raise UserError(
                "All processes of a run must be started with the same options.",
                seen=told_apart(first, other, "in process 0", f"in process {number}"),
                where=f"process {number}",
                fix="start all with the same recipe, options and versions",
            )


def wait_for_others(what: str) -> None:
    """Returns when every process has done `what`.

    A CPU's collectives over devices that have not met before end a process whose others come half a minute later, as
    where one has its compiled step from a cache.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def check_text(identities: dict[str, dict]) -> None:
    """Refuses processes that read a text other than the first's.

    Args:
        identities: those of the stores, by name.

    Raises:
        UserError: a process differs; raised in all processes.
    """
    if jax.process_count() == 1:
        return
    first, *others = gathered(identities)
    for number, other in enumerate(others, 1):
        if other != first:
            name = next(name for name in first if other.get(name) != first[name])
            raise UserError(
                "All processes of a run must read the same tokens.",
                seen=f"different tokens in process {number} than in process 0{_of(name)}",
                where=f"process {number}",
                fix="use one store that all of them share, or copies of it",
            )


def _of(name: str) -> str:
    """Words for a store by its name: that of a part, `/` and that of a validation set, or nothing."""
    return f", of the validation set {name[1:]}" if name.startswith("/") else f", of {name}" if name else ""
