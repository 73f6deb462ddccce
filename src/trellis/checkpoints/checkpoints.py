"""Checkpoints: asynchronous, sharded, whole or not at all, and restored onto any mesh.

A checkpoint of step 100 is the folder `step-00000100`: the arrays in `state/` (written by Orbax, its slices by each
process), a copy of `run.yaml`, the checksums of every process, and `manifest.json`, which is written last. A folder
without a manifest is not a checkpoint: a later start removes it.
"""

import contextlib
import functools
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trellis.checkpoints.asked import (
    check_content,
    check_newest,
    check_options,
    check_places,
    folder_of,
    number_of,
    stored_name,
)
from trellis.checkpoints.entries import entries, rebuild
from trellis.checkpoints.held import held_by_another, hold, let_go, make
from trellis.checkpoints.manifest import (
    MANIFEST,
    NAME,
    DamagedCheckpoint,
    commit,
    finished_steps,
    read_manifest,
    remove,
    verify,
    wait_for,
    write_checksums,
)
from trellis.checkpoints.matching import check_fit, check_names, clear_padding
from trellis.checkpoints.room import NoRoom, explained, tell_once
from trellis.errors import UserError
from trellis.mesh.meshes import sharding_of
from trellis.run.folder import check_path

# How often the newest checkpoint of a run that is training is looked for, if the run removes those that are being read.
_TRIES = 3


class RemovedCheckpoint(UserError):
    """A run that is training removed a checkpoint while it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint held: the state on the target's mesh, the step it was saved after, and the data position."""

    state: Any
    step: int
    data: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LastGood:
    """Words about the newest finished checkpoint, for the message about what ended a run.

    Attributes:
        where: names it, or says that there is none.
        again: the end of a fix, with what the same command does then.
    """

    where: str
    again: str

    def __str__(self) -> str:
        return self.where


def told_of_last_good(folder: Path) -> LastGood:
    """Words about the newest finished checkpoint in a folder."""
    again = "run the same command again, which"
    if not folder.is_dir():
        where = f"the checkpoints in {folder}, which is not there now"
        return LastGood(where, f"{again} continues after the newest of them, if there is one")
    steps = finished_steps(folder)
    if not steps:
        return LastGood("no checkpoint was written yet", f"{again} starts over")
    where = f"last good checkpoint: {folder / _folder_of(steps[-1])}"
    return LastGood(where, f"{again} continues after that checkpoint")


