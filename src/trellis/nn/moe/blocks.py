"""Grouped products on CPUs: group by group, in blocks of its rows.

There `jax.lax.ragged_dot` multiplies every row with every weight. A group's weight is read from the array of all once,
and its rows go in few blocks: each size in `BLOCKS` as often as three quarters of it are left, the last for the rest.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.program.said import loop_turns

# Rows that are multiplied at once. Large blocks reach a CPU's full speed, and half of a smallest one is multiplied in
# vain for each group, in the mean. Of bfloat16 XLA's CPU compiler lays the weight out anew for every product, which
# takes as long as 128 rows.
BLOCKS, NARROW_BLOCKS = (512, 128, 32), (512, 128)


def multiply(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, swapped: bool = False) -> jax.Array:
    """As `grouped_matmul`; `weights` are `groups in out`, or `groups out in` where they are swapped."""
    count, columns = rows.shape[0], weights.shape[1 if swapped else 2]
    ends, blocks = jnp.cumsum(sizes), _blocks(rows)
    past = _past(blocks)
    padded = jnp.pad(rows, ((0, past), (0, 0)))

    def group(i, out):
        weight = lax.dynamic_index_in_dim(weights, i, 0, False)
        # Behind a barrier it is copied once, not for each block.
        weight = lax.optimization_barrier(weight.T if swapped else weight)

        def block(out, first, left, size):
            mine = lax.dynamic_slice_in_dim(padded, first, size)
            made = _product(mine, weight).astype(rows.dtype)
            # Rows of later groups are written again by theirs.
            return lax.dynamic_update_slice_in_dim(out, made, first, 0)

        return _in_blocks(block, out, ends[i] - sizes[i], sizes[i], -(-count // sizes.shape[0]), blocks)

    out = _like(lax.empty((count + past, columns), rows.dtype), rows, weights, sizes)
    return lax.fori_loop(0, sizes.shape[0], group, out)[:count]


def weights_gradient(rows: jax.Array, d: jax.Array, sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Of each group, its rows' products with their gradients, summed in float32: `groups in out`.

    Args:
        rows: `rows in`.
        d: `rows out`.
        sizes: `i32["groups"]`.
        dtype: of the result.
    """
    groups, ends, blocks = sizes.shape[0], jnp.cumsum(sizes), _blocks(rows)
    shape, even = (rows.shape[1], d.shape[1]), -(-rows.shape[0] // groups)
    rows, d = (jnp.pad(x, ((0, _past(blocks)), (0, 0))) for x in (rows, d))

    def group(i, out):
        def block(total, first, left, size):
            x, y = (lax.dynamic_slice_in_dim(a, first, size) for a in (rows, d))
            own = (jnp.arange(size) < left)[:, None]  # not rows of others, nor of nobody, which may be no numbers
            x, y = (jnp.where(own, a, jnp.zeros((), a.dtype)) for a in (x, y))
            return total + _product(lax.optimization_barrier(x.T), y)

        zeros = _like(jnp.zeros(shape, jnp.float32), rows, d, sizes)
        total = _in_blocks(block, zeros, ends[i] - sizes[i], sizes[i], even, blocks)
        return lax.dynamic_update_index_in_dim(out, total.astype(dtype), i, 0)

    return lax.fori_loop(0, groups, group, _like(lax.empty((groups, *shape), dtype), rows, d, sizes))


def _in_blocks(block: Callable, carry, first: jax.Array, count: jax.Array, even: int, blocks: tuple[int, ...]):
    """What blocks make of a carry, one after another.

    Args:
        block: `block(carry, first, left, size)`: where it begins, how many rows are left from there, and its size.
        carry: to start with.
        first, count: of the group's rows.
        even: rows of a group where the load is even.
        blocks: their sizes, from the largest.
    """
    for size in blocks:
        last = size == blocks[-1]
        turns = (count + (size - 1 if last else size // 4)) // size
        turn = lambda i, carry, first=first, count=count, size=size: block(
            carry, first + i * size, count - i * size, size
        )
        # Rows are the same however they are cut: counted as if all went in the smallest blocks.
        with loop_turns(even if last else 0, size):
            carry = lax.fori_loop(0, turns, turn, carry)
        first, count = first + turns * size, jnp.maximum(count - turns * size, 0)
    return carry


def _blocks(rows: jax.Array) -> tuple[int, ...]:
    """Sizes of blocks, from the largest; none is larger than all rows."""
    sizes = NARROW_BLOCKS if rows.dtype == jnp.bfloat16 else BLOCKS
    return tuple(size for size in sizes[:-1] if size <= rows.shape[0]) + (min(sizes[-1], rows.shape[0]),)


def _past(blocks: tuple[int, ...]) -> int:
    """How many rows past its end a group's last block may reach."""
    return max(blocks[0] // 4, blocks[-1])


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _like(x, *arrays):
    """An array that may differ between devices wherever one of some others does."""
    return vary(x, varying_axes(*arrays))
