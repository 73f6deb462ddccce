"""Parts of arrays whose start is computed by the program.

`jax.lax` counts a negative start from the end, and spends four operations on each dimension for that, even on those
that are whole: half of a traced pipeline of mixtures. The starts here are never negative.
"""

from collections.abc import Sequence

import jax
from jax import lax


def part_of(x: jax.Array, start, size: int, dim: int = 0) -> jax.Array:
    """`size` places of a dimension from `start` on, which is not negative."""
    return lax.dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)


def own_part(x: jax.Array, dim: int, axes: str | Sequence[str]) -> jax.Array:
    """This device's slice of a dimension that it holds whole, over some mesh axes."""
    size = x.shape[dim] // lax.axis_size(axes)
    return part_of(x, lax.axis_index(axes) * size, size, dim)


def one_of(x: jax.Array, at: Sequence) -> jax.Array:
    """The part of `x` at an index for each of its first dimensions, none of them negative."""
    rest = x.shape[len(at) :]
    starts = (*at, *(0,) * len(rest))
    return lax.dynamic_slice(x, starts, (*(1,) * len(at), *rest), allow_negative_indices=False).reshape(rest)


def with_part(x: jax.Array, part: jax.Array, start, dim: int = 0) -> jax.Array:
    """`x` with `part`, cast to its dtype, from `start` on, which is not negative."""
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, dim, allow_negative_indices=False)


def with_one(x: jax.Array, one: jax.Array, at: Sequence) -> jax.Array:
    """`x` with `one`, cast to its dtype, at an index for each of its first dimensions, none of them negative."""
    one = one.astype(x.dtype).reshape(*(1,) * len(at), *one.shape)
    return lax.dynamic_update_slice(x, one, (*at, *(0,) * (x.ndim - len(at))), allow_negative_indices=False)