def _folder_of(step: int) -> str:
    return f"step-{step:08d}"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; every process of the run must see the same folder.
        keep_latest: how many of the newest ones are kept.
        keep_every: also keep those of multiples of this step; None keeps no others.
        copy: files copied into each checkpoint, `run.yaml` above all.
        report: receives a line if a checkpoint is damaged or cut off; the default prints to stderr.
        timeout: seconds that one process waits for the others' files.
        read_only: change nothing in the folder, since a run may be training there.
        host_bytes: how much of a state may be in the host's memory at a time (whole gigabytes, one array at least); a
            save then returns when most of it is written. None copies all of it first and writes in the background.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_latest: int = 2,
        keep_every: int | None = None,
        copy: tuple[Path, ...] = (),
        report: Callable[[str], None] | None = None,
        timeout: float = 600.0,
        read_only: bool = False,
        host_bytes: int | None = None,
    ):
        check_options(keep_latest, keep_every, timeout, host_bytes)
        check_path(found := folder_of(folder))
        self.folder = found.absolute()
        self._keep_latest, self._keep_every = keep_latest, keep_every
        self._copy, self._timeout, self._read_only, self._host_bytes = copy, timeout, read_only, host_bytes
        self._report = report or (lambda line: print(line, file=sys.stderr, flush=True))
        self._writer: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._held: int | None = None
        self._left = False
        tell_once()
        if jax.process_index() == 0 and not read_only:
            make(self.folder)
            self._remove_unfinished()
        _barrier("checkpoints: open")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, oldest first."""
        return finished_steps(self.folder)

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.folder / _folder_of(step)

    def save(self, step: int, state: Any, *, data: Mapping | None = None) -> bool:
        """Starts writing a checkpoint, and returns once the state may be donated.

        First waits for the checkpoint before it. The next call raises what fails in the background.

        Args:
            step: the number of steps that made this state; an integer of any kind, such as `state.step`.
            state: any tree of arrays, including typed random keys and named arrays.
            data: what to store beside the state, as JSON: the data position, counters.

        Returns:
            False if a checkpoint of this step already exists, and nothing was written.

        Raises:
            UserError: something cannot be stored, such as an array without elements, or data that JSON does not take;
                a checkpoint of a later step is there; the folder is only read, or another `Checkpoints` is writing
                into it.
        """
        self.wait()
        if self._read_only:
            rule, fix = "A folder that is only read takes no checkpoint.", "open it without read_only, or use another"
            raise UserError(rule, seen="read_only=True", where=str(self.folder), fix=fix)
        step, found = number_of(step), entries(state)
        check_content(found, data)
        folder = self.path(step)
        if (folder / MANIFEST).exists():
            return False
        check_newest(step, self.latest(), self.folder)
        if jax.process_index() == 0:
            _try_to_write(self.folder)
            self._held = hold(self.folder)
            if self._held is None:
                raise held_by_another(self.folder)
        ocp = _orbax()
        # Layers are stored one by one, so that a reader of one layer reads only that.
        chunks = {name: ocp.SaveArgs(shard_axes=(0,) if entry.is_stacked else ()) for name, entry in found.items()}
        args = ocp.args.PyTreeSave({name: entry.leaf for name, entry in found.items()}, save_args=chunks)
        try:
            self._checkpointer().save(folder / "state", args=args)
        except BaseException as error:
            self._let_go()
            raise explained(error, folder) from error
        content = {"step": step, "data": dict(data or {}), "entries": {n: e.describe() for n, e in found.items()}}
        # Not a daemon: a process that ends normally finishes its checkpoint.
        self._thread = threading.Thread(target=self._finish, args=(folder, content), name=f"checkpoint {step}")
        self._thread.start()
        return True

    def wait(self) -> None:
        """Returns when the checkpoint under way is finished on every process; raises what stopped it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def leave(self) -> None:
        """Waits for nothing from here on: the process is to end at once, without the checkpoint under way."""
        self._thread, self._left = None, True

    def close(self) -> None:
        """Finishes the checkpoint under way and releases its threads."""
        if self._left:
            return
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def restore(
        self,
        target: Any,
        *,
        step: int | None = None,
        partial: bool = False,
        resizable: Mapping[str, int] | None = None,
        verify: bool = True,
    ) -> Restored | None:
        """Reads the newest undamaged checkpoint onto the target's mesh, after waiting for one that is under way.

        Each process reads only what its devices hold. A damaged checkpoint is reported and set aside under another
        name, and the one before it is used.

        Args:
            target: the state to fill: a tree of `jax.ShapeDtypeStruct` with shardings, or of arrays.
            step: use this checkpoint and no other.
            partial: let the checkpoint hold entries that the target does not have.
            resizable: the true sizes of axes, by name. Such an axis may have another length in the checkpoint (a
                vocabulary padded for another mesh): what is beyond the true size is cut off or filled with zeros.
            verify: first compare the files with their checksums; False if the same checkpoint was just verified.

        Returns:
            The state, its step and data position; None if there is no checkpoint.

        Raises:
            UserError: a checkpoint does not fit the target, the requested one is absent, all are damaged, the target
                does not give the sharding of its arrays, or a run that is training removes what is read.
        """
        self.wait()
        arguments = (target, step, partial, dict(resizable or {}), verify)
        for _ in range(_TRIES - 1):
            try:
                return self._restore(*arguments)
            except RemovedCheckpoint:
                if step is not None:
                    raise
        return self._restore(*arguments)

    def _restore(
        self, target: Any, step: int | None, partial: bool, resizable: dict[str, int], verify: bool
    ) -> Restored | None:
        known = self.steps()
        wanted, damage = known[::-1] if step is None else [s for s in known if s == step], None
        if step is not None and not wanted:
            raise UserError(
                "Only a finished checkpoint can be restored.",
                seen=f"step {step}",
                where=str(self.folder),
                fix=f"use one of the steps {known}" if known else "there is none: train first",
            )
        for candidate in wanted:
            folder = self.path(candidate)
            with self._kept(folder):
                manifest, damage = _verify_together(folder) if verify else (read_manifest(folder), None)
                if damage is None:
                    return self._read(folder, manifest, target, partial, resizable)
            if self._is_removed(folder):
                raise _removed(folder)
            if step is None:
                self._set_aside(folder, damage)
        aside = sorted(path.name for path in self.folder.glob("damaged-step-*"))
        if wanted or aside:
            raise UserError(
                "A run can resume only from a complete, undamaged checkpoint.",
                seen=damage or f"{', '.join(aside)} and no other",
                where=str(self.folder),
                fix="restore a copy of the folder, or start a new run in another folder",
            )
        return None

    def read(self, step: int, name: str, layer: int | None = None) -> np.ndarray:
        """One array of a checkpoint, as it is stored, or one layer of it; nothing else is read into memory.

        Its files are assumed to be undamaged: `restore` verifies them.

        Args:
            step: the checkpoint's step.
            name: the entry's name, as in model.blocks.mlp.up.
            layer: a position along its first dimension; None for all of it.

        Raises:
            UserError: the checkpoint is not there or not finished, or has no such entry or layer.
        """
        self.wait()
        with self._kept(self.path(step)):
            path = name.replace(".", "/")
            try:
                return self._stored(step, path, layer)
            except (ValueError, IndexError):
                found = stored_name(self.path(step), step in self.steps(), name, layer)
                if found == path:
                    raise
                return self._stored(step, found, layer)  # the key of a dict has a dot

    def _stored(self, step: int, path: str, layer: int | None) -> np.ndarray:
        import tensorstore

        there = self.path(step).resolve()  # TensorStore takes no `..`
        state = {"driver": "file", "path": f"{there}/state/"}  # a URL would have some characters escaped
        base = {"driver": "ocdbt", "base": state, "path": f"{path}/"}
        stored = tensorstore.open({"driver": "zarr", "kvstore": base}, read=True).result()
        return (stored if layer is None else stored[layer]).read().result()

    def _is_removed(self, folder: Path) -> bool:
        """Whether a checkpoint was there, and a run that is training has removed it since: its manifest goes first."""
        return self._read_only and not (folder / MANIFEST).exists()

    @contextlib.contextmanager
    def _kept(self, folder: Path) -> Generator[None]:
        """Within it, what fails because a run removes a checkpoint is told as that."""
        try:
            yield
        except Exception as error:
            if self._is_removed(folder):
                raise _removed(folder) from error
            raise

    def _read(self, folder: Path, manifest: dict, target: Any, partial: bool, resizable: dict[str, int]) -> Restored:
        ocp = _orbax()
        wanted = entries(target)
        check_places(wanted)
        check_names(folder, manifest["entries"], wanted, partial)
        args = {}
        for name, entry in wanted.items():
            resized = check_fit(folder, name, manifest["entries"][name], entry, resizable)
            args[name] = ocp.ArrayRestoreArgs(
                sharding=sharding_of(entry.leaf), global_shape=entry.shape, dtype=entry.leaf.dtype, strict=not resized
            )
        arrays = self._checkpointer().restore(
            folder / "state",
            args=ocp.args.PyTreeRestore(dict.fromkeys(args, 0), restore_args=args, partial_restore=True),
        )
        arrays = {name: clear_padding(arrays[name], manifest["entries"][name], resizable) for name in args}
        return Restored(state=rebuild(target, arrays), step=manifest["step"], data=manifest["data"])

    def _finish(self, folder: Path, content: dict) -> None:
        """The work in the background: waits for Orbax, writes checksums and manifest, removes old checkpoints."""
        try:
            self._checkpointer().wait_until_finished()
            process, several = jax.process_index(), jax.process_count() > 1
            wait_for([folder / "state"], self._timeout if several else 0.0)
            if process == 0:
                for source in self._copy:
                    shutil.copy(source, folder / source.name)
            write_checksums(folder, process)
            if process == 0:
                commit(folder, content, jax.process_count(), self._timeout)
                self._apply_rule()
            else:
                wait_for([folder / MANIFEST], self._timeout)
        except BaseException as error:  # the main thread raises it again
            self._failure = explained(error, folder)
            if isinstance(self._failure, NoRoom) and jax.process_index() == 0:
                shutil.rmtree(folder, ignore_errors=True)  # half a checkpoint takes room and is of no use
        finally:
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        let_go(held)

    def _apply_rule(self) -> None:
        for step in self.steps()[: -self._keep_latest]:
            if self._keep_every is None or step % self._keep_every:
                try:
                    remove(self.path(step))
                except OSError as error:  # as of NFS, on which a reader has its files open: a later start removes it
                    self._report(f"checkpoint {self.path(step).name} is not removed whole: {error}")

    def _remove_unfinished(self) -> None:
        held = hold(self.folder)
        for path in self.folder.iterdir() if held is not None else ():  # else one of them is being written
            whose = NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()  # a run makes no links
            if whose and not (path / MANIFEST).exists():
                self._report(f"checkpoint {path.name} was cut off before it was finished, and is removed")
                shutil.rmtree(path)
        let_go(held)

    def _set_aside(self, folder: Path, damage: str) -> None:
        aside = folder.with_name(f"damaged-{folder.name}")
        if jax.process_index() == 0:
            done = "passed over" if self._read_only else f"set aside as {aside.name}"
            self._report(f"checkpoint {folder.name} is damaged and is {done}: {damage}")
            if not self._read_only:
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
        _barrier(f"checkpoints: set aside {folder.name}")

    def _checkpointer(self) -> Any:
        if self._writer is None:
            ocp = _orbax()
            at_once = None if self._host_bytes is None else -(-self._host_bytes // 10**9)
            options = {"use_ocdbt": True, "use_zarr3": False, "save_device_host_concurrent_gb": at_once}
            self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**options))
        return self._writer


