"""Products of sorted rows with one weight for each group of them."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.named.backend import on_accelerator
from trellis.program.said import loop_turns

# Rows that are multiplied at once where a loop goes over blocks of them: on a CPU enough to keep its cores busy, few
# enough to waste little on a group's end; on others so many that adding to a weight's gradient takes less.
BLOCK, WIDE_BLOCK = 128, 2048


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """The first `sizes[0]` rows times `weights[0]`, the next `sizes[1]` times `weights[1]`, and so on.

    Accelerators use `jax.lax.ragged_dot`. On a CPU that multiplies every row with every weight, and so does its
    gradient with respect to the weights on TPUs (by libtpu 0.0.42; within a conditional it does not compile). There a
    loop goes over blocks of one group's rows each.

    Args:
        rows: `rows in`, sorted by group.
        weights: `groups in out`.
        sizes: `i32["groups"]`; together at most the number of rows. Rows after the last group give rows of no meaning,
            whose gradients must be zeros.

    Returns:
        `rows out`.

    >>> import jax.numpy as jnp
    >>> rows, weights = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), 2 * jnp.ones((2, 1))])
    >>> grouped_matmul(rows, weights, jnp.array([1, 2])).ravel().tolist()
    [2.0, 4.0, 4.0]
    """
    return _grouped(rows, weights, sizes, not on_accelerator(rows))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(rows, weights, sizes, blocks: bool):
    return _multiply(rows, weights, sizes) if blocks else lax.ragged_dot(rows, weights, sizes)


def _forward(rows, weights, sizes, blocks: bool):
    return _grouped(rows, weights, sizes, blocks), (rows, weights, sizes)


def _backward(blocks: bool, kept, d):
    rows, weights, sizes = kept
    d_rows = _grouped(d, weights.swapaxes(1, 2), sizes, blocks)
    return d_rows, _weights_gradient(rows, d, weights, sizes, BLOCK if blocks else WIDE_BLOCK), None


_grouped.defvjp(_forward, _backward)


def _multiply(rows, weights, sizes):
    block = min(BLOCK, rows.shape[0])
    blocks, group_of, first_of = _walk(sizes, block)
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def body(i, out):
        group, first = group_of(i), first_of(i)
        mine = lax.dynamic_slice_in_dim(padded, first, block) @ lax.dynamic_index_in_dim(weights, group, 0, False)
        # A block's rows that belong to later groups are written again by theirs.
        return lax.dynamic_update_slice_in_dim(out, mine, first, 0)

    out = _zeros((rows.shape[0] + block, weights.shape[2]), rows.dtype, rows, weights, sizes)
    with loop_turns(rows.shape[0], block, groups=weights.shape[0]):
        return lax.fori_loop(0, blocks, body, out)[: rows.shape[0]]


def _weights_gradient(rows, d, weights, sizes, block: int):
    # A TPU's kernel leaves rows of nobody unwritten, NaN as well as any other number: neither side may have them.
    if weights.shape[0] == 1:
        rows, d = (_own(x, jnp.arange(x.shape[0]) < sizes[0]) for x in (rows, d))
        return jnp.matmul(rows.T, d, preferred_element_type=jnp.float32)[None].astype(weights.dtype)
    block = min(block, rows.shape[0])
    blocks, group_of, first_of = _walk(sizes, block)
    ends = jnp.cumsum(sizes)
    rows, d = (jnp.pad(x, ((0, block), (0, 0))) for x in (rows, d))

    def body(i, total):
        group, first = group_of(i), first_of(i)
        own = first + jnp.arange(block) < ends[group]
        x, y = (_own(lax.dynamic_slice_in_dim(a, first, block), own) for a in (rows, d))
        more = jnp.matmul(x.T, y, preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(total, lax.dynamic_index_in_dim(total, group, 0, False) + more, group, 0)

    zeros = _zeros(weights.shape, jnp.float32, rows, weights, d, sizes)
    with loop_turns(rows.shape[0] - block, block, groups=weights.shape[0]):
        total = lax.fori_loop(0, blocks, body, zeros)
    return total.astype(weights.dtype)


def _own(rows, own):
    return jnp.where(own[:, None], rows, jnp.zeros((), rows.dtype))


def _walk(sizes, block: int):
    """How many blocks there are, and of a block its group and its first row."""
    ends = jnp.cumsum(sizes)
    last = jnp.cumsum(-(-sizes // block))

    def group_of(i):
        return jnp.searchsorted(last, i, side="right").astype(jnp.int32)

    def first_of(i):
        group = group_of(i)
        before = jnp.where(group > 0, last[group - 1], 0)
        return ends[group] - sizes[group] + (i - before) * block

    return last[-1], group_of, first_of


def _zeros(shape, dtype, *like):
    """Zeros that may differ between devices wherever one of some arrays does."""
    return vary(jnp.zeros(shape, dtype), varying_axes(*like))
