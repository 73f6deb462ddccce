"""The declaration of a command."""

import argparse
import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trellis.errors import UserError

if TYPE_CHECKING:
    from trellis.hardware.chips import Target
    from trellis.run.config import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of `trellis`. A file in this folder that declares it as `COMMAND` is all that makes it known.

    The file is loaded for every command line, so what takes time to load is imported inside its functions.

    Attributes:
        name: the word after `trellis`.
        summary: one line, for the list of commands.
        description: the beginning of its own help; the summary, as a sentence, if empty.
        arguments: declares its words and options.
        execute: does the work and returns the exit code.
        recipe: for a command about a recipe, the one to use if the user names none; "" requires a name; None is for
            commands about something else. A command about a recipe also takes `--dotted.name VALUE` for any field of
            the run, and finds the run in `args.run`, the names that the user gave in `args.given` and their values in
            `args.overrides`.
    """

    name: str
    summary: str
    description: str = ""
    arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]
    recipe: str | None = None

    @property
    def about(self) -> str:
        """The beginning of its own help."""
        return self.description or f"{self.summary[0].upper()}{self.summary[1:]}."


def whole(least: int | None = None, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an argument that is a whole number within bounds, by default those of 31 bits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
        if not (-most if least is None else least) <= value <= most:
            bounds = f"{most:,} at most" if least is None or value > most else f"{least} or more"
            raise argparse.ArgumentTypeError(f"{text} is out of bounds: use {bounds}")
        return value

    return parse


def some_path(text: str) -> str:
    """The type of an argument that names what to write: an empty text would stand for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it needs a name, and has no letter")
    return text


def check_place(path: Path) -> None:
    """Refuses to write where there is no folder, or a folder of this name, before anything takes time."""
    if path.is_dir() or not path.parent.is_dir():
        number = errno.EISDIR if path.is_dir() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(path))


def check_folder(path: Path) -> None:
    """Refuses a folder to write to that is a file, or lies in one, before anything takes time."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Refuses options, by name, that count something and are below 1. None is not a value."""
    for name in names:
        if (value := getattr(args, name.replace("-", "_"))) is not None and value < 1:
            seen = f"{name}={value}"
            raise UserError("A count must be 1 or more.", seen=seen, where=f"--{name}", fix="use 1 or more")


def with_options(args: argparse.Namespace, options: str, where: "Target | None") -> "Run":
    """The run of a command about a recipe if these options are given as well, fitted to a target if there is one.

    Raises:
        UserError: the command would refuse them.
    """
    from trellis.plan.adapt import adapt
    from trellis.recipes.load import load
    from trellis.run.unheeded import check_given

    words = shlex.split(options)
    more = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    loaded = load(args.recipe, {**args.overrides, **more})
    run = adapt(loaded.run, where, loaded.given)[0] if where else loaded.run
    check_given(run, loaded.given)
    return run


def called() -> str:
    """What to type for this command from here: its path, if the shell does not find `trellis`."""
    by = Path(sys.argv[0])
    return "trellis" if shutil.which("trellis") or by.name != "trellis" else os.path.relpath(by)
