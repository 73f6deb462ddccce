"""Random bits of one device's slice: those that the whole array has there.

Threefry computes element `i` from the key and `i` alone (Salmon et al., 2011), so each slice is made where it stays.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from trellis.errors import TrellisError

Axes = tuple[str, ...]


class BitsError(TrellisError, NotImplementedError):
    """A generator whose numbers depend on how an array is sliced."""


def random_bits(key: jax.Array, width: int, shape: Sequence[int], axes: Sequence[Axes], sizes) -> jax.Array:
    """A device's part of `jax.random.bits(key, shape)`.

    Args:
        key: one key of the Threefry generator.
        width: bits of a number: 8, 16, 32 or 64.
        shape: of the whole array.
        axes: the mesh axes that slice each dimension.
        sizes: those of the mesh axes.

    Raises:
        BitsError: another generator.
    """
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise BitsError(
            "random numbers in a pipeline's stages must come from Threefry, which gives the same ones on every mesh, "
            f"got those of {jax.random.key_impl(key)}: make the key with jax.random.key(seed, impl='threefry2x32')"
        )
    local = [n // math.prod(sizes[a] for a in mine) for n, mine in zip(shape, axes, strict=True)]
    high, low = (jnp.zeros(local, jnp.uint32) for _ in range(2))
    stride = 1
    for dim in reversed(range(len(shape))):  # the index of each element in the whole array, in two words
        index = lax.broadcasted_iota(jnp.uint32, local, dim)
        if axes[dim]:
            index = index + (lax.axis_index(axes[dim]) * local[dim]).astype(jnp.uint32)
        more_high, more_low = _product(index, stride)
        low, carried = low + more_low, low
        high = high + more_high + (low < carried).astype(jnp.uint32)
        stride *= shape[dim]
    first, second = jax.random.key_data(key)
    bits = threefry2x32_p.bind(*(jnp.broadcast_to(k, high.shape) for k in (first, second)), high, low)
    if width == 64:
        top, bottom = (b.astype(jnp.uint64) for b in bits)
        return lax.shift_left(top, jnp.uint64(32)) | bottom
    return (bits[0] ^ bits[1]).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


def _product(index: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The high and the low word of a product of words; `factor` may have more than 32 bits."""
    low, high = (jnp.uint32(word) for word in (factor & 0xFFFFFFFF, factor >> 32))
    a, b = index >> 16, index & 0xFFFF
    c, d = low >> 16, low & 0xFFFF
    middle = a * d + (b * d >> 16)
    carried = (middle & 0xFFFF) + b * c
    return a * c + (middle >> 16) + (carried >> 16) + index * high, index * low
