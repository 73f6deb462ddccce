"""Elementwise functions of one array: `jax.numpy`'s and `jax.nn`'s, by name.

Each keeps names, sizes and sharding, moves nothing, and refuses partial sums. Plain arrays and numbers are taken, too.
"""

import jax
import jax.numpy as jnp

from trellis.named.arguments import count_of
from trellis.named.array import NamedArray
from trellis.named.elementwise import by_name
from trellis.named.operand import operand


def abs(x) -> NamedArray:
    """The absolute value.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.abs, x)


def ceil(x) -> NamedArray:
    """The value rounded up.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.ceil, x)


def conj(x) -> NamedArray:
    """The complex conjugate.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.conj, x)


def cos(x) -> NamedArray:
    """The cosine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.cos, x)


def cosh(x) -> NamedArray:
    """The hyperbolic cosine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.cosh, x)


def arccos(x) -> NamedArray:
    """The inverse cosine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.arccos, x)


def arccosh(x) -> NamedArray:
    """The inverse hyperbolic cosine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.arccosh, x)


def sin(x) -> NamedArray:
    """The sine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.sin, x)


def sinh(x) -> NamedArray:
    """The hyperbolic sine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.sinh, x)


def arcsin(x) -> NamedArray:
    """The inverse sine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.arcsin, x)


def arcsinh(x) -> NamedArray:
    """The inverse hyperbolic sine.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.arcsinh, x)


def tan(x) -> NamedArray:
    """The tangent.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.tan, x)


def tanh(x) -> NamedArray:
    """The hyperbolic tangent.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.tanh, x)


def arctan(x) -> NamedArray:
    """The inverse tangent.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.arctan, x)


def arctanh(x) -> NamedArray:
    """The inverse hyperbolic tangent.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.arctanh, x)


def deg2rad(x) -> NamedArray:
    """Degrees as radians.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.deg2rad, x)


def rad2deg(x) -> NamedArray:
    """Radians as degrees.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.rad2deg, x)


def exp(x) -> NamedArray:
    """`e ** x`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.exp, x)


def exp2(x) -> NamedArray:
    """`2 ** x`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.exp2, x)


def expm1(x) -> NamedArray:
    """`e ** x - 1`, exact near 0.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.expm1, x)


def fabs(x) -> NamedArray:
    """The absolute value of floats.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.fabs, x)


def floor(x) -> NamedArray:
    """The value rounded down.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.floor, x)


def imag(x) -> NamedArray:
    """The imaginary part.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.imag, x)


def invert(x) -> NamedArray:
    """Every bit inverted; for bools, not.

    Names: those of `x`.
    Gradient: none; whole numbers have none.
    Moves: nothing.
    """
    return by_name(jnp.invert, x)


def isfinite(x) -> NamedArray:
    """Whether a value is neither infinite nor NaN.

    Names: those of `x`.
    Gradient: none; the result is bools.
    Moves: nothing.
    """
    return by_name(jnp.isfinite, x)


def isinf(x) -> NamedArray:
    """Whether a value is infinite.

    Names: those of `x`.
    Gradient: none; the result is bools.
    Moves: nothing.
    """
    return by_name(jnp.isinf, x)


def isnan(x) -> NamedArray:
    """Whether a value is NaN.

    Names: those of `x`.
    Gradient: none; the result is bools.
    Moves: nothing.
    """
    return by_name(jnp.isnan, x)


def log(x) -> NamedArray:
    """The natural logarithm.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.log, x)


def log10(x) -> NamedArray:
    """The logarithm to base 10.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.log10, x)


def log1p(x) -> NamedArray:
    """`log(1 + x)`, exact near 0.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.log1p, x)


def log2(x) -> NamedArray:
    """The logarithm to base 2.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.log2, x)


def logical_not(x) -> NamedArray:
    """True where a value is zero or false.

    Names: those of `x`.
    Gradient: none; the result is bools.
    Moves: nothing.
    """
    return by_name(jnp.logical_not, x)


def nan_to_num(x) -> NamedArray:
    """0 for NaN, the largest finite numbers for infinities.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.nan_to_num, x)


def real(x) -> NamedArray:
    """The real part.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.real, x)


def reciprocal(x) -> NamedArray:
    """`1 / x`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.reciprocal, x)


def rint(x) -> NamedArray:
    """The nearest whole number, halves to the even one.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.rint, x)


def round(x, decimals: int = 0) -> NamedArray:
    """The nearest number with `decimals` decimals, halves to the even one.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    decimals = count_of(decimals, "round", "write round(x, 2)")
    return by_name(lambda a: jnp.round(a, decimals), x, name="round")


def sign(x) -> NamedArray:
    """-1, 0 or 1.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.sign, x)


def signbit(x) -> NamedArray:
    """Whether the sign is minus, also for -0.0.

    Names: those of `x`.
    Gradient: none; the result is bools.
    Moves: nothing.
    """
    return by_name(jnp.signbit, x)


def sqrt(x) -> NamedArray:
    """The square root.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.sqrt, x)


def square(x) -> NamedArray:
    """`x * x`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.square, x)


def trunc(x) -> NamedArray:
    """The whole part.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.trunc, x)


def cbrt(x) -> NamedArray:
    """The cube root.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jnp.cbrt, x)


def rsqrt(x) -> NamedArray:
    """`1 / sqrt(x)`.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jax.lax.rsqrt, x)


def erf(x) -> NamedArray:
    """The error function.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    return by_name(jax.lax.erf, x)


def stop_gradient(x) -> NamedArray:
    """The same values, without a gradient.

    Names: those of `x`.
    Gradient: zero; nothing moves.
    Moves: nothing.
    """
    if not isinstance(x, NamedArray):
        return by_name(jax.lax.stop_gradient, x)
    x = operand(x, "stop_gradient")  # copies stay copies, and have no gradient either
    return x.with_array(jax.lax.stop_gradient(x.array))
