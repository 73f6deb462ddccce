"""The line of the user's program that an equation comes from."""

import functools
import linecache
import os
import re

from jax.extend.core import JaxprEqn

from trellis.frames import in_a_library


def _frame(equation: JaxprEqn):
    """The innermost frame of the user's code, or None."""
    traceback = equation.source_info.traceback
    return None if traceback is None else _own(traceback)


@functools.lru_cache(maxsize=8192)  # an equation of a layer stands in each layer that is written out
def _own(traceback):
    return next((frame for frame in traceback.frames if not in_a_library(frame.file_name)), None)


def source_of(equation: JaxprEqn) -> str:
    """`file.py:line (function)` of the innermost frame of the user's code, or nothing."""
    frame = _frame(equation)
    if frame is None:
        return ""
    name = frame.function_name.rpartition(".")[2]
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}" + (f" ({name})" if name else "")


def label_of(equation: JaxprEqn) -> str:
    """What a person would call an equation: the class and the attribute on its line, or the function it is in.

    `gate = einsum("...", x, self.gate)` in `GatedMlp.__call__` is `GatedMlp gate`, and
    `gate, up = dot_each(x, (self.gate, self.up), ...)` is `GatedMlp gate, up`.
    """
    frame = _frame(equation)
    return _label(frame.file_name, frame.line_num, frame.function_name) if frame is not None else ""


@functools.lru_cache(maxsize=8192)
def _label(file: str, line: int, function: str) -> str:
    text = linecache.getline(file, line)
    while function.endswith(">") and "." in function:  # a lambda, a generator: what it is written in
        function = function.rpartition(".")[0].removesuffix(".<locals>")
    owner, _, method = function.rpartition(".")
    owner = owner.rpartition(".")[2] if not owner.endswith("<locals>") else ""
    several = re.search(r"\((self\.\w+(?:, self\.\w+)+)\)", text)
    parts = [several[1].replace("self.", "")] if several else re.findall(r"self\.(\w+)", text)
    if owner and parts:
        return f"{owner} {parts[-1]}"
    return owner if owner and method == "__call__" else f"{owner} {method}".strip()
