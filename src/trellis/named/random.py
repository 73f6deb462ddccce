"""Random numbers by name: the same on every mesh, and made where they stay.

JAX's Threefry generator computes element i of an array from the key and i
alone, so each device makes its slice and no device ever holds the whole. The
numbers depend on the key, the names' order and the sizes, not on the mesh.
(The `rbg` generator has neither property.)

Each sampler takes a key (plain, or a named array of no names), the axes, the distribution's parameters as numbers, and
`at`, a map of the layout's: "compute", or "params" for what will rest as a parameter.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Generator

import jax
import jax.numpy as jnp

from trellis.mesh.layout import POSITIONS, current_layout, is_dealt
from trellis.mesh.manual.take import is_narrow
from trellis.named.along import apply_along
from trellis.named.arguments import dtype_of, dtypes_of_jax, has_keys, shown
from trellis.named.array import NamedArray, is_named, traced_anew
from trellis.named.axis import Axes, Axis, Name, NamesError, axes_of, name_of
from trellis.named.create import layout_spec
from trellis.named.dealing import deal
from trellis.named.elementwise import divide, where
from trellis.named.operand import made_in_order, operand, slices_dealt
from trellis.named.reduce import argmax
from trellis.notation import typeof
from trellis.notation.state import state_of

__all__ = [
    "bernoulli",
    "categorical",
    "cauchy",
    "dropout",
    "exponential",
    "fold_in",
    "gumbel",
    "laplace",
    "logistic",
    "normal",
    "permutation",
    "rademacher",
    "randint",
    "shuffle",
    "split",
    "truncated_normal",
    "uniform",
]


def normal(key, axes: Axes, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Normal numbers of mean 0 and variance 1.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.normal, key, axes, at, dtype=dtype)


def uniform(key, axes: Axes, dtype=jnp.float32, minval=0.0, maxval=1.0, *, at: str = "compute") -> NamedArray:
    """Uniform numbers from `minval` to `maxval`, the latter not included.

    Names: the given ones.
    Gradient: those of `minval` and `maxval` are sums over the elements'; an all-reduce of each where they are sliced.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.uniform, key, axes, at, dtype=dtype, minval=minval, maxval=maxval)


def truncated_normal(key, axes: Axes, lower, upper, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Normal numbers, restricted to between `lower` and `upper`.

    Names: the given ones.
    Gradient: those of `lower` and `upper` are sums over the elements'; an all-reduce of each where they are sliced.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.truncated_normal, key, axes, at, lower=lower, upper=upper, dtype=dtype)


def bernoulli(key, axes: Axes, p=0.5, *, at: str = "compute") -> NamedArray:
    """True with probability `p`, a number from 0 to 1 or a named one.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.bernoulli, key, axes, at, p=float(p) if isinstance(p, int) else _in_float32(p))


def randint(key, axes: Axes, minval, maxval, dtype=jnp.int32, *, at: str = "compute") -> NamedArray:
    """Uniform whole numbers from `minval` to `maxval`, the latter not included.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.randint, key, axes, at, minval=minval, maxval=maxval, dtype=dtype)


def gumbel(key, axes: Axes, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Gumbel numbers: adding them to logits and taking the largest draws from `exp(logits)`.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.gumbel, key, axes, at, dtype=dtype)


def exponential(key, axes: Axes, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Exponential numbers of mean 1.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.exponential, key, axes, at, dtype=dtype)


def laplace(key, axes: Axes, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Laplace numbers of mean 0 and scale 1.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.laplace, key, axes, at, dtype=dtype)


def cauchy(key, axes: Axes, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Cauchy numbers of median 0 and scale 1.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.cauchy, key, axes, at, dtype=dtype)


