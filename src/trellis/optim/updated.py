"""Parameters and an optimizer's state after an update, in the types in which they are kept."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trellis.mesh.manual.take import is_narrow
from trellis.named import is_named
from trellis.named.rounding import at_random, drawn_for
from trellis.nn.parameters import Parameter, parameters


def updated(params: Any, updates: Any, key: jax.Array | None = None) -> Any:
    """The parameters plus their updates.

    Args:
        params: parameters, plain or named arrays.
        updates: a tree like it.
        key: rounds sums in types below float32 at random, with a key for each parameter; None rounds to the nearest.
    """

    def leaf(p: Parameter, update: Any) -> Any:
        array, change = (x.array if is_named(x) else x for x in (p.leaf, update))
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize >= 4:
            new = array + change.astype(array.dtype)
        else:
            wide = array.astype(jnp.float32) + change.astype(jnp.float32)
            new = wide.astype(array.dtype) if key is None else _rounded(wide, array.dtype, key, p.path)
        return p.leaf.with_array(new) if is_named(p.leaf) else new

    changes = jax.tree.leaves(updates, is_leaf=is_named)
    leaves = [leaf(p, change) for p, change in zip(parameters(params), changes, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_named), leaves)


def in_float32(tree: Any) -> Any:
    """Gradients, an optimizer's state or parameters for a rule: bfloat16 and float16 arrays as float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_narrow(x) else x, tree)


def kept_like(kept: Any, before: Any, key: jax.Array) -> Any:
    """An optimizer's state after a step, in the types that it had before.

    In one step a moving average changes by less than the distance between neighbours in bfloat16. Rounded to the
    nearest, averages of squares with a decay near 1 would stay the largest that they ever were; so rounding is random.

    Args:
        kept: the state, in float32 where `in_float32` gave it to the rule so.
        before: the state before the step.
        key: the step's; each array has a key of its own.
    """

    def leaf(path: Any, x: Any, was: Any) -> Any:
        return _rounded(x, was.dtype, key, f"optimizer{jax.tree_util.keystr(path)}") if is_narrow(was) else x

    return jax.tree_util.tree_map_with_path(leaf, kept, before)


def moved(params: Any, move: Callable[[Any], Any], key: jax.Array) -> Any:
    """Parameters after some are moved other than by a gradient, in the types in which they are kept.

    Moves are computed in float32. The result is rounded at random if it is kept in a smaller type, in which a step that
    is small beside a number would be lost.

    Args:
        params: the parameters before.
        move: from parameters to parameters; it returns those that it leaves alone as the same arrays.
        key: the step's; each array has a key of its own.
    """
    wide = in_float32(params)
    before, after = jax.tree.leaves(wide), jax.tree_util.tree_leaves_with_path(move(wide))

    def leaf(was: Any, wide: Any, path: Any, new: Any) -> Any:
        if new is wide:
            return was
        return _rounded(new, was.dtype, key, f"moved{jax.tree_util.keystr(path)}") if is_narrow(was) else new

    kept = jax.tree.leaves(params)
    leaves = [leaf(was, x, *each) for was, x, each in zip(kept, before, after, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _rounded(wide: jax.Array, dtype: Any, key: jax.Array, path: str) -> jax.Array:
    """Float32 numbers rounded at random to neighbours in another type, to the nearer one with higher probability."""
    bits = drawn_for(wide, jax.random.fold_in(key, zlib.crc32(path.encode())))
    return at_random(wide, dtype, (bits >> 8).astype(jnp.float32) / 2.0**24).astype(dtype)
