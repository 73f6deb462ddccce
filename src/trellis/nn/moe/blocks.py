"""Grouped products on CPUs: group by group, in blocks of rows.

There `jax.lax.ragged_dot` multiplies every row with every weight. Here a group's weight is read once from the array of
all weights, and its rows are cut into blocks: each size is used while it is filled but for `VACANT` rows, the last one
for the rest. A block may reach into the rows of other groups, which are masked out: nothing is padded, and only blocks
are copied.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.mesh.parts import one_of, part_of, with_one, with_part
from trellis.named.backend import copied_turned
from trellis.program.said import loop_turns

# Rows that are multiplied at once. Large blocks reach a CPU's full speed; on average, half of a smallest one is
# multiplied in vain for each group. On an AMD EPYC (family 26) a float32 product with a weight as it lies takes as long
# per row for 8 or 48 rows as for 512. With a transposed weight, or in bfloat16, it takes as long as 10 rows more, and
# added to a sum as another 10. So a block that is filled but for 32 rows, or a quarter, is taken as full.
BLOCKS, FINE_BLOCKS, VACANT = (512, 128, 64, 32, 16), (512, 48, 8), 32
# Up to this many rows, all blocks are of the smallest size: each size is a loop of its own, which takes longer to
# compile than these rows take to multiply.
FEW = 256


# Traced once for each type of its arrays: a layer has three of them, a step each of these several times.
_traced_once = functools.partial(jax.jit, inline=True)


@functools.partial(_traced_once, static_argnames="swapped")
def multiply(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, swapped: bool = False) -> jax.Array:
    """As `grouped_matmul`; `weights` are `groups in out`, or `groups out in` if they are swapped."""
    count, columns, dtype = rows.shape[0], weights.shape[1 if swapped else 2], rows.dtype
    ends, blocks = jnp.cumsum(sizes), _blocks(count, BLOCKS if swapped or dtype != jnp.float32 else FINE_BLOCKS)
    over = ((1,), (1 if swapped else 0,)), ((), ())
    rows, weights = _bits(rows), _bits(weights)

    def group(i, out):
        # Behind a barrier it is copied once, and not for each block.
        weight = lax.optimization_barrier(one_of(weights, (i,)))

        def block(out, first, size):
            start, own = _own(first, size, count, ends[i] - sizes[i], ends[i])
            mine, theirs = (part_of(x, start, size) for x in (rows, out))
            made = _product(_floats(mine, dtype), _floats(weight, dtype), over).astype(dtype)
            return with_part(out, jnp.where(own, _bits(made), theirs), start)

        return _in_blocks(block, out, ends[i] - sizes[i], sizes[i], -(-count // sizes.shape[0]), blocks)

    out = _like(lax.empty((count, columns), rows.dtype), rows, weights, sizes)
    return _floats(lax.fori_loop(0, sizes.shape[0], group, out), dtype)


def rows_gradient(d: Sequence[jax.Array], weights: Sequence[jax.Array], sizes: jax.Array) -> jax.Array:
    """The gradient of rows that went into several products, through all of these: `rows in`.

    Args:
        d: the gradient of each product's result, `rows out`.
        weights: of each product, `groups in out`.
        sizes: `i32["groups"]`.
    """
    made = [multiply(*pair, sizes, swapped=True) for pair in zip(d, weights, strict=True)]
    return functools.reduce(operator.add, made)


@functools.partial(_traced_once, static_argnames="dtype")
def weights_gradient(rows: jax.Array, d: jax.Array, sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """For each group, the products of its rows with their gradients, summed in float32: `groups in out`.

    The first block of a group is as large as an even load fills: if the group has as many rows, the sum begins with its
    product instead of zeros.

    Args:
        rows: `rows in`.
        d: `rows out`.
        sizes: `i32["groups"]`.
        dtype: of the result.
    """
    count, groups, given = rows.shape[0], sizes.shape[0], rows.dtype
    even, ends, blocks = -(-count // groups), jnp.cumsum(sizes), _blocks(count, BLOCKS)
    most = next((size for size in blocks if size <= even), blocks[-1])
    kept = _bits(jnp.zeros((), dtype)).dtype
    rows, d = _bits(rows), _bits(d)

    def group(i, out):
        begin, end = ends[i] - sizes[i], ends[i]

        def product(first, size):
            # Without rows of other groups or of none, which may be NaN.
            start, own = _own(first, size, count, first, end)
            parts = (part_of(a, start, size) for a in (rows, d))
            x, y = (jnp.where(own, a, jnp.zeros((), a.dtype)) for a in parts)
            x = copied_turned(x, (1, 0))
            return _product(_floats(x, given), _floats(y, given), (((1,), (0,)), ((), ())))

        # From a sum of two arrays and nothing else XLA's CPU compiler makes a loop that takes four times as long.
        block = lambda total, first, size: jnp.where(first < end, total + product(first, size), total)
        zeros = lambda: _like(jnp.zeros(out.shape[1:]), rows, d, sizes)
        if count <= FEW:
            total = _in_blocks(block, zeros(), begin, sizes[i], even, blocks)
        else:
            filled = sizes[i] >= most - _vacant(most)
            total = lax.cond(filled, lambda: product(begin, most), zeros)
            done = jnp.where(filled, most, 0)
            left = jnp.maximum(sizes[i] - done, 0)
            total = _in_blocks(block, total, begin + done, left, max(even - most, 0), blocks)
        return with_one(out, _bits(total.astype(dtype)), (i,))

    out = _like(lax.empty((groups, rows.shape[1], d.shape[1]), kept), rows, d, sizes)
    return _floats(lax.fori_loop(0, groups, group, out), dtype)


def _own(first, size: int, count: int, begin, end) -> tuple[jax.Array, jax.Array]:
    """Where a block for `first` begins, so that it ends within `count` rows, and which of its rows lie from `begin` to
    `end`: `bool["rows 1"]`."""
    start = jnp.minimum(first, count - size)
    number = start + jnp.arange(size)
    return start, ((begin <= number) & (number < end))[:, None]


# To update a slice of bfloat16, XLA's CPU compiler converts the whole array to float32 and back, in every turn of a
# loop (JAX 0.10.2); so bits are moved instead.
def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _floats(x: jax.Array, dtype) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _in_blocks(block: Callable, carry, first: jax.Array, count: jax.Array, even: int, blocks: tuple[int, ...]):
    """The carry after all blocks, one after another.

    Args:
        block: `block(carry, first, size)`: where it is to begin, and its size.
        carry: to start with.
        first, count: of the group's rows.
        even: rows of a group under an even load.
        blocks: their sizes, from the largest.
    """
    for size in blocks:
        last = size == blocks[-1]
        turns = lax.div(count + (size - 1 if last else _vacant(size)), jnp.int32(size))  # neither is negative
        turn = lambda i, carry, first=first, size=size: block(carry, first + i * size, size)
        # Rows are the same however they are cut, so they are counted as if all were in the smallest blocks.
        with loop_turns(even if last else 0, size):
            carry = lax.fori_loop(0, turns, turn, carry)
        first, count = first + turns * size, jnp.maximum(count - turns * size, 0)
    return carry


def _vacant(size: int) -> int:
    """How many rows may be missing in a block that is taken as full."""
    return min(size // 4, VACANT)


def _blocks(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of blocks, from the largest; none is larger than all rows."""
    return tuple(size for size in sizes[:-1] if FEW < count >= size) + (min(sizes[-1], count),)


def _product(x: jax.Array, y: jax.Array, over) -> jax.Array:
    return lax.dot_general(x, y, over, preferred_element_type=jnp.float32)


def _like(x, *arrays):
    """`x` as an array that may vary between devices wherever one of `arrays` does."""
    return vary(x, varying_axes(*arrays))
