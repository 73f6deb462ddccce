"""The command line: `trellis COMMAND`.

Exit codes: 0 done; 2 the input is wrong; 3 the run stopped itself; 143 after SIGTERM, with a checkpoint written.
"""

import argparse
import errno
import functools
import gc
import importlib
import io
import pathlib
import pkgutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from trellis.commands.command import Command
from trellis.errors import TrellisError, UserError, did_you_mean
from trellis.files import drop_output, unread
from trellis.interrupts import end_at_once_on_interrupt, end_now, end_within, keep_interrupts

if TYPE_CHECKING:
    from trellis.recipes.load import Loaded


@functools.cache
def commands() -> dict[str, Command]:
    """Every command by its name: the `COMMAND` of each file in this folder that declares one."""
    here = pathlib.Path(__file__).parent
    modules = (importlib.import_module(f"trellis.commands.{found.name}") for found in pkgutil.iter_modules([str(here)]))
    found = [module.COMMAND for module in modules if hasattr(module, "COMMAND")]
    return {command.name: command for command in sorted(found, key=lambda command: command.name)}


# A command that failed has this many seconds to end once it has said why.
_LEFT = 5.0
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors that the user can fix are printed without a traceback.

    Args:
        arguments: the command and its words; None for those of this process, which then only runs the command.
    """
    if arguments is not None:
        try:
            return _main(list(arguments))
        except KeyboardInterrupt:
            return _INTERRUPTED
    keep_interrupts()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file may know fewer characters
            stream.reconfigure(errors="replace")
    gc.set_threshold(20_000, 20, 20)  # tracing makes millions of objects, which Python would scan too often
    try:
        code = _written(_main(sys.argv[1:]))
    except KeyboardInterrupt:
        end_now(_INTERRUPTED)
    end_at_once_on_interrupt(code)
    if code:
        end_within(_LEFT, code)
    return code


def _main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["help"] and len(arguments) > 1:  # of a command
            return _run(arguments[1], ["--help"])
        if not arguments or arguments[0] in ("--help", "-h", "help"):
            print(_overview())
            return 0
        if arguments[0] == "--version":
            from trellis import __version__

            print(__version__)
            return 0
        return _run(arguments[0], arguments[1:])
    except SystemExit as stop:  # argparse, after a help text
        return int(stop.code or 0)
    except TrellisError as error:
        print(f"trellis: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        return _explained(error, 0)
    except (RuntimeError, MemoryError) as error:  # XLA's (only commands that compute load it), or Python's
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        told = UserError(
            "The work of a command must fit in the memory of its devices.",
            seen=f"{str(error).splitlines()[0]:.300}" if str(error) else "no memory left on this machine",
            where=f"trellis {arguments[0]}",
            fix="use a smaller batch, fewer tokens or samples, or more --devices",
        )
        print(f"trellis: {told}", file=sys.stderr)
        return told.exit_code


def _written(code: int) -> int:
    """Writes what Python still holds of a command's output, where a failure can be told; returns the exit code."""
    try:
        if sys.stdout is not None:  # as after `>&-`
            with unread(sys.stdout):
                sys.stdout.flush()
    except OSError as error:
        return _explained(error, code)
    return code


def _explained(error: OSError, code: int) -> int:
    """Tells of what the user can fix: no room, no permission, no such name. An error that names no file is raised."""
    if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has seen enough
        drop_output(sys.stdout)
        return code
    if error.filename is None and error.errno != errno.ENOSPC:
        raise error
    told = UserError(
        "A command must be able to read its input files and write its output files.",
        seen=error.strerror,
        where="standard output" if error.filename is None else f"{error.filename!s:.200}",
        fix="use another path, or free space or change permissions there",
    )
    print(f"trellis: {told}", file=sys.stderr)
    if error.filename is None:
        drop_output(sys.stdout)
    return told.exit_code


def _overview() -> str:
    lines = [f"  {name:<10} {command.summary}" for name, command in commands().items()]
    head, tail = "Trellis trains language models on a mesh.", "`trellis COMMAND --help` explains each."
    return "\n".join([head, "", *lines, "", tail])


