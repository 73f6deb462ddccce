"""The line of a user's program that an equation comes from."""

import functools
import importlib.util
import os
import re
import sysconfig
from collections.abc import Sequence


def _folders(*packages: str) -> tuple[str, ...]:
    """Where packages are, without importing them."""
    specs = map(importlib.util.find_spec, packages)
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin)


_LIBRARIES = _folders("jax", "equinox", "optax")
_LANGUAGE = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), folder) + os.sep
    for folder in ("notation", "mesh", "named", "inspect", "collectives")
)
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


@functools.lru_cache(maxsize=4096)
def in_a_library(file: str) -> bool:
    """Whether a frame belongs to JAX, to a library over it, or to the language itself."""
    installed = file.startswith(_STANDARD) and "site-packages" not in file
    return file.startswith(_LIBRARIES) or file.startswith(_LANGUAGE) or installed or file.startswith("<frozen")


def source_of(equation) -> str:
    """`file.py:line (function)` of the innermost frame outside JAX and the language, or nothing."""
    traceback = equation.source_info.traceback
    if traceback is None:
        return ""
    for frame in traceback.frames:
        if not in_a_library(frame.file_name):
            name = frame.function_name.rpartition(".")[2]
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}" + (f" ({name})" if name else "")
    return ""


def direction_of(scope: str) -> str:
    """Whether an equation in this name scope is forward, recomputed or backward."""
    if "rematted_computation" in scope:
        return "recomputed"
    return "backward" if "transpose(" in scope else "forward"


_SCOPE = re.compile(r"[A-Za-z_]\w*\[([^\[\]]*)\]")


def names_of(scope: str, ndim: int) -> tuple[str, ...] | None:
    """The dimension names that the language wrote into a name scope, if they are of that many dimensions.

    A `reshard` runs under `reshard[embed/data mlp -> embed mlp ~data]`; types themselves have no names.

    >>> names_of("jit(f)/transpose(jvp(reshard[embed/data mlp -> embed mlp ~data]))", 2)
    ('embed', 'mlp')
    """
    texts = _SCOPE.findall(scope)
    if not texts:
        return None
    names = tuple(name for name, _ in _dims(texts[-1].rpartition("->")[0] or texts[-1]))
    if len(names) != ndim or any(name.startswith("_") for name in names):
        return None
    return names


def names_behind(scope: str, dims: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """`names_of` under a `vmap`, whose dimensions stand in front: the names of the others, sliced as in the text.

    Args:
        scope: a name stack.
        dims: for each dimension the mesh axes that slice it.

    >>> names_behind("vmap(reshard[pos/model embed -> pos embed])", [("stage",), ("model",), ()])
    ('pos', 'embed')
    """
    for side in (_SCOPE.findall(scope) or [""])[-1].split("->"):
        found = _dims(side)
        names, axes = tuple(name for name, _ in found), [axes for _, axes in found]
        if names and axes == list(dims)[len(dims) - len(names) :] and not any(n.startswith("_") for n in names):
            return names
    return None


def _dims(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """The dimensions of one side of a transition: names, and the mesh axes that slice them."""
    words = [word.split("/") for word in text.split() if word[0] not in "+~"]
    return [(name, tuple(axes)) for name, *axes in words]
