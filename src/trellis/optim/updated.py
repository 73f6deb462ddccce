"""Parameters after an update, in the type that they are kept in."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trellis.named import is_named
from trellis.named.rounding import at_random, drawn_for
from trellis.nn.parameters import Parameter, parameters


def updated(params: Any, updates: Any, key: jax.Array | None = None) -> Any:
    """The parameters plus their updates.

    Args:
        params: parameters, plain or named arrays.
        updates: a tree like it.
        key: rounds sums to types below float32 at random, each parameter by a key of its own; None to the nearest.
    """
    if key is None:
        return optax.apply_updates(params, updates)

    def leaf(p: Parameter, update: Any) -> Any:
        array, change = (x.array if is_named(x) else x for x in (p.leaf, update))
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize >= 4:
            new = array + change.astype(array.dtype)
        else:
            wide = array.astype(jnp.float32) + change.astype(jnp.float32)
            bits = drawn_for(wide, jax.random.fold_in(key, zlib.crc32(p.path.encode())))
            new = at_random(wide, array.dtype, (bits >> 8).astype(jnp.float32) / 2.0**24).astype(array.dtype)
        return p.leaf.with_array(new) if is_named(p.leaf) else new

    changes = jax.tree.leaves(updates, is_leaf=is_named)
    leaves = [leaf(p, change) for p, change in zip(parameters(params), changes, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_named), leaves)
