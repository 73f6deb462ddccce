"""Sums of rows that have the same number, always in the same order, for the gradients of tables on GPUs.

A GPU's threads add what is scattered to one row as they come, so a gradient has other bits each time it is made. Here
rows are sorted by number, blocks of them are summed by products with zeros and ones, sums that go on from block to
block are added by a scan, and each row of the result is written once. On an H200 65,536 rows of 2,048 numbers take 0.8
ms instead of 0.5 to 1.0 (benchmarks/results/accelerator_h200.txt).
"""

import jax
import jax.numpy as jnp

from trellis.mesh.manual.ops import vary, varying_axes

# Rows that one product sums. More of them are more multiplications by zero, fewer are more sums that go on.
_BLOCK = 128


def row_sums(ids: jax.Array, rows: jax.Array, count: int) -> jax.Array:
    """Adds up the rows of each number, in float32 if their type is narrower.

    >>> row_sums(jnp.array([2, 0, 2, 7]), jnp.array([[1.0], [2.0], [3.0], [4.0]]), 3)
    Array([[2.],
           [0.],
           [4.]], dtype=float32)

    Args:
        ids: whole numbers, `i32["rows"]`, of which those outside of 0 to `count - 1` are left out.
        rows: `["rows width"]`, of real numbers.
        count: of rows of the result.

    Returns:
        `["count width"]`.
    """
    wide = rows.dtype if rows.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
    length, width = rows.shape
    ids = jnp.where((ids < 0) | (ids >= count), count, ids.astype(jnp.int32))
    order = jnp.argsort(ids)
    blocks = -(-length // _BLOCK)
    missing = blocks * _BLOCK - length
    ids = jnp.pad(ids[order], (0, missing), constant_values=count).reshape(blocks, _BLOCK)
    rows = jnp.pad(rows[order], ((0, missing), (0, 0))).reshape(blocks, _BLOCK, width)

    # Within a block: which of its numbers each row has, and the sum of each.
    new = ids[:, 1:] != ids[:, :-1]
    place = jnp.pad(jnp.cumsum(new.astype(jnp.int32), axis=1), ((0, 0), (1, 0)))
    here = place[:, None, :] == jnp.arange(_BLOCK)[None, :, None]
    exact = jax.lax.Precision.HIGHEST if rows.dtype == wide else None
    sums = jnp.einsum("bsr,brw->bsw", here.astype(rows.dtype), rows, precision=exact, preferred_element_type=wide)

    # From block to block: a block's last sum goes on if the next one begins with its number.
    goes_on = ids[1:, 0] == ids[:-1, -1]
    last = place[:, -1]
    ends = jnp.take_along_axis(sums, last[:, None, None], axis=1)[:, 0]
    through = jnp.pad(goes_on, (1, 0)) & (last == 0)
    _, totals = jax.lax.associative_scan(_joined, (through, ends))
    come = jnp.pad(jnp.where(goes_on[:, None], totals[:-1], 0), ((1, 0), (0, 0)))
    sums += jnp.where(jnp.arange(_BLOCK)[None, :, None] == 0, come[:, None], 0)

    # Each number where its last row is; all else is out of range, in places that differ.
    number = jnp.max(jnp.where(here, ids[:, None, :], -1), axis=2)
    written = (number >= 0) & (number < count)
    written &= ~((jnp.arange(_BLOCK)[None] == last[:, None]) & jnp.pad(goes_on, (0, 1))[:, None])
    to = jnp.where(written.reshape(-1), number.reshape(-1), count + jnp.arange(blocks * _BLOCK))
    nothing = vary(jnp.zeros((count, width), wide), varying_axes(rows, ids))
    return nothing.at[to].set(sums.reshape(-1, width), mode="drop", unique_indices=True)


def _joined(before, after):
    """Two neighbouring stretches of blocks as one: whether a sum goes through all of it, and its last sum."""
    through, total = after
    return before[0] & through, total + jnp.where(through[:, None], before[1], 0)
