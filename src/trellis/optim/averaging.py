"""An exponential moving average of parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from trellis.optim.updated import updated


def average(ema: Any, params: Any, decay: float, step: jax.Array | int, key: jax.Array | None = None) -> Any:
    """The average after one more step.

    Early on, when `decay` would keep the random initial parameters, it is at most (1 + step) / (10 + step).

    Args:
        ema: the average so far, a tree like `params`; the parameters themselves at the start.
        params: the parameters after this step.
        decay: the part of the average that each step keeps.
        step: steps before this one.
        key: rounds averages that are kept in types below float32 at random, without bias. None rounds them to the
            nearest number, which for a `decay` near 1 is the old one: such an average never changes.
    """
    step = jnp.asarray(step, jnp.float32)
    kept = jnp.minimum(jnp.float32(decay), (1 + step) / (10 + step))
    change = jax.tree.map(lambda e, p: (1 - kept) * (p.astype(jnp.float32) - e.astype(jnp.float32)), ema, params)
    return updated(ema, change, key)
