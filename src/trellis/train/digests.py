"""Digests of arrays as each device holds them: one number a device, equal if the bits are."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trellis.mesh.reshard import place

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
# Odd, so that a product with them in 32 bits loses nothing, and well spread: from the golden ratio and MurmurHash3.
_PLACES, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def digest(x: jax.Array) -> jax.Array:
    """A digest, `u32[""]`, of an array's bits and their places; it does not depend on the order of summation.

    Each element's bits, with those of its place, go through a function that never maps two numbers to one; the results
    are added up in 32 bits. So one changed element always changes the sum, and several do in all but one case in 2**32.

    >>> a, b = jnp.zeros(4), jnp.zeros(4).at[2].set(-0.0)
    >>> bool(digest(a) == digest(a + 0)), bool(digest(a) == digest(b))
    (True, False)
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    at, stride = jnp.zeros(bits.shape, jnp.uint32), _PLACES
    for dim in reversed(range(bits.ndim)):
        at += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride)
        stride = stride * bits.shape[dim] % 2**32
    mixed = (bits ^ at) * jnp.uint32(_FIRST)
    mixed ^= mixed >> 16
    mixed *= jnp.uint32(_SECOND)
    mixed ^= mixed >> 13
    return mixed.sum(dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnames=("mesh", "specs"))
def digest_table(leaves: Sequence[Any], mesh: Mesh, specs: tuple[P, ...]) -> jax.Array:
    """The digest of what each device holds of each array, known to every device. Four bytes a device and array move.

    Args:
        leaves: arrays on the mesh.
        mesh: the mesh.
        specs: how each of them is sliced.

    Returns:
        `u32`, one dimension for each mesh axis, and the last for the arrays.
    """
    axes = mesh.axis_names

    def on_device(leaves):
        return jnp.stack([digest(x) for x in leaves]).reshape((1,) * len(axes) + (-1,))

    # What the types call a copy need not be one, so they check nothing here.
    read = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=P(*axes, None), check_vma=False)
    return place(read(tuple(leaves)), ((),) * (len(axes) + 1), names=(*axes, "leaves"))
