"""The user's cache folder, and files that exist whole or not at all."""

import contextlib
import errno
import functools
import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TextIO

from trellis.errors import UserError

CACHE_ELSEWHERE = "set the environment variable XDG_CACHE_HOME to a folder that can be written"


def cache_folder(name: str) -> Path:
    """One of Trellis's folders in the user's cache: `compiled`, `data`, `measured` or `plan`. It need not exist.

    Raises:
        UserError: the user has no home, as in a container with a user that the system does not know.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trellis" / name
    except RuntimeError as error:
        raise UserError(
            "The user's cache folder must be known.",
            seen="neither HOME nor XDG_CACHE_HOME is set",
            where=f"the cache of `{name}`",
            fix=CACHE_ELSEWHERE,
        ) from error


def check_utf8(text: str, rule: str, where: str, fix: str = "write it in UTF-8") -> None:
    """Refuses text that held bytes other than UTF-8 when Python took it from a command line or from a file's name.

    Raises:
        UserError: with the rule.
    """
    if not is_utf8(text):
        if sys.getfilesystemencoding() != "utf-8":
            fix = "set the environment variable LC_ALL to C.UTF-8"  # it may have been UTF-8, and was read as ASCII
        raise UserError(rule, seen=repr(text), where=where, fix=fix)


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text: Python's may have halves of surrogate pairs.

    >>> is_utf8("é"), is_utf8("\\ud800")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def naming(path: Path) -> Generator[None]:
    """Within it, an error of the system names a file: one about a file that is open does not say which it is."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


# What the system says if nobody reads: the other end of a pipe has ended, or a terminal was closed.
_NO_READER = (errno.EPIPE, errno.EIO)


@contextlib.contextmanager
def unread(stream: TextIO) -> Generator[None]:
    """Within it, a stream whose reader is gone is no error: what is written to it goes nowhere from then on."""
    try:
        yield
    except OSError as error:
        gone = isinstance(error, BrokenPipeError) or error.errno in _NO_READER
        if error.filename is not None or not gone:
            raise
        drop_output(stream)


def drop_output(stream: TextIO) -> None:
    """Output goes nowhere from here on; what is held of it would otherwise fail once more at Python's exit. A stream
    without a file, which a program around Trellis put there, stays as it is."""
    try:
        number = stream.fileno()
    except OSError:  # `io.UnsupportedOperation` is one
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that exists whole or not at all: under another name first, then renamed. Of several that write it
    at once the last one stays."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of the file that is asked for
            error.filename, error.filename2 = str(path), None
        raise


def typed(path: Path) -> str:
    """A path as one types it in a shell, as an argument and not an option of a command.

    >>> typed(Path("-my run")), typed(Path("runs/a"))
    ("'./-my run'", 'runs/a')
    """
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def write_json(path: Path, value: object) -> None:
    """Writes a value as JSON, whole."""
    write_whole(path, json.dumps(value, indent=1))


def load_yaml(text: str) -> Any:
    """Reads plain data from YAML, with libyaml if PyYAML has it: eight times as fast.

    Raises:
        yaml.YAMLError: it is no YAML, names something twice, or has a number in base 8 or 60 that reads as another one.
            The words are of PyYAML's own parser, which show the line.
    """
    import yaml

    fast = getattr(yaml, "CSafeLoader", None)
    if fast is not None and text.count("[") + text.count("{") < _NESTED:  # libyaml recurses, without a limit
        try:
            return yaml.load(text, Loader=_strict(fast))
        except yaml.YAMLError:
            pass
    try:
        return yaml.load(text, Loader=_strict(yaml.SafeLoader))
    except RecursionError:
        raise yaml.YAMLError("lists or mappings are nested too deeply") from None


def yaml_problem(error: Exception) -> str:
    """What PyYAML says is wrong with a text, in a line; the text is no file to it, and has no name."""
    return " ".join(str(error).split()).replace('in "<unicode string>", line', "in line")


@functools.cache
def _strict(loader: Any) -> Any:
    """A loader that refuses a key that occurs twice in a mapping, where PyYAML's own would take the last, and the
    numbers of YAML 1.1 that nobody means: `010`, which is 8, and `1:30`, which is 90."""
    import yaml
    from yaml.constructor import ConstructorError

    class Strict(loader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            for key in [key for key, _ in pairs if isinstance(key, yaml.ScalarNode)]:
                if key.value in seen:
                    raise ConstructorError(None, None, f"`{key.value}` is written twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    def number(self: Any, node: Any, make: Callable[[Any, Any], Any]) -> Any:
        value, text = make(self, node), node.value
        if ":" in text or re.fullmatch(r"[+-]?[\d_]+", text) and value != int(text):
            problem = f"`{text}` is {value} in YAML: write that, or put it in quotes"
            raise ConstructorError(None, None, problem, node.start_mark)
        return value

    for kind in ("int", "float"):
        make = getattr(loader, f"construct_yaml_{kind}")
        Strict.add_constructor(f"tag:yaml.org,2002:{kind}", functools.partial(number, make=make))
    return Strict


# With this many lists and mappings in one text, it is read by the slower parser.
_NESTED = 200


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(error: BaseException | None) -> str:
    """What the system says if it has no room for a file and something failed because of that; else nothing.

    Libraries that write in threads of their own report it in their words, which end with the system's.

    >>> no_room(OSError(errno.ENOSPC, "No space left on device", "a/b")), no_room(ValueError("no"))
    ('No space left on device', '')
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return os.strerror(error.errno)
        for number in _NO_ROOM if isinstance(error, ValueError) else ():
            if os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ""


# TensorStore's words, and Orbax's.
_REFUSALS = r'Error (reading|writing|opening) .*"|directory does not exist: /|No ArrayMetadata found'


def refused(error: BaseException | None) -> str:
    """What the system says if it refuses to read or write a file and something failed because of that; else nothing.

    >>> refused(OSError(errno.EROFS, "Read-only file system", "a/b")), refused(OSError("no file of anyone's"))
    ('Read-only file system: a/b', '')
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            return f"{error.strerror}: {error.filename!s:.200}"
        if isinstance(error, ValueError) and re.search(_REFUSALS, str(error)):
            return f"{error!s:.300}"
        error = error.__cause__ or error.__context__
    return ""
