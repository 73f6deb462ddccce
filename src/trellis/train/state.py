"""The training state: everything that a step changes, and nothing else."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from trellis.named import NamedArray
from trellis.named.jit import named_jit
from trellis.nn import Precision
from trellis.train.scales import no_scales


class TrainState(eqx.Module):
    """What a checkpoint holds.

    Attributes:
        step: `i32[""]`, the number of steps made.
        model: parameters, in the type they are kept in.
        optimizer: the optimizer's state.
        average: the exponential moving average of the parameters, or None.
        key: the random key of the run; a step's key is made from it and the step.
        scales: if scales are delayed, the largest elements of earlier steps, by `trellis.train.scales`; else empty.
        argument_kinds: what its fields are among the arguments of a step, for `trellis.program.trace`.
    """

    argument_kinds: ClassVar = {
        "model": "parameters",
        "optimizer": "optimizer",
        "average": "optimizer",
        "scales": "parameters",
    }

    step: jax.Array
    model: eqx.Module
    optimizer: optax.OptState
    average: eqx.Module | None
    key: jax.Array
    scales: dict[str, NamedArray] = eqx.field(default_factory=dict)


def new_state(
    init: Callable,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    average: bool = False,
    precision: Precision | None = None,
) -> TrainState:
    """The first state, with each array made where it rests under the layout in force.

    Args:
        init: makes the model from a key.
        optimizer: the update rule.
        seed: the seed of the parameters and of everything random in the run.
        average: whether a moving average of the parameters is kept.
        precision: says for which products scales are kept; None for none.
    """

    def make(key) -> TrainState:
        model_key, run_key = jax.random.split(key)
        model = init(model_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            model=model,
            optimizer=optimizer.init(model),
            average=jax.tree.map(jnp.copy, model) if average else None,
            key=run_key,
            scales=no_scales(model, precision) if precision else {},
        )

    return named_jit(make)(jax.random.key(seed))
