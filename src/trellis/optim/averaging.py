"""An exponential moving average of parameters."""

from typing import Any

import jax
import jax.numpy as jnp


def average(ema: Any, params: Any, decay: float, step: jax.Array | int) -> Any:
    """The average after one more step.

    Early on, when `decay` would keep the random initial parameters, it is at most (1 + step) / (10 + step).

    Args:
        ema: the average so far, a tree like `params`; the parameters themselves at the start.
        params: the parameters after this step.
        decay: what is kept of the average each step.
        step: steps before this one.
    """
    step = jnp.asarray(step, jnp.float32)
    kept = jnp.minimum(jnp.float32(decay), (1 + step) / (10 + step))
    return jax.tree.map(lambda e, p: e + (1 - kept).astype(e.dtype) * (p.astype(e.dtype) - e), ema, params)
