"""Rounding at random, without bias: to one of a number's two neighbours in a type, more likely the nearer one.

What is drawn for an element depends on its place in the whole array, so it is the same on every mesh.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from trellis.notation import spec_of
from trellis.notation.state import sharding_on, state_of


def bytes_for(x: jax.Array, key: jax.Array) -> jax.Array:
    """8 random bits for each element, four from a draw: `u32` below 256.

    A draw serves four consecutive elements along the last dimension, if devices have whole fours.
    """
    state = state_of(x)
    *front, last = x.shape
    sizes = jax.typeof(x).sharding.mesh.shape if state.mode == "explicit" else {}
    if not x.ndim or last % (4 * math.prod(sizes[axis] for axis in state.axes[-1] if sizes)):
        return drawn_for(x, key) >> 24
    how = lambda *axes: sharding_on(x, spec_of(axes)) if sizes else None
    words = jax.random.bits(key, (*front, last // 4), jnp.uint32, out_sharding=how(*state.axes))
    places = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    four = (words[..., None] >> places.reshape((1,) * x.ndim + (4,))) & 0xFF
    return lax.reshape(four, x.shape, out_sharding=how(*state.axes))


def drawn_for(x: jax.Array, key: jax.Array) -> jax.Array:
    """32 bits for each element of a plain array that look random, made where it is: `u32`.

    They are the element's place in the array and the key, mixed. JAX's own draws are meant for harder tests than
    rounding is, and take a GPU longer than to read and write what is rounded: of a step of 8B parameters that rest in
    bfloat16, 6 % (benchmarks/results/accelerator_h200.txt). Places are counted modulo 2**32.
    """
    state = state_of(x)
    sharding = sharding_on(x, spec_of(state.axes)) if state.mode == "explicit" else None
    first, *_, last = jax.random.key_data(key)
    place = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, dim, out_sharding=sharding)
    first = _mixed(first ^ jnp.uint32(0x9E3779B9))
    last = _mixed(_mixed(last) + first)  # the words of keys may be small numbers
    return _mixed(_mixed(place + first) ^ last)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of 32 bits in which each bit of the result depends on all (Wellons, 2018, "Prospecting for hash
    functions", lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def at_random(x: jax.Array, dtype, chance: jax.Array, *, squares: bool = False) -> jax.Array:
    """Float32 numbers rounded at random to a narrower type, still float32.

    Args:
        x: within the type's range, or not finite, which stays.
        dtype: of floats.
        chance: for each number one that is evenly drawn from 0 to 1.
        squares: rounds so that the mean of the squares is that of `x`, which is not negative; only zero becomes zero.
    """
    step = _step_at(x, dtype)
    scaled = x / step
    if not squares:
        below = jnp.floor(scaled)
        return jnp.where(chance < scaled - below, below + 1, below) * step
    scaled = jnp.abs(scaled)
    below = jnp.floor(scaled)
    share = (scaled - below) * (scaled + below) / (2 * below + 1)
    rounded = jnp.where(chance < share, below + 1, below) * step
    return jnp.where(scaled > 0, jnp.maximum(rounded, float(jnp.finfo(dtype).smallest_subnormal)), rounded)


def nearest(x: jax.Array, dtype) -> jax.Array:
    """Float32 numbers within a narrower type's range rounded to its nearest, ties to even, still float32.

    XLA's CPU compiler may round to float16 on the way to four bits, and then again.
    """
    step = _step_at(x, dtype)
    return jnp.round(x / step) * step


def _step_at(x: jax.Array, dtype) -> jax.Array:
    """How far apart a type's numbers are at `x`."""
    info = jnp.finfo(dtype)
    least, fraction = max(int(info.minexp), int(info.nmant) - 126), int(info.nmant)
    return power_of_two(jnp.maximum(exponent_of(jnp.abs(x)), least) - fraction)


def exponent_of(x: jax.Array, *, up: bool = False) -> jax.Array:
    """log2 of positive numbers, rounded down or `up`, from their bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32) + (0x7FFFFF if up else 0)
    return (bits >> 23) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Two to the power of whole numbers from -126 to 127, in float32: `exp2` is not exact everywhere."""
    return lax.bitcast_convert_type((exponent + 127).astype(jnp.int32) << 23, jnp.float32)
