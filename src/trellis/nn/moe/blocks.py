"""Grouped products by a loop over blocks of one group's rows each, for CPUs.

There `jax.lax.ragged_dot` multiplies every row with every weight.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.nn.moe.tiles import tiles_of
from trellis.program.said import loop_turns

BLOCK = 128  # rows that are multiplied at once: enough to keep a CPU's cores busy, few enough to waste little
LEAST = 16  # fewer are hardly a product


def multiply(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, swapped: bool = False) -> jax.Array:
    """As `grouped_matmul`; `weights` are `groups in out`, or `groups out in` where they are swapped."""
    weights = weights.swapaxes(1, 2) if swapped else weights
    block = _block(rows.shape[0], weights.shape[0])
    tiles = tiles_of(sizes, block)
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def body(i, out):
        group, first = tiles.group(i), tiles.first(i)
        mine = lax.dynamic_slice_in_dim(padded, first, block) @ lax.dynamic_index_in_dim(weights, group, 0, False)
        # A block's rows that belong to later groups are written again by theirs.
        return lax.dynamic_update_slice_in_dim(out, mine, first, 0)

    out = _zeros((rows.shape[0] + block, weights.shape[2]), rows.dtype, rows, weights, sizes)
    with loop_turns(rows.shape[0], block, groups=weights.shape[0]):
        return lax.fori_loop(0, tiles.count, body, out)[: rows.shape[0]]


def weights_gradient(rows: jax.Array, d: jax.Array, sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Of each group, its rows' products with their gradients, summed in float32: `groups in out`.

    Args:
        rows: `rows in`.
        d: `rows out`.
        sizes: `i32["groups"]`.
        dtype: of the result.
    """
    count, groups = rows.shape[0], sizes.shape[0]
    block = _block(count, groups)
    tiles = tiles_of(sizes, block)
    rows, d = (jnp.pad(x, ((0, block), (0, 0))) for x in (rows, d))

    def body(i, total):
        group, first = tiles.group(i), tiles.first(i)
        own = (first + jnp.arange(block) < tiles.ends[group])[:, None]
        x, y = (jnp.where(own, lax.dynamic_slice_in_dim(a, first, block), jnp.zeros((), a.dtype)) for a in (rows, d))
        more = jnp.matmul(x.T, y, preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(total, lax.dynamic_index_in_dim(total, group, 0, False) + more, group, 0)

    zeros = _zeros((groups, rows.shape[1], d.shape[1]), jnp.float32, rows, d, sizes)
    with loop_turns(count, block, groups=groups):
        return lax.fori_loop(0, tiles.count, body, zeros).astype(dtype)


def _block(count: int, groups: int) -> int:
    """As many rows as a group has in the mean, where these are few."""
    return min(BLOCK, max(LEAST, 2 ** math.floor(math.log2(max(count // groups, 1)))), count)


def _zeros(shape, dtype, *like):
    """Zeros that may differ between devices wherever one of some arrays does."""
    return vary(jnp.zeros(shape, dtype), varying_axes(*like))
