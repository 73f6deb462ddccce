"""Learning rates over a run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from trellis.optim.config import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule, check_fits, check_peak


def learning_rates(schedule: Schedule, peak: float, steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """The learning rate of each step, counted from 0.

    The first step has the first part of the warmup, not 0; the last step of the run has the final learning rate.

    >>> rates = learning_rates(Linear(warmup_steps=2, final_fraction=0.5), peak=1.0, steps=4)
    >>> [float(rates(step)) for step in range(4)]
    [0.5, 1.0, 0.75, 0.5]

    Args:
        schedule: its shape.
        peak: the largest learning rate.
        steps: steps of the run.

    Returns:
        A function of the step's number that can be traced: "" -> float32 "".

    Raises:
        UserError: the schedule's warmup and decay take more than `steps`, or the peak is not positive.
    """
    check_peak(peak)
    check_fits(schedule, steps)
    warmup = schedule.warmup_steps
    parts = [optax.linear_schedule(0.0, peak, max(warmup, 1)), *_after_warmup(schedule, peak, steps)]
    starts = [warmup, *([steps - schedule.decay_steps] if isinstance(schedule, WSD) else [])]
    joined = optax.join_schedules(parts, starts)
    return lambda step: jnp.asarray(joined(jnp.asarray(step, jnp.float32) + 1), jnp.float32)


def _after_warmup(schedule: Schedule, peak: float, steps: int) -> list[optax.Schedule]:
    """What follows the warmup; each part counts its own steps from 0."""
    left = max(steps - schedule.warmup_steps, 1)  # all steps may be of the warmup
    match schedule:
        case Constant():
            return [optax.constant_schedule(peak)]
        case Linear(final_fraction=final):
            return [_line(peak, final * peak, left)]
        case Cosine(final_fraction=final):
            return [optax.cosine_decay_schedule(peak, left, alpha=final)]
        case WSD(decay_steps=decay, final_fraction=final):
            return [optax.constant_schedule(peak), _line(peak, final * peak, decay)]
        case InverseSqrt(warmup_steps=warmup):
            return [lambda step: peak * jnp.sqrt(warmup / jnp.maximum(step + warmup, 1))]


def _line(first: float, last: float, steps: int) -> optax.Schedule:
    """A straight line that ends exactly at `last`: rounded, Optax's may go past it, below 0 even."""
    line = optax.linear_schedule(first, last, steps)
    return lambda step: jnp.where(jnp.greater_equal(step, steps), jnp.float32(last), line(step))
