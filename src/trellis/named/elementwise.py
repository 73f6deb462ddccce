"""Elementwise operations: tables of JAX functions, lifted to names."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis.mesh.platform import platform_of
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.placing import assign, bring, check_sizes, refuse_pending, union, widen
from trellis.notation import spec_of, typeof
from trellis.notation.state import State, state_of


def lift(fn, *, name: str | None = None) -> Callable[..., NamedArray]:
    """Makes an elementwise function of arrays one of named arrays, broadcasting by name.

    >>> from trellis.named import named
    >>> softplus = lift(jax.nn.softplus)
    >>> softplus(named(jnp.zeros(3), "embed")).names
    ('embed',)

    Args:
        fn: takes arrays that broadcast against each other (and scalars) and gives an array of their common shape.
        name: what errors call it.
    """
    name = name or getattr(fn, "__name__", "the function")

    @functools.wraps(fn)
    def lifted(*args, **kwargs):
        operands = [a for a in args if isinstance(a, NamedArray)]
        if not operands:
            return fn(*args, **kwargs)
        for x in operands:
            refuse_pending(x, name)
        arrays, names, slices = together(args, name)
        return NamedArray(_broadcasting(fn, arrays)(*arrays, **kwargs), names, slices)

    return lifted


def _broadcasting(fn, arrays):
    """The function, with some operands broadcast first.

    Those are copies (`~`): JAX refuses them beside slices in an elementwise operation; broadcast to the slices of the
    others they are slices too, and their gradient is a partial sum. And bfloat16 on a CPU: see `_spread`. The broadcast
    array is not kept for the backward pass.
    """
    plain = [a for a in arrays if hasattr(a, "ndim")]
    states = [state_of(a) for a in plain]
    if len(states) < 2:
        return fn
    shape = jnp.broadcast_shapes(*(a.shape for a in plain))
    copies = any(s.copied for s in states) and len({(s.axes, s.copied) for s in states}) > 1
    if not copies and not any(_summed_wide(a, shape) for a in plain):
        return fn
    axes = [max((s.axes[i] for s in states if s.axes), key=len) for i in range(len(shape))]
    spec = spec_of(axes) if any(s.mode == "explicit" for s in states) else None

    def broadcast(*arrays, **kwargs):
        first = lambda a: hasattr(a, "ndim") and (state_of(a).copied or _summed_wide(a, shape))
        return fn(*(_spread(a, shape, spec) if first(a) else a for a in arrays), **kwargs)

    return jax.checkpoint(broadcast, prevent_cse=False)


def _summed_wide(a, shape) -> bool:
    return 0 < a.ndim and a.shape != shape and a.dtype == jnp.bfloat16 and platform_of(a) == "cpu"


def _spread(a, shape, spec):
    """The array broadcast. In bfloat16 on a CPU it goes through float32, which changes nothing but that its gradient
    is summed there: of a bfloat16 sum XLA's CPU compiler makes a loop ten times as slow."""
    wide = a.astype(jnp.float32) if _summed_wide(a, shape) else a
    return jax.lax.broadcast_in_dim(wide, shape, range(a.ndim), out_sharding=spec).astype(a.dtype)


def together(args, what: str):
    """The plain arrays of elementwise operands, placed and of one rank, with the result's names and slices.

    Raises:
        NamesError: a plain array with dimensions, or a name with two sizes.
    """
    operands = [a for a in args if isinstance(a, NamedArray)]
    for a in args:
        if not isinstance(a, NamedArray) and getattr(a, "ndim", 0):
            types = " and ".join(typeof(o) for o in args)
            raise NamesError(
                f"an operation by name takes named arrays and scalars, got {types} in {what}: "
                f"name the dimensions with named(array, '...')"
            )
    first = operands[0]
    if len(operands) == 1:
        return [a.array if a is first else a for a in args], first.names, first.slices
    check_sizes(operands, what)
    names = union(operands)
    where = assign(operands, names)
    placed = [bring(a, where) if isinstance(a, NamedArray) else a for a in args]
    arrays = [widen(a, names) if isinstance(a, NamedArray) else a for a in placed]
    slices = tuple(where[name] for name in names) if any(x.slices for x in operands) else ()
    return arrays, names, slices


def _pending(*args) -> frozenset[str]:
    return frozenset().union(*(state_of(a.array).pending for a in args if isinstance(a, NamedArray)))


def add(x, y):
    """Sum by name. Partial sums over the same mesh axes may be added to each other."""
    return _linear(jnp.add, x, y)


