"""How parameters start. Each is made where it rests, by names, so its numbers are the same on every mesh."""

import math

import jax
import jax.numpy as jnp

from trellis.named import Axis, NamedArray, NamesError, random
from trellis.named.axis import Names, axes_of, name_of
from trellis.named.create import layout_spec


def weight(key, axes, *, over: Names, scale: float = 1.0, dtype=jnp.float32) -> NamedArray:
    """A weight of a product, normal with variance `scale**2 / fan_in`, truncated at three deviations.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device makes the slice that rests with it.

    >>> weight(jax.random.key(0), {"embed": 64, "heads": 4, "head_dim": 16}, over="embed").shape
    {'embed': 64, 'heads': 4, 'head_dim': 16}

    Args:
        key: a PRNG key.
        axes: the weight's axes.
        over: the names that the product sums over; their sizes multiply to fan-in.
        scale: factor on the deviation.
        dtype: of the stored parameter.

    Raises:
        NamesError: `axes` has none of these names, or lacks one.
    """
    sizes = {axis.name: axis.size for axis in axes_of(axes, "weight")}
    summed = {name_of(name, "weight") for name in ((over,) if isinstance(over, str | Axis) else over)}
    if not summed or not summed <= {*sizes}:
        raise NamesError(
            f"a weight must have the names that its product sums over, got over={over!r} for axes "
            f"{', '.join(map(str, axes_of(axes)))}, in weight: name one of these, or several"
        )
    fan_in = math.prod(size for name, size in sizes.items() if name in summed)
    return normal(key, axes, deviation=scale / math.sqrt(max(fan_in, 1)), dtype=dtype)


def normal(key, axes, *, deviation: float, dtype=jnp.float32) -> NamedArray:
    """Normal numbers with the given deviation, truncated at three deviations.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device makes the slice that rests with it.

    >>> table = normal(jax.random.key(0), {"vocab": 512, "embed": 64}, deviation=0.02)
    >>> f"{table.array.std():.3f} {abs(table.array).max() < 0.061}"
    '0.020 True'
    """
    drawn = random.truncated_normal(key, axes, -3.0, 3.0, at="params")
    return (drawn * (deviation / _CUT)).astype(dtype)


# The deviation of a standard normal truncated at three deviations.
_CUT = 0.98658


def constant(axes, value: float, dtype=jnp.float32) -> NamedArray:
    """A parameter that starts as one value (scales of norms, biases).

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device makes the slice that rests with it.

    >>> constant({"embed": 3}, 1.0)
    f32[embed=3]
    [1. 1. 1.]
    """
    axes = axes_of(axes)
    names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
    spec = layout_spec(names, sizes, "params")
    return NamedArray(jax.lax.broadcast_in_dim(jnp.asarray(value, dtype), sizes, (), out_sharding=spec), names)
