"""Which frames of a traceback are the user's, and which belong to JAX, to a library on top of it, or to the language.

A folder of the language says so in its `__init__`, with `hide_frames(__file__)`.
"""

import functools
import importlib.util
import os
import sysconfig
import traceback


def _folders(*packages: str) -> list[str]:
    """The folders of packages, without importing them."""
    specs = map(importlib.util.find_spec, packages)
    return [os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin]


_hidden = [*_folders("jax", "equinox", "optax"), os.path.join(os.path.dirname(__file__), "_compat.py")]
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def hide_frames(init_file: str) -> None:
    """Counts the files of a folder as the language's own, not the user's.

    Args:
        init_file: `__file__` of the folder's `__init__`.
    """
    _hidden.append(os.path.dirname(init_file) + os.sep)
    in_a_library.cache_clear()


@functools.lru_cache(maxsize=4096)
def in_a_library(file: str) -> bool:
    """Whether a frame in this file belongs to JAX, to a library on top of it, or to the language itself.

    >>> import jax
    >>> in_a_library("train.py"), in_a_library(jax.__file__), in_a_library(os.__file__)
    (False, True, True)
    """
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return file.startswith(tuple(_hidden)) or standard or file.startswith("<frozen")


def users_line(error: BaseException) -> traceback.FrameSummary | None:
    """The last line of the user's code that was running when an error was raised; None if none was."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not in_a_library(frame.filename)]
    return frames[-1] if frames else None
