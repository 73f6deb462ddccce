"""A run's folder: where it is, and checks that it holds one run."""

import contextlib
import dataclasses
import itertools
import platform
import re
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, TextIO

from trellis.errors import TrellisError, UserError, shortened
from trellis.files import check_utf8, typed, write_whole
from trellis.run.config import Distributed, Run
from trellis.run.data import MixtureSource, StoreSource
from trellis.run.run_file import read_run, write_run
from trellis.run.schema import plain

# Fields that the sizes of a mesh have to divide, and that stay as they are when a run is resumed. Of a model, all are.
_STAYS = ("batch_size", "data.sequence_length", "model.")
# Others that stay, and that some meshes cannot have. A run that was resumed had a mesh that can.
_HELD = ("lengths", "precision.")
# Fields that may differ when a run is resumed: how long, where and in which way it is computed, and what is written
# about it; not what it computes: its model, its data or its optimizer.
_MAY_CHANGE = (
    "name", "steps", "mesh", "layout", "devices", "distributed", "checkpoints", "evaluation", "logging", "guard",
    "deadline", "profile", "microbatches", "accumulation", "cpu", "remat", "scan_layers", "skip_nonfinite",
    "compiler_options",
)  # fmt: skip
# Those of `model.routing`: how tokens get to their experts, which each mesh does in its own way.
_OF_ROUTING = ("way", "slack", "interleave")
# The `config.json` of the folder that a run was imported from.
IMPORTED = "imported.json"
# The folder of its tokenizer.
TOKENIZER = "tokenizer"
# The name of a checkpoint's folder.
_CHECKPOINT = re.compile(r"step-(\d{8,})")
# The protocol of a URL; a `Path` has one slash after it.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:(?=/)")
# How often a folder that is held is tried again, and the seconds between.
_TRIES, _BETWEEN = 10, 0.05


def new_folder(run: Run, parent: Path = Path("runs")) -> Path:
    """`runs/NAME-DATE`, the name of a new run's folder; `made` makes it."""
    return parent / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def made(folder: Path) -> Path:
    """A new folder of this name, followed by a number if that is taken, also by a run that starts at the same time.

    Raises:
        UserError: nothing can be written there.
    """
    with _writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            free = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            with contextlib.suppress(FileExistsError):
                free.mkdir()
                break
    return free


@contextlib.contextmanager
def _writable(folder: Path) -> Generator[None]:
    """Within it, an error of the file system is one of ours, about the run's folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "The run's folder must be writable.",
            seen=error.strerror,
            where=str(folder),
            fix="use another --run-dir, in a folder that you can write to",
        ) from None


def check_path(folder: Path) -> None:
    """Refuses a folder that no run can have: TensorStore writes and finds checkpoints under names in UTF-8, in which it
    takes a backslash for a slash. Under a locale of another encoding, Python would name another folder. Nor is a
    checkpoint, with its copy of `run.yaml`, a run's folder; and of a URL, Python would make a folder called `s3:`."""
    if url := _URL.match(str(folder)):
        rest = str(folder)[url.end() :].lstrip("/")
        rest = f"/{rest}" if url[0] == "file:" else rest
        mount = "mount the bucket (gcsfuse, s3fs) and use its folder; only token stores can be URLs"
        raise UserError(
            "A run's folder must be in a file system.",
            seen="a URL",
            where=f"{url[0]}//{rest}",
            fix=f"write {rest}" if url[0] == "file:" else mount,
        )
    shown, fix = str(folder).encode(errors="replace").decode(), "rename it, or use another --run-dir"
    if (encoding := sys.getfilesystemencoding()) != "utf-8" and not str(folder.absolute()).isascii():
        raise UserError(
            "The path of a run's folder must be ASCII, unless the locale is of UTF-8.",
            seen=f"{str(folder.absolute())!r} in {encoding}",
            where=shown,
            fix="set the environment variable LC_ALL to C.UTF-8, or use another --run-dir",
        )
    check_utf8(str(folder.absolute()), "The path of a run's folder must be valid UTF-8.", shown, fix)
    if "\\" in str(folder.absolute()):
        raise UserError(
            "The path of a run's folder must contain no backslash.", seen=str(folder.absolute()), where=shown, fix=fix
        )
    if (step := _CHECKPOINT.fullmatch(folder.absolute().name)) and (folder / "state").is_dir():
        run = folder.absolute().parent.parent
        use = f"`trellis evaluate`, `generate` and `export` take it with --step {int(step[1])}"
        raise UserError(
            "A run's folder is the one that has its checkpoints.",
            seen=f"the checkpoint of step {int(step[1])}",
            where=shown,
            fix=f"name {typed(run) if (run / 'run.yaml').is_file() else 'the folder of its run'}; {use}",
        )


