"""Elementwise functions of two arrays: those of `jax.numpy`, by name.

They broadcast if one operand's names contain the other's (`outer` asks for all combinations), move both operands to
where the layout has the result's names, and refuse partial sums. Numbers and plain scalars are taken, too.
"""

import jax.numpy as jnp

from trellis.named.array import NamedArray
from trellis.named.elementwise import by_name


def arctan2(y, x) -> NamedArray:
    """The angle of the point `(x, y)`.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.arctan2, y, x)


def bitwise_and(x, y) -> NamedArray:
    """The bits that both have.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.bitwise_and, x, y)


def bitwise_or(x, y) -> NamedArray:
    """The bits that either of the two has.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.bitwise_or, x, y)


def bitwise_xor(x, y) -> NamedArray:
    """The bits that only one of the two has.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.bitwise_xor, x, y)


def copysign(x, y) -> NamedArray:
    """`x` with the sign of `y`.

    Names: those of the operand that has all of them.
    Gradient: elementwise for `x`: a reduce-scatter if it was gathered, an all-reduce if it was whole; zero for `y`.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.copysign, x, y)


def equal(x, y) -> NamedArray:
    """`x == y`.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.equal, x, y)


def float_power(x, y) -> NamedArray:
    """`x ** y` in floats.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.float_power, x, y)


def floor_divide(x, y) -> NamedArray:
    """`x // y`.

    Names: those of the operand that has all of them.
    Gradient: zero; nothing moves.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.floor_divide, x, y)


def fmax(x, y) -> NamedArray:
    """The larger one; if one is NaN, the other.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.fmax, x, y)


def fmin(x, y) -> NamedArray:
    """The smaller one; if one is NaN, the other.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.fmin, x, y)


def fmod(x, y) -> NamedArray:
    """The remainder of `x / y`, with the sign of `x`.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.fmod, x, y)


def gcd(x, y) -> NamedArray:
    """The greatest common divisor.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: an all-gather of an operand that rests in slices; and in each round an all-reduce of a flag, since the loop
        ends on all devices together.
    """
    return by_name(jnp.gcd, x, y)


def greater(x, y) -> NamedArray:
    """`x > y`.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.greater, x, y)


def greater_equal(x, y) -> NamedArray:
    """`x >= y`.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.greater_equal, x, y)


def heaviside(x, y) -> NamedArray:
    """0 where `x` is negative, 1 where positive, `y` where it is 0.

    Names: those of the operand that has all of them.
    Gradient: zero for `x`; elementwise for `y`: a reduce-scatter if it was gathered, an all-reduce if it was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.heaviside, x, y)


def hypot(x, y) -> NamedArray:
    """`sqrt(x ** 2 + y ** 2)`.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.hypot, x, y)


def lcm(x, y) -> NamedArray:
    """The least common multiple.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: an all-gather of an operand that rests in slices; and in each round an all-reduce of a flag, since the loop
        ends on all devices together.
    """
    return by_name(jnp.lcm, x, y)


def left_shift(x, y) -> NamedArray:
    """`x << y`.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.left_shift, x, y)


def less(x, y) -> NamedArray:
    """`x < y`.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.less, x, y)


def less_equal(x, y) -> NamedArray:
    """`x <= y`.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.less_equal, x, y)


def logaddexp(x, y) -> NamedArray:
    """`log(exp(x) + exp(y))`, without overflow.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.logaddexp, x, y)


def logaddexp2(x, y) -> NamedArray:
    """`log2(2 ** x + 2 ** y)`, without overflow.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.logaddexp2, x, y)


def logical_and(x, y) -> NamedArray:
    """Whether both are true.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.logical_and, x, y)


def logical_or(x, y) -> NamedArray:
    """Whether either is true.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.logical_or, x, y)


def logical_xor(x, y) -> NamedArray:
    """Whether only one of the two is true.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.logical_xor, x, y)


def maximum(x, y) -> NamedArray:
    """The larger one.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.maximum, x, y)


def minimum(x, y) -> NamedArray:
    """The smaller one.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.minimum, x, y)


def mod(x, y) -> NamedArray:
    """The remainder of `x / y`, with the sign of `y`.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.mod, x, y)


def not_equal(x, y) -> NamedArray:
    """`x != y`.

    Names: those of the operand that has all of them.
    Gradient: none; the result is bools.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.not_equal, x, y)


def power(x, y) -> NamedArray:
    """`x ** y`.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.power, x, y)


def remainder(x, y) -> NamedArray:
    """The remainder of `x / y`, with the sign of `y`; the same as `mod`.

    Names: those of the operand that has all of them.
    Gradient: elementwise; a reduce-scatter for an operand that was gathered, an all-reduce for one that was whole.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.remainder, x, y)


def right_shift(x, y) -> NamedArray:
    """`x >> y`.

    Names: those of the operand that has all of them.
    Gradient: none; whole numbers have none.
    Moves: operands to where the layout has the result's names: an all-gather of one that rests in slices.
    """
    return by_name(jnp.right_shift, x, y)