def _run(name: str, arguments: list[str]) -> int:
    known = commands()
    if name not in known:
        fix = did_you_mean(name, known)
        raise UserError("`trellis` needs the name of a command.", seen=f"`{name}`", where="trellis", fix=fix)
    command = known[name]
    parser = _Parser(prog=f"trellis {name}", description=command.about)
    if command.recipe is not None:
        parser.add_argument("recipe", metavar="RECIPE", nargs="?", default=command.recipe, help=_RECIPE)
    if "jax" in sys.modules:
        from trellis.hardware.platform import choose_platform

        choose_platform()
    command.arguments(parser)
    overrides: dict[str, str] = {}
    if command.recipe is not None:
        arguments, overrides, alone = _split_overrides(parser, arguments)
        if "--help" in arguments or "-h" in arguments:
            print(parser.format_help(), _fields(parser, arguments, overrides), sep="\n")
            return 0
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        used = parser.used(args)
        known_options = [option[2:] for option in used.options() if option.startswith("--")]
        fix = did_you_mean(unknown[0][2:], known_options, shown="--{}")
        fix = fix if unknown[0].startswith("--") else f"leave it out, or see `{used.prog} --help`"
        raise UserError(f"`{used.prog}` has no such argument or option.", seen=unknown[0], where=used.prog, fix=fix)
    if command.recipe is not None:
        _refuse_other_names(parser, overrides)
        _refuse_without_value(alone)
        loaded = _load(args.recipe, overrides, parser.prog)
        args.run, args.given, args.overrides = loaded.run, loaded.given, overrides
        for note in loaded.notes:
            print(note, file=sys.stderr)
    return command.execute(args)


_RECIPE = (
    "a recipe (`trellis recipes` lists them), a YAML file or a run's folder; --dotted.name VALUE replaces any of its "
    "fields"
)


class _Parser(argparse.ArgumentParser):
    """Errors in four parts, raised instead of printed, and options by their whole names; subparsers too."""

    def __init__(self, **how: Any):
        super().__init__(allow_abbrev=False, **how)

    def error(self, message: str) -> NoReturn:
        rule = "The arguments and options of a command must be complete and valid."
        raise UserError(rule, seen=message, where=self.prog, fix=f"see `{self.prog} --help`")

    def options(self) -> dict[str, argparse.Action]:
        """Every declared option, by its spelling."""
        return self._option_string_actions

    def used(self, args: argparse.Namespace) -> "_Parser":
        """The parser of the action that was named, or this one if it has no actions."""
        actions = (a for a in self._actions if isinstance(a, argparse._SubParsersAction))
        return next((a.choices[getattr(args, a.dest)] for a in actions), self)


def _split_overrides(parser: _Parser, arguments: list[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """The words that the parser knows, the options that it does not, which are fields of the run, and those of these
    that stand alone, which says true."""
    mine: list[str] = []
    overrides: dict[str, str] = {}
    alone: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not word.startswith("--") or name in parser.options():
            mine.append(word)
            action = parser.options().get(name)
            if action is not None and not equals and action.nargs != 0 and rest:
                mine.append(rest.pop(0))  # its value, whatever it looks like
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            text = "true"
            alone.append(name[2:].replace("-", "_"))
        overrides[name[2:].replace("-", "_")] = text if equals or text else rest.pop(0)
    return mine, overrides, alone


def _refuse_without_value(alone: list[str]) -> None:
    """Refuses fields that stand alone on the line, unless they are true or false."""
    from trellis.run.config import Run
    from trellis.run.overrides import every_field
    from trellis.run.schema import members

    fields = dict(every_field(Run)) if alone else {}
    for name in alone:
        if name in fields and bool not in members(fields[name].type):
            rule, fix = "An option must have a value, unless it is true or false.", f"write --{name} VALUE"
            raise UserError(rule, seen="nothing after it", where=f"--{name}", fix=fix)


def _refuse_other_names(parser: _Parser, overrides: dict[str, str]) -> None:
    """Refuses another trainer's name for an option of this command, which is not a field of a run."""
    from trellis.run.other_names import ours

    for name in overrides:
        if f"--{ours(name)}" in parser.options():
            rule, fix = f"`{parser.prog}` has no such argument or option.", f"here it is called --{ours(name)}"
            raise UserError(rule, seen=f"--{name}", where=parser.prog, fix=fix)


def _load(target: str, overrides: dict[str, str], prog: str) -> "Loaded":
    from trellis.recipes.load import RECIPES, load

    if not target:
        fix = f"use {prog} RECIPE, one of: {', '.join(RECIPES)}; or a YAML file"
        raise UserError(f"`{prog}` needs a run.", seen="no recipe", where=prog, fix=fix)
    return load(target, overrides)


def _fields(parser: _Parser, arguments: list[str], overrides: dict[str, str]) -> str:
    """Help on a run's fields: those of the recipe in the arguments, with the other options if they can be read."""
    from trellis.recipes import load_run
    from trellis.run.help import help_text

    for option in parser.options().values():
        option.required = False
    try:
        target = parser.parse_known_args([a for a in arguments if a not in ("-h", "--help")])[0].recipe
    except UserError:  # a word is missing
        target = parser.get_default("recipe")
    run = load_run(target or "starter")
    shown = f"fields of the run, with the values of {target or 'starter'}"
    try:
        return f"{shown}{' and of these options' if overrides else ''}:\n{help_text(run, overrides)}"
    except UserError:
        return f"{shown}:\n{help_text(run)}"


if __name__ == "__main__":
    sys.exit(main())