@functools.cache
def _orbax() -> Any:
    """Orbax, imported when it is first used: that takes more than a second."""
    import orbax.checkpoint as ocp

    # Orbax raises what each of its threads also logs with a traceback. Writes that end after the first failure find its
    # event loop closed, and report that with a traceback, too.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(ignored: Any) -> None:
        if not (ignored.exc_type is RuntimeError and str(ignored.exc_value) == "Event loop is closed"):
            before(ignored)

    sys.unraisablehook = hook

    return ocp


def _try_to_write(folder: Path) -> None:
    """Raises the system's error if nothing can be made in a folder. Threads of Orbax would wait minutes for it."""
    probe = folder / ".probe"
    probe.touch()
    probe.unlink()


def _removed(folder: Path) -> RemovedCheckpoint:
    return RemovedCheckpoint(
        "A run must keep a checkpoint for as long as it is read.",
        seen=f"{folder.name}, which the run has removed since, as it trains on",
        where=str(folder.parent),
        fix="try again; or let the run save less often or keep more: checkpoints.every, keep_latest, keep_every",
    )


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def _verify_together(folder: Path) -> tuple[dict, str | None]:
    """A checkpoint's manifest, and what is wrong with its files. Each process reads its share of them; all agree."""
    manifest, damage = {}, None
    try:
        manifest = read_manifest(folder)
        if folder.name != (name := _folder_of(manifest["step"])):
            raise DamagedCheckpoint(f"{folder / MANIFEST} is that of {name}")
        verify(folder, manifest, share=jax.process_index(), of=jax.process_count())
    except DamagedCheckpoint as error:
        damage = str(error)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        bad = multihost_utils.process_allgather(np.array(damage is not None))
        if bad.any() and damage is None:
            damage = f"{folder}: found by process {int(np.argmax(bad))}"
    return manifest, damage