def subtract(x, y):
    """Difference by name. Partial sums over the same mesh axes may be subtracted from each other."""
    return _linear(jnp.add, x, negative(y)) if _pending(x, y) else _subtract(x, y)


def negative(x):
    """The negative; of partial sums too."""
    return _scale(x, -1) if _pending(x) else _negative(x)


def multiply(x, y):
    """Product by name. Partial sums may be multiplied by a scalar."""
    if _pending(x, y):
        for value, factor in ((x, y), (y, x)):
            if isinstance(value, NamedArray) and not isinstance(factor, NamedArray):
                return _scale(value, factor)
    return _multiply(x, y)


def divide(x, y):
    """Quotient by name. Partial sums may be divided by a scalar."""
    return _scale(x, 1 / y) if _pending(x) and not isinstance(y, NamedArray) else _divide(x, y)


def _linear(fn, x, y):
    if not _pending(x, y):
        return _add(x, y)
    if (
        not (isinstance(x, NamedArray) and isinstance(y, NamedArray))
        or _pending(x) != _pending(y)
        or x.names != y.names
    ):
        for a in (x, y):
            if isinstance(a, NamedArray):
                refuse_pending(a, "adding something that is not the same partial sum")
    return NamedArray(fn(x.array, y.array), x.names, x.slices)


def _scale(x: NamedArray, factor):
    """A linear map of partial sums: the factor is held as copies, as the type system asks."""
    state: State = state_of(x.array)
    factor = jnp.asarray(factor, x.dtype)
    if state.mode == "manual":
        factor = jax.lax.pcast(factor, tuple(state.pending), to="reduced")
    else:
        factor = jax.reshard(factor, spec_of([], (), state.pending))
    return x.with_array(x.array * factor)


def rounded_once(fn: Callable) -> Callable:
    """A function that, of bfloat16 arrays on a CPU, computes in float32 and rounds its result, or results.

    XLA's CPU compiler rounds after every operation that a GELU, say, consists of: a fifth of the time of a step of a
    small GPT-2, and less exact.
    """

    @functools.wraps(fn)
    def rounded(*args, **kwargs):
        if any(getattr(a, "dtype", None) != jnp.bfloat16 or platform_of(a) != "cpu" for a in args):
            return fn(*args, **kwargs)
        results = fn(*(a.astype(jnp.float32) for a in args), **kwargs)
        return jax.tree.map(lambda result: result.astype(jnp.bfloat16), results)

    return rounded


_add, _subtract, _multiply, _divide, _negative = map(
    lift, (jnp.add, jnp.subtract, jnp.multiply, jnp.true_divide, jnp.negative)
)

UNARY = {
    fn: lift(getattr(jnp, fn), name=fn)
    for fn in (
        "abs ceil conj cos cosh arccos arccosh sin sinh arcsin arcsinh tan tanh arctan arctanh deg2rad rad2deg "
        "exp exp2 expm1 fabs floor imag invert isfinite isinf isnan log log10 log1p log2 logical_not "
        "nan_to_num real reciprocal rint round sign signbit sqrt square trunc cbrt"
    ).split()
}
ACTIVATIONS = {
    fn: lift(rounded_once(getattr(jax.nn, fn)), name=fn)
    for fn in (
        "relu relu6 sigmoid silu swish gelu elu selu celu softplus soft_sign log_sigmoid leaky_relu "
        "hard_sigmoid hard_tanh hard_silu mish squareplus"
    ).split()
}
BINARY = {
    fn: lift(getattr(jnp, fn), name=fn)
    for fn in (
        "arctan2 bitwise_and bitwise_or bitwise_xor copysign equal float_power floor_divide fmax fmin fmod gcd "
        "greater greater_equal heaviside hypot lcm left_shift less less_equal logaddexp logaddexp2 logical_and "
        "logical_or logical_xor maximum minimum mod not_equal power remainder right_shift"
    ).split()
}
OTHERS = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
    "negative": negative,
    "rsqrt": lift(jax.lax.rsqrt, name="rsqrt"),
    "erf": lift(jax.lax.erf, name="erf"),
    "clip": lift(jnp.clip, name="clip"),
    "where": lift(jnp.where, name="where"),
    "stop_gradient": lift(jax.lax.stop_gradient, name="stop_gradient"),
}
ELEMENTWISE: dict[str, Callable[..., NamedArray]] = {**UNARY, **ACTIVATIONS, **BINARY, **OTHERS}


def astype(x, dtype):
    """The same values in another dtype (partial sums stay partial sums)."""
    return x.with_array(x.array.astype(dtype)) if isinstance(x, NamedArray) else x.astype(dtype)