def check_run_folder(folder: Path) -> None:
    """Refuses a folder that no run can have (`check_path`), and the one of a run's checkpoints."""
    check_path(folder)
    there = folder.absolute()
    if there.name == "checkpoints" and (there.parent / "run.yaml").is_file():
        raise UserError(
            "A run's folder is the one that has its checkpoints.",
            seen="the folder `checkpoints` of a run",
            where=str(folder),
            fix=f"name {typed(there.parent)}",
        )


def has_begun(folder: Path) -> bool:
    """Whether a run has made a step or saved a state. One that was refused before that leaves its file, to be
    corrected."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any((folder / "checkpoints").glob("step-*"))


def claim(folder: Path, run: Run, *, done: int = 0, write: bool = True) -> None:
    """Makes a folder the run's, or checks that it already is.

    Args:
        folder: the run's folder; made if it does not exist.
        run: the run; `run.yaml` is written, and written anew if the only differences are those that a resumed run may
            have.
        done: the steps that the run has made: those of its last checkpoint.
        write: whether this process writes it, or only checks.

    Raises:
        UserError: the folder holds another run, or one that is further than this one is to go or to be profiled.
    """
    path = folder / "run.yaml"
    copies = sorted((folder / "checkpoints").glob("step-*/run.yaml"))
    known = copies[-1] if copies and not path.exists() else path
    if known.exists() and has_begun(folder):
        there = with_own_tokenizer(read_run(known), folder)
        instead = "" if known == path else f"copy this file to {typed(path)} and "
        instead += f"resume what is there: trellis train {typed(folder)}"
        _check_learned(there, run, known, "in the folder", instead)
        if run.profile not in (None, there.profile) and run.profile.start < done:
            raise UserError(
                "Profiling must start at a step that is not yet made.",
                seen=f"start={run.profile.start}, {done} steps done",
                where="--profile.start",
                fix=f"use --profile.start {done} or more" + f", and --steps {done + 1} or more" * (run.steps <= done),
            )
    if run.steps < done:
        raise UserError(
            "A run cannot end before its last checkpoint.",
            seen=f"steps={run.steps} asked for, {done} done",
            where=str(folder),
            fix=f"use --steps {done} or more, or a new --run-dir for a shorter run",
        )
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_run(dataclasses.replace(run, distributed=Distributed()), path)  # that is of one start, of one process


def check_as_saved(run: Run, folder: Path, checkpoint: Path) -> None:
    """Refuses to resume from a checkpoint whose copy of `run.yaml` is of another run: the folder's was edited since.

    The file may be edited to name another tokenizer or a validation set, from which nothing is learned.

    Args:
        run: the run that is to go on.
        folder: the run's folder.
        checkpoint: the folder of the checkpoint, whose files are whole. One without a copy, or with one that this
            version cannot read, passes.
    """
    copy = checkpoint / "run.yaml"
    try:
        saved = read_run(copy)
    except (OSError, UserError):
        return
    instead = f"copy this file to {typed(folder / 'run.yaml')}"
    _check_learned(_only_trained(saved), _only_trained(run), copy, "in the checkpoint", instead)


def _only_trained(run: Run) -> Run:
    """A run without its tokenizer and its validation sets."""
    source = run.data.source
    if isinstance(source, MixtureSource):
        parts = tuple(dataclasses.replace(part, validation=None) for part in source.parts)
        source = dataclasses.replace(source, parts=parts)
    elif isinstance(source, StoreSource):
        source = dataclasses.replace(source, validation=None)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, source=source, tokenizer=None))


def _check_learned(there: Run, asked: Run, file: Path, of_there: str, instead: str) -> None:
    """Refuses a run that learns otherwise than the one in a file, with what to do instead of using another folder."""
    before, now = _learned(there), _learned(asked)
    if before != now:
        raise UserError(
            "A run folder holds one run, and can only be used to resume it.",
            seen=told_apart(before, now, of_there, "asked for"),
            where=str(file),
            fix=f"use another --run-dir, or {instead}",
        )


def told_apart(one: Mapping[str, Any], other: Mapping[str, Any], of_one: str, of_other: str) -> str:
    """The options in which two runs, as plain values, differ, with both values and words for whose they are."""
    told = lambda value: shortened("null" if value is None else str(value), 80)
    apart = _fields_apart("", one, other)
    return "; ".join(f"{field}: {told(a)} {of_one}, {told(b)} {of_other}" for field, a, b in apart)


def _fields_apart(name: str, there: Any, asked: Any) -> list[tuple[str, Any, Any]]:
    """The options in which two values of a field differ, with both."""
    if isinstance(there, list) and isinstance(asked, list) and any(isinstance(item, dict) for item in there + asked):
        there, asked = dict(enumerate(there)), dict(enumerate(asked))  # an element is an option, as in parts.0.weight
    if not isinstance(there, dict) or not isinstance(asked, dict):
        return [(name, there, asked)]
    keys = [key for key in {**there, **asked} if there.get(key) != asked.get(key)]
    inner = f"{name}." if name else ""
    return [each for key in keys for each in _fields_apart(f"{inner}{key}", there.get(key), asked.get(key))]


@contextlib.contextmanager
def unchanged_if_refused(folder: Path, *, write: bool = True) -> Generator[None]:
    """Restores the `run.yaml` of a run that has begun if resuming it was refused before a step.

    A field that must stay as it is cannot be the fix: an error that suggests another value for one suggests another
    mesh instead.

    Args:
        folder: the run's folder.
        write: whether this process restores the file, or only tells the same as the one that does.
    """
    path, made = folder / "run.yaml", lambda: (has_begun(folder), _size(folder / "metrics.jsonl"))
    before = made()
    text = path.read_bytes() if before[0] and path.exists() else None
    try:
        yield
    except TrellisError as error:
        if text is None or made() != before:
            raise
        if write and path.read_bytes() != text:
            write_whole(path, text.decode())
        parts = isinstance(error, UserError) and "microbatches=" in str(error.seen)  # they may change, too
        if isinstance(error, UserError) and (held := _held_by(error)) and not parts:
            fix = f"use a mesh that can, such as the one before: a resumed run keeps its {held}"
            raise UserError(error.rule, seen=error.seen, where=error.where, fix=fix) from error
        if isinstance(error, UserError) and (held or _asks_for_another(error)):
            several = ", --microbatches" if parts else ""
            fix = f"use --devices{several} or --mesh sizes that divide it: a resumed run keeps its {error.where}"
            raise UserError(error.rule, seen=error.seen, where=error.where, fix=fix) from error
        raise


def _held_by(error: UserError) -> str | None:
    """The field that a resumed run keeps and that an error about its mesh or layout suggests to change."""
    if error.where.startswith(_HELD):
        return error.where
    named = re.search(r"--(model\.(?!routing\.)[\w.]*\w)", error.fix)
    return named[1] if named and error.where.lstrip("-").startswith(("layout.", "mesh.")) else None


def _asks_for_another(error: UserError) -> bool:
    """Whether an error suggests another value for a field that a resumed run keeps."""
    stays = error.where.startswith(_STAYS) and error.where.removeprefix("model.routing.") not in _OF_ROUTING
    return stays and error.fix.startswith(f"use --{error.where} ")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _learned(run: Run) -> dict[str, Any]:
    """The fields of a run that must stay when it is resumed; for `lengths`, what is set, without microbatches.

    Stores may have moved: what they hold is in each checkpoint, and is compared.
    """
    found = {name: value for name, value in plain(run).items() if name not in _MAY_CHANGE}
    found["data"] = found["data"] | {"source": _without_places(found["data"]["source"])}
    if routing := found["model"].get("routing"):
        stays = {name: value for name, value in routing.items() if name not in _OF_ROUTING}
        found["model"] = found["model"] | {"routing": stays}
    said = lambda entry: {k: v for k, v in entry.items() if v is not None and k not in _MAY_CHANGE}
    return found | {"lengths": [said(entry) for entry in found["lengths"]]}


def _without_places(source: dict[str, Any]) -> dict[str, Any]:
    """A source of tokens, or a part of one, without where its stores are. Whether it has a validation set is left."""
    found = {name: value for name, value in source.items() if name != "path"}
    if "validation" in found:
        found["validation"] = None if found["validation"] is None else "a store"
    return found | ({"parts": [_without_places(part) for part in found["parts"]]} if "parts" in found else {})


@contextlib.contextmanager
def alone(folder: Path) -> Generator[None]:
    """Keeps a run's folder for this process while it trains; the system releases it when the process ends.

    Whoever asks whether it `was_left` holds it for a moment.

    Raises:
        UserError: another process trains in the folder.
    """
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")
    with file:
        tries = _TRIES
        while not _locked(file):
            tries -= 1
            if not tries:
                raise UserError(
                    "Only one process at a time can train in a run's folder.",
                    seen="another process, which is still training",
                    where=str(folder),
                    fix="wait for it or stop it, or use another --run-dir",
                )
            time.sleep(_BETWEEN)
        with contextlib.suppress(OSError):  # a full disk; what must be written will tell
            file.truncate(0)
            file.write(platform.node())
            file.flush()
        yield


def _locked(file: TextIO) -> bool:
    """Whether this process has a lock on a file now. Some file systems of clusters have none: a line says so."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        told = f"nothing keeps a second process from training in this folder: its file system has no locks ({error})"
        print(f"WARNING: {told}", file=sys.stderr, flush=True)
    return True


