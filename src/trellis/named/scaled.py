"""Products of arrays in blocks: numbers with their scales (`trellis.named.blocks`).

NVIDIA's GPUs from Blackwell on run `jax.nn.scaled_matmul`: one product of narrow numbers with their scales. Elsewhere
the numbers are opened, in a type that represents them exactly, and multiplied.
"""

import math

import jax
import jax.numpy as jnp

from trellis.mesh.by_device import by_device
from trellis.mesh.manual.ops import mark_pending, vary
from trellis.named.backend import multiplies_blocks, on_accelerator, plain_product
from trellis.named.blocks import MXFP8, NVFP4, opened
from trellis.notation import spec_of
from trellis.notation.state import state_of

Dims = tuple[int, ...]


def scaled_product(a, sa, b, sb, numbers, *, dtype, spec=None) -> jax.Array:
    """`dot_general` of two plain arrays in blocks, summed in float32.

    Args:
        a, b: the numbers.
        sa, sb: their scales, sliced as they are.
        numbers: dimension numbers as `dot_general` takes them.
        dtype: of the result.
        spec: how the result is sharded, or None.
    """
    if multiplies_blocks(a) and _fits(a, sa, numbers[0][0]) and _fits(b, sb, numbers[0][1]):
        return _by_kernel(a, sa, b, sb, numbers, spec).astype(dtype)
    exact = jnp.bfloat16 if on_accelerator(a) else jnp.float32
    return plain_product(opened(a, sa, exact), opened(b, sb, exact), numbers, jnp.float32, spec).astype(dtype)


def _fits(values, scales, summed: Dims) -> bool:
    """Whether blocks are whole along the innermost summed dimension, and of one number along the other summed ones."""
    block = next(form.block for form in (MXFP8, NVFP4) if form.element == values.dtype)
    blocks = [values.shape[d] // scales.shape[d] for d in summed]
    return bool(blocks) and blocks[-1] == block and all(n == 1 for n in blocks[:-1])


def _by_kernel(a, sa, b, sb, numbers, spec) -> jax.Array:
    """Runs `jax.nn.scaled_matmul` on each device's slices: XLA partitions no such product of explicit types."""
    states = [state_of(x) for x in (a, b)]
    if states[0].mode != "explicit":
        return _local(a, sa, b, sb, numbers)
    pending = tuple(sorted(spec.unreduced)) if spec is not None else ()
    varying = tuple(sorted({axis for state in states for axis in state.sliced}))

    def body(*operands):
        out = vary(_local(*operands, numbers), varying)  # JAX does not follow a type through this product
        return mark_pending(out, pending) if pending else out

    first, second = (spec_of(state.axes) for state in states)
    rank = a.ndim + b.ndim - 2 * len(numbers[0][0]) - len(numbers[1][0])
    return by_device(
        body,
        mesh=jax.typeof(a).sharding.mesh,
        in_specs=(first, first, second, second),
        out_specs=spec_of([()] * rank) if spec is None else spec,
    )(a, sa, b, sb)


def _local(a, sa, b, sb, numbers) -> jax.Array:
    """The product of what a device has."""
    (summed, batch) = numbers
    left, right = (_as_matrices(*x, s, n) for x, s, n in zip(((a, sa), (b, sb)), summed, batch, strict=True))
    (x, sx, kept_x), (y, sy, kept_y) = left, right
    out = jax.nn.scaled_matmul(x, y, sx, sy, preferred_element_type=jnp.float32)
    return out.reshape(*(a.shape[d] for d in batch[0]), *kept_x, *kept_y)


def _as_matrices(values, scales, summed: Dims, batch: Dims) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """`batch rows summed`, its scales, and the sizes that were merged into rows."""
    free = tuple(d for d in range(values.ndim) if d not in (*summed, *batch))
    for d in (*batch, *free):  # one scale for each row: a tile's, repeated
        scales = jnp.repeat(scales, values.shape[d] // scales.shape[d], axis=d) if scales.shape[d] else scales
    order = (*batch, *free, *summed)

    def merged(x):
        sizes = [math.prod(x.shape[d] for d in group) for group in (batch, free, summed)]
        return x.transpose(order).reshape(sizes)

    return merged(values), merged(scales), tuple(values.shape[d] for d in free)
