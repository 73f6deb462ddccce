"""Small helpers of kernels that run on each device's part of their arrays."""

import jax
from jax import lax

Axes = tuple[str, ...]


def varying(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` with a manual-mode type that varies along all of `axes`, so that a kernel sees one kind of operand.

    The gradient is summed over the axes that were added: at once, or, where `x` came in the `~` state, as a pending
    sum. Outside of manual mode there are no axes to add.
    """
    for axis in axes:
        if axis not in jax.typeof(x).mat.varying:
            x = lax.pcast(x, (axis,), to="varying")
    return x
