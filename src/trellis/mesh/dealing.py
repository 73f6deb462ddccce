"""Positions dealt out so that every device has equal work under a causal mask.

In natural order, the last slice of a sequence sees `2 n - 1` times as much as the first. Dealt out over `n` devices,
the sequence is cut into `2 n` pieces, and device `d` holds piece `d` and piece `2 n - 1 - d`:

    natural      0 1 | 2 3 | 4 5 | 6 7
    dealt out    0 7 | 1 6 | 2 5 | 3 4
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trellis.mesh.permute import permute

Axes = tuple[str, ...]


def deal(x: jax.Array, slices: int, dim: int = 1) -> jax.Array:
    """A whole dimension in natural order, dealt out.

    >>> deal(jnp.arange(8)[None], 2)[0].tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    low, high = jnp.split(x.reshape(*x.shape[:dim], 2 * slices, -1, *x.shape[dim + 1 :]), 2, dim)
    return jnp.stack([low, jnp.flip(high, dim)], dim + 1).reshape(x.shape)


def places_dealt(x: jax.Array, slices: int, length: int) -> jax.Array:
    """The positions that are dealt out to places `x` of `length`, as `deal` has them, each computed by itself.

    >>> places_dealt(jnp.arange(8), 2, 8).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    piece = length // (2 * slices)
    device, high = x // (2 * piece), x // piece % 2
    return jnp.where(high == 1, 2 * slices - 1 - device, device) * piece + x % piece


def undeal(x: jax.Array, slices: int, dim: int = 1) -> jax.Array:
    """A whole dimension that is dealt out, back in natural order.

    >>> undeal(deal(jnp.arange(8)[None], 2), 2)[0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    pairs = x.reshape(*x.shape[:dim], slices, 2, -1, *x.shape[dim + 1 :])
    low, high = (lax.index_in_dim(pairs, half, dim + 1, keepdims=False) for half in (0, 1))
    return jnp.concatenate([low, jnp.flip(high, dim)], dim).reshape(x.shape)


def undealt(x: np.ndarray, slices: int, dim: int) -> np.ndarray:
    """The same for an array in the host's memory.

    >>> undealt(np.array([0, 1, 6, 7, 2, 3, 4, 5]), 2, 0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    pieces = x.reshape(*x.shape[:dim], 2 * slices, -1, *x.shape[dim + 1 :])
    places = np.arange(2 * slices)  # of piece p: an even place if it is in the first half, and an odd one else
    held = np.where(places < slices, 2 * places, 2 * (2 * slices - 1 - places) + 1)
    return np.take(pieces, held, dim).reshape(x.shape)


def deal_slices(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Exchanges a device's slice in natural order for its slice of positions dealt out, by two permutes."""
    even, odd = (permute(half, axes, pairs) for half, pairs in zip(jnp.split(x, 2, dim), _routes(axes), strict=True))
    first = lax.axis_index(axes) % 2 == 0  # an even device's low piece is an even one
    return jnp.concatenate([jnp.where(first, even, odd), jnp.where(first, odd, even)], dim)


def gather_slices(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The other way round: exchanges positions dealt out for a slice in natural order."""
    low, high = jnp.split(x, 2, dim)
    first = lax.axis_index(axes) % 2 == 0
    halves = jnp.where(first, low, high), jnp.where(first, high, low)
    back = [[(target, source) for source, target in pairs] for pairs in _routes(axes)]
    return jnp.concatenate([permute(half, axes, pairs) for half, pairs in zip(halves, back, strict=True)], dim)


def _routes(axes: Axes) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where each device's first and second half go: the even and the odd pieces."""
    count = lax.axis_size(axes)
    holder = lambda piece: min(piece, 2 * count - 1 - piece)
    even, odd = ([(d, holder(2 * d + half)) for d in range(count)] for half in (0, 1))
    return even, odd
