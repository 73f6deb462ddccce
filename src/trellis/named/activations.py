"""Activation functions: those of `jax.nn`, by name.

Each keeps names, sizes and sharding, moves nothing, and refuses partial sums. Plain arrays are taken, too.
"""

from collections.abc import Callable

import jax

from trellis.named.arguments import shown
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.backend import keeps_operand, rounded_once
from trellis.named.elementwise import by_name


def _with(fn: Callable, x, number, what: str) -> NamedArray:
    """An activation with a number of its own, which may be learned: a named array, whose names `x` has."""
    if isinstance(number, NamedArray):
        return by_name(rounded_once(fn), x, number, name=what)
    return by_name(rounded_once(lambda a: fn(a, number)), x, name=what)


def relu(x) -> NamedArray:
    """`max(x, 0)`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.relu), x)


def relu6(x) -> NamedArray:
    """`min(max(x, 0), 6)`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.relu6), x)


def sigmoid(x) -> NamedArray:
    """`1 / (1 + exp(-x))`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.sigmoid), x)


def silu(x) -> NamedArray:
    """`x * sigmoid(x)` (Hendrycks and Gimpel, 2016, arXiv:1606.08415; also called swish).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.silu), x)


def swish(x) -> NamedArray:
    """`x * sigmoid(x)`; the same as `silu`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.swish), x)


def elu(x, alpha: float | NamedArray = 1.0) -> NamedArray:
    """`x` where positive, else `alpha * (exp(x) - 1)` (Clevert et al., 2015, arXiv:1511.07289).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return _with(jax.nn.elu, x, alpha, "elu")


def selu(x) -> NamedArray:
    """`elu`, scaled to keep mean and variance (Klambauer et al., 2017, arXiv:1706.02515).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.selu), x)


def celu(x, alpha: float | NamedArray = 1.0) -> NamedArray:
    """`elu` with a continuous derivative (Barron, 2017, arXiv:1704.07483).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return _with(jax.nn.celu, x, alpha, "celu")


def softplus(x) -> NamedArray:
    """`log(1 + exp(x))`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.softplus), x)


def soft_sign(x) -> NamedArray:
    """`x / (1 + |x|)`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.soft_sign), x)


def log_sigmoid(x) -> NamedArray:
    """`log(sigmoid(x))`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.log_sigmoid), x)


def hard_sigmoid(x) -> NamedArray:
    """`min(max(x + 3, 0), 6) / 6`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.hard_sigmoid), x)


def hard_tanh(x) -> NamedArray:
    """`min(max(x, -1), 1)`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.hard_tanh), x)


def hard_silu(x) -> NamedArray:
    """`x * hard_sigmoid(x)` (Howard et al., 2019, arXiv:1905.02244).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(rounded_once(jax.nn.hard_silu), x)


def mish(x) -> NamedArray:
    """`x * tanh(softplus(x))` (Misra, 2019, arXiv:1908.08681).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(_mish, x, name="mish")


def gelu(x, approximate: bool = True) -> NamedArray:
    """`x` times the chance that a normal number is below it (Hendrycks and Gimpel, 2016, arXiv:1606.08415).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.

    Args:
        approximate: by a tanh, as GPT-2 does; else by the error function.

    Raises:
        NamesError: `approximate` is no True or False.
    """
    if not isinstance(approximate, bool):
        raise NamesError(
            f"gelu takes True or False for approximate, got {shown(approximate)}, in gelu: write approximate=False, or "
            "nn.geglu(gate, up) for a gate"
        )
    return by_name(_gelu_by_tanh if approximate else _gelu, x, name="gelu")


def leaky_relu(x, negative_slope: float | NamedArray = 0.01) -> NamedArray:
    """`x` where positive, else `negative_slope * x`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return _with(jax.nn.leaky_relu, x, negative_slope, "leaky_relu")


def squareplus(x, b: float | NamedArray = 4.0) -> NamedArray:
    """`(x + sqrt(x ** 2 + b)) / 2` (Barron, 2021, arXiv:2112.11687).

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return _with(jax.nn.squareplus, x, b, "squareplus")


_mish = rounded_once(keeps_operand(jax.nn.mish))
_gelu = rounded_once(keeps_operand(lambda a: jax.nn.gelu(a, approximate=False)))
_gelu_by_tanh = rounded_once(keeps_operand(lambda a: jax.nn.gelu(a, approximate=True)))
