"""Steps whose numbers are not finite change nothing."""

from typing import Any

import jax
import jax.numpy as jnp


def all_finite(*values: jax.Array) -> jax.Array:
    """Whether all scalars are finite: a loss, and a gradient's norm, which is not finite if any element is not.

    >>> bool(all_finite(jnp.float32(1), jnp.float32(float("nan"))))
    False
    """
    return jnp.stack([jnp.isfinite(v) for v in values]).all()


def select(keep: jax.Array, new: Any, old: Any) -> Any:
    """The new tree if `keep`, else the old one, leaf by leaf; both have the same shardings."""
    return jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)
