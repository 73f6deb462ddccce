"""A program cut at its stack of layers: what comes before, one stage's layers, and what comes after.

The program is run as it is written, by tracing. The first run stops where the layers begin, and gives what comes
before. The second finds their result already made, goes on, and gives what comes after.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

from jax.extend.core import take_current_trace

from trellis.named.axis import NamesError


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """A call of `Stacked.fold` or `Stacked.scan`.

    Attributes:
        stack: the layers.
        x: what the first layer gets.
        args: what every layer gets.
        each: arrays with the layers' name; every layer gets its position.
        call: how a layer is called, `call(layer, x, *each, *args)`.
        policy: what each layer keeps for the backward pass.
        makes: whether layers give `(x, y)`, as in a scan.
    """

    stack: Any
    x: Any
    args: tuple
    each: tuple
    call: Callable
    policy: Any
    makes: bool


class _Reached(BaseException):
    """Raised where layers begin."""

    def __init__(self, fold: Fold):
        self.fold = fold


# The name of the layers at which a program is cut, and what to do when they are met.
_met: contextvars.ContextVar["tuple[str, Callable[[Fold], Any]] | None"] = contextvars.ContextVar(
    "layers met", default=None
)


def meet(fold: Fold) -> tuple | None:
    """What a stack of layers gives instead of running, as a tuple of one, or None if nothing is cut at its name."""
    name, found = _met.get() or (None, None)
    return (found(fold),) if found is not None and fold.stack.axis.name == name else None


def before(name: str, function: Callable, *args) -> Fold:
    """The call of the layers of this name in `function(*args)`.

    Raises:
        NamesError: it calls none, or calls them inside of a function that JAX traces by itself.
    """
    outside = _trace()

    def stop(fold: Fold):
        if _trace() is not outside:  # what the layers get exists in there alone
            raise NamesError(
                "a pipeline's layers must be called by the model itself, got a call inside of a function under "
                "jax.jit, jax.checkpoint, jax.vmap or a loop of JAX: call the model without it (a step is compiled "
                "as a whole, and the run's `remat` says what is computed again), or remove the layers from the "
                "layout's compute"
            )
        raise _Reached(fold)

    with _meeting(name, stop):
        try:
            function(*args)
        except _Reached as reached:
            return reached.fold
    raise NamesError(
        "a pipeline needs a stack of layers, got a program that calls none: call the model's `layers.fold`, or remove "
        "the layers from the layout's compute"
    )


def after(name: str, function: Callable, result: Any, *args) -> Any:
    """`function(*args)`, as if the layers of this name had given `result`.

    Raises:
        NamesError: it calls a second stack of layers.
    """
    met: list[Fold] = []

    def give(fold: Fold):
        met.append(fold)
        if len(met) > 1:
            raise NamesError(
                f"a pipeline's layers must be one stack, got a second one of {fold.stack.axis.size} "
                f"'{fold.stack.axis.name}' after the first: make one stack of groups of layers, or remove its name "
                "from the layout's compute"
            )
        return result

    with _meeting(name, give):
        return function(*args)


def _trace() -> Any:
    """The trace that what is computed now becomes a part of."""
    with take_current_trace() as trace:
        return trace


@contextlib.contextmanager
def _meeting(name: str, how: Callable[[Fold], Any]) -> Generator[None]:
    token = _met.set((name, how))
    try:
        yield
    finally:
        _met.reset(token)