def was_left(folder: Path) -> bool:
    """Whether a process of this machine trained in a folder, and no process does now.

    Of a run on another machine it is not known, since its lock need not be seen here: then False.
    """
    import fcntl

    try:
        with open(folder / ".lock", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return file.read() == platform.node()
    except OSError:  # held, or not there
        return False


def to_import(folder: Path) -> str:
    """How to make a run of a Hugging Face folder; "" if it is none."""
    return f"import its model: trellis import {typed(folder)}" if (folder / "config.json").is_file() else ""


def no_folder(path: Path) -> str:
    """Words for what is where a folder should be."""
    return "a file" if path.exists() else "no such folder"


def open_run(folder: Path) -> Run:
    """The run of a folder.

    Raises:
        UserError: the folder is not a run's.
    """
    check_run_folder(folder)
    path = folder / "run.yaml"
    if not path.is_file():
        raise UserError(
            "A run's folder must contain run.yaml.",
            seen="no run.yaml" if folder.is_dir() else no_folder(folder),
            where=str(folder),
            fix=to_import(folder) or "name the folder that `trellis train --run-dir` was given, or one in runs/",
        )
    return with_own_tokenizer(read_run(path), folder)


def with_own_tokenizer(run: Run, folder: Path) -> Run:
    """A run that was imported into a folder with the tokenizer that lies there: the folder may have been moved."""
    named, own = run.data.tokenizer, folder / TOKENIZER
    if named is None or not (folder / IMPORTED).is_file() or not own.is_dir() or Path(named).name != TOKENIZER:
        return run
    if not (own / "tokenizer.json").is_file() and Path(named).exists():
        return run
    return dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=str(own.resolve())))
