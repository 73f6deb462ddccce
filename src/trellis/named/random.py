"""Random numbers by name: the same on every mesh, and made where they stay.

JAX's Threefry generator computes element i of an array from the key and i
alone, so each device makes its slice and no device ever holds the whole. The
numbers depend on the key, the names' order and the sizes, not on the mesh.
(The `rbg` generator has neither property.)
"""

import inspect

import jax
import jax.numpy as jnp

from trellis.named.array import NamedArray
from trellis.named.axis import axes_of
from trellis.named.create import layout_spec


def _lift(sampler):
    parameters = inspect.signature(sampler).parameters
    takes_sharding = "out_sharding" in parameters

    def sample(key, axes, *args, at: str = "compute", **kwargs) -> NamedArray:
        axes = axes_of(axes)
        names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
        args = [a.array if isinstance(a, NamedArray) else a for a in args]
        kwargs = {k: v.array if isinstance(v, NamedArray) else v for k, v in kwargs.items()}
        spec = layout_spec(names, sizes, at)
        key = key.array if isinstance(key, NamedArray) else key
        if spec is None or not takes_sharding:
            array = sampler(key, *args, shape=sizes, **kwargs)
            return NamedArray(array if spec is None else jax.reshard(array, spec), names)
        return NamedArray(sampler(key, *args, shape=sizes, out_sharding=spec, **kwargs), names)

    sample.__name__ = sampler.__name__
    sample.__doc__ = (
        f"`jax.random.{sampler.__name__}` over named axes: `{sampler.__name__}(key, axes, ..., at='compute')`.\n\n"
        "    `at` is 'params' for what will rest as a parameter: the layout's other map."
    )
    return sample


normal = _lift(jax.random.normal)
uniform = _lift(jax.random.uniform)
truncated_normal = _lift(jax.random.truncated_normal)
bernoulli = _lift(jax.random.bernoulli)
randint = _lift(jax.random.randint)
gumbel = _lift(jax.random.gumbel)
exponential = _lift(jax.random.exponential)
laplace = _lift(jax.random.laplace)
cauchy = _lift(jax.random.cauchy)
logistic = _lift(jax.random.logistic)
rademacher = _lift(jax.random.rademacher)


def categorical(key, logits: NamedArray, over: str) -> NamedArray:
    """Draws positions along a name in proportion to `exp(logits)` (the Gumbel-max method)."""
    from trellis.named.reduce import argmax

    return argmax(logits + gumbel(key, logits.axes).astype(logits.dtype), over)


def split(key, name: str, count: int) -> NamedArray:
    """Keys along a name: one for each position, to be given to `vmap` or a `Stacked`."""
    return NamedArray(jax.random.split(key, count), (name,))


def dropout(key, x: NamedArray, rate: float) -> NamedArray:
    """Zeros each element with probability `rate`, scales the others to keep the mean."""
    if rate == 0.0:
        return x
    keep = bernoulli(key, x.axes, 1.0 - rate)
    from trellis.named.elementwise import ELEMENTWISE

    return ELEMENTWISE["where"](keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