def logistic(key, axes: Axes, dtype=jnp.float32, *, at: str = "compute") -> NamedArray:
    """Logistic numbers of mean 0 and scale 1.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.logistic, key, axes, at, dtype=dtype)


def rademacher(key, axes: Axes, dtype=jnp.int32, *, at: str = "compute") -> NamedArray:
    """-1 or 1, equally likely.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device draws its own slice.
    """
    return _sample(jax.random.rademacher, key, axes, at, dtype=dtype)


def _sample(sampler: Callable, key, axes: Axes, at: str, **how) -> NamedArray:
    what = f"random.{getattr(sampler, '__name__', 'the function')}"
    axes = axes_of(axes, what)
    names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
    how = {k: _number(v, k, what) for k, v in how.items()}
    spec = layout_spec(names, sizes, at)
    key = _of_part(plain_key(key, what), names)
    for name, size in zip(names, sizes, strict=True):
        slices_dealt(name, size, what)
    with dtypes_of_jax(how.values(), what, "pass another dtype, and cast the result with .astype"):
        if spec is None:
            made = NamedArray(sampler(key, shape=sizes, **how), names)
        elif "out_sharding" in inspect.signature(sampler).parameters:
            made = NamedArray(sampler(key, shape=sizes, out_sharding=spec, **how), names)
        else:
            made = NamedArray(jax.reshard(sampler(key, shape=sizes, **how), spec), names)
    return deal(made) if is_dealt(POSITIONS) and POSITIONS in names else made


# The number of the part of the batch that is computed, within a pipeline.
_part: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("part", default=None)


@contextlib.contextmanager
def for_part(number: jax.Array) -> Generator[None]:
    """Makes what is drawn inside, along a name of which the program sees a part, this part's own, even from a key that
    is the same for all parts."""
    token = _part.set(number)
    try:
        with traced_anew():  # a jitted function would keep the number
            yield
    finally:
        _part.reset(token)


def _of_part(key: jax.Array, names: tuple[str, ...]) -> jax.Array:
    part, layout = _part.get(), current_layout()
    if part is None or layout is None or not set(names) & set(layout.cut):
        return key
    return jax.random.fold_in(key, part)


def _number(value, word: str, what: str):
    array = value.array if is_named(value) else value
    if word == "dtype":
        return None if value is None else dtype_of(value, what)
    if getattr(array, "ndim", 0):
        raise NamesError(
            f"a distribution's parameter must be a single number, got {word}={typeof(value)}, in {what}: draw with 0 "
            "and 1, and scale the result by name"
        )
    return array


def _in_float32(value):
    """A probability of 16 bits as float32: JAX draws in its type, in which a 1,000th would be met 8 times as often."""
    return value.astype(jnp.float32) if is_narrow(value) else value


def plain_key(key, what: str):
    """One key, as `jax.random` takes it.

    Raises:
        NamesError: several keys, or no key.
    """
    array = key.array if is_named(key) else key
    keys = has_keys(array)
    old = not keys and not is_named(key) and getattr(array, "shape", None) == (2,)  # jax.random.PRNGKey's
    if not old and (not keys or array.shape):
        raise NamesError(
            f"a random function needs a single key, got {typeof(key)}, in {what}: pass jax.random.key(0), or one key "
            "of several with keys['name', i], vmap or scan"
        )
    return array


def categorical(key, logits: NamedArray, over: Name) -> NamedArray:
    """Draws positions along a name in proportion to `exp(logits)` (the Gumbel-max method).

    Names: those of `logits` but `over`.
    Gradient: none; the result is positions.
    Moves: an all-gather along `over` where it is sliced.
    """
    logits = operand(logits, "random.categorical", copies=False)
    logits.index(over)
    # In bfloat16 sums near the largest would often be equal, and the first of equal ones is taken; so in whole numbers.
    exact = jnp.issubdtype(logits.dtype, jnp.inexact) and not is_narrow(logits)
    wide = logits if exact else logits.astype(jnp.float32)
    return argmax(wide + gumbel(key, logits.axes).astype(wide.dtype), over)


def permutation(key, axis: Axis) -> NamedArray:
    """The positions along an axis, each once, in random order: an index to shuffle by.

    `x["batch", permutation(key, x.axis("batch"))]` is `x` shuffled along its batch.

    Names: that of `axis`.
    Gradient: none.
    Moves: nothing.
    """
    (axis,) = axes_of(axis, "random.permutation")
    order = jax.random.permutation(plain_key(key, "random.permutation"), axis.size).astype(jnp.int32)
    order = made_in_order(order, (axis.name,), "random.permutation")
    return operand(NamedArray(order, (axis.name,)), "random.permutation")


def shuffle(key, x: NamedArray, along: Name) -> NamedArray:
    """The array with its positions along a name in random order, the same along the others.

    Names: those of `x`.
    Gradient: back to where each value came from; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    x = operand(x, "random.shuffle", copies=False)
    key = plain_key(key, "random.shuffle")

    def rows(a, axis):
        # Shuffles places, not values: JAX has no gradient of the latter in a mapped function over slices.
        return jnp.take(a, jax.random.permutation(key, a.shape[axis]), axis=axis)

    return apply_along(rows, x, along, name="random.shuffle")


def split(key, name: Name, count: int | None = None) -> NamedArray:
    """Keys along a name: one for each position, to be given to `vmap`, `scan` or a `Stacked`.

    Names: the given one.
    Gradient: none.
    Moves: nothing; each device makes the keys of its slice.

    Args:
        key: a key.
        name: a name with a `count`, or an axis.
        count: how many.

    Raises:
        NamesError: no count, or another one than the axis has.
    """
    size = name.size if isinstance(name, Axis) else count
    if size is None or (count is not None and count != size):
        raise NamesError(
            f"a split needs one count of keys, got {name} and count={count}, in random.split: pass a name and a "
            "count, or an axis"
        )
    names = tuple(axis.name for axis in axes_of({name_of(name, "random.split"): size}, "random.split"))
    keys = made_in_order(jax.random.split(plain_key(key, "random.split"), size), names, "random.split")
    return operand(NamedArray(keys, names), "random.split")


def fold_in(key, data) -> jax.Array:
    """A key for this number: `jax.random.fold_in` for plain or named scalars.

    Names: none; one key.
    Gradient: none.
    Moves: nothing.
    """
    number = data.array if is_named(data) else data
    if getattr(number, "ndim", 0) or not jnp.issubdtype(jnp.result_type(number), jnp.integer):
        raise NamesError(
            f"a key is made for a single whole number, got {shown(data)}, in random.fold_in: pass one, or go through "
            "several with vmap or scan"
        )
    with dtypes_of_jax((data,), "random.fold_in"):
        return jax.random.fold_in(plain_key(key, "random.fold_in"), number)


def dropout(key, x: NamedArray, rate: float) -> NamedArray:
    """Zeros each element with probability `rate`, and scales the others to keep the mean.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.
    """
    if isinstance(rate, int | float) and not 0 <= rate < 1:
        raise NamesError(
            f"dropout's rate must be at least 0 and below 1, got {rate}, in random.dropout: use a rate in this range"
        )
    x = operand(x, "random.dropout", copies=False)
    if isinstance(rate, int | float) and rate == 0:
        return x
    if state_of(x.array).mode == "manual" and any(x.slices):
        raise NamesError(
            f"random numbers can only be drawn for whole arrays, got {typeof(x)}, in random.dropout: apply dropout "
            "outside of shard_map, or draw a mask there and pass it in"
        )
    kept = 1.0 - _in_float32(rate)
    keep = bernoulli(key, x.axes, kept)
    kept = kept.astype(x.dtype) if is_narrow(rate) else kept
    return where(keep, divide(x, kept), jnp.zeros((), x.dtype))
