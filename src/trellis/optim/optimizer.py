"""Makes one Optax transformation of the configuration: clip, direction, weight decay, learning rate."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trellis.errors import UserError
from trellis.named import is_named
from trellis.nn.parameters import Parameter, parameters
from trellis.notation import typeof
from trellis.notation.state import state_of
from trellis.optim.adafactor import adafactor
from trellis.optim.config import Adafactor, AdamW, Lion, Muon, Optimizer, Schedule, check_clip_norm
from trellis.optim.groups import check_words, decayed
from trellis.optim.muon import muon
from trellis.optim.narrow import in_eight_bits
from trellis.optim.schedules import learning_rates


class RateState(NamedTuple):
    """Steps taken, and the learning rate of the last one."""

    count: jax.Array
    learning_rate: jax.Array


def make_optimizer(
    config: Optimizer,
    schedule: Schedule,
    *,
    steps: int,
    clip_norm: float | None = None,
    exclude: Sequence[str] = (),
    narrow: Callable[[Parameter], bool] | None = None,
    vocab_size: int | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a run, for a tree of plain or named arrays under any sharding.

    What it keeps has the types of the parameters, but float32 for those in float16: squares of gradients below 2e-4
    would be zero in it. Such gradients are computed with in float32, too.

    Args:
        config: the update rule.
        schedule: the learning rate over the run, relative to `config.learning_rate`.
        steps: steps of the run.
        clip_norm: gradients with a larger norm over all parameters are scaled down to it.
        exclude: parameters with one of these in their path or among their axes are not decayed.
        narrow: chooses the parameters whose moving averages are kept in eight bits; None for none.
        vocab_size: the true size of a vocabulary that is padded.

    Returns:
        An Optax transformation. `learning_rate` reads the last step's learning rate from its state.

    Raises:
        UserError: the schedule does not fit into the steps, `clip_norm` is not positive, or `exclude` is a text or has
            an empty one; by `init`, if a parameter is not an array of floats; by `update` in a manual function, if a
            rule that compares elements gets slices.
    """
    check_words(exclude)
    check_clip_norm(clip_norm)
    direction = _direction(config, vocab_size)
    rates = learning_rates(schedule, config.learning_rate, steps)
    rule = optax.chain(
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
        direction if narrow is None else in_eight_bits(direction, narrow),
        optax.add_decayed_weights(config.weight_decay, lambda params: decayed(params, exclude)),
        _scale_by(rates),
    )

    def init(params: Any) -> Any:
        for p in parameters(params):
            _check_floats(p)
        return rule.init(_without_float16(params))

    by_element = isinstance(config, AdamW | Lion) and clip_norm is None and narrow is None

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        for p in () if by_element else parameters(updates):
            _check_whole(p)
        # Optax mixes integer counts with floats, which JAX refuses under strict promotion.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            new, state = rule.update(_without_float16(updates), state, _without_float16(params))
        return jax.tree.map(lambda u, p: u.astype(p.dtype) if _is_float16(p) else u, new, params), state

    return optax.GradientTransformation(init, update)


def _is_float16(x: Any) -> bool:
    return x.dtype == jnp.float16


def _without_float16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if _is_float16(x) else x, tree)


def _check_floats(p: Parameter) -> None:
    """Refuses a parameter that no gradient moves."""
    is_array = hasattr(p.leaf, "dtype")
    if not is_array or not jnp.issubdtype(p.leaf.dtype, jnp.inexact):
        raise UserError(
            "The parameters of an optimizer are arrays of floats.",
            seen=f"{typeof(p.leaf) if is_array else repr(p.leaf)} at `{p.path}`",
            where="the tree given to `init`",
            fix="make a number an array of floats; leave out what is not learned, with None in its place, "
            "as in eqx.filter(model, eqx.is_inexact_array)",
        )


def _check_whole(p: Parameter) -> None:
    """Refuses what is one device's slice in a manual function: a norm or a matrix of it is not that of the whole."""
    if varying := state_of(p.leaf.array if is_named(p.leaf) else p.leaf).varying:
        raise UserError(
            "Muon, Adafactor, clipping by a norm and averages in eight bits need whole arrays.",
            seen=f"one device's slice along {', '.join(sorted(varying))} of `{p.path}`",
            where="the update in a manual function",
            fix="update outside of it, where types say what is sliced; AdamW and Lion without clip_norm go by element",
        )


def _direction(config: Optimizer, vocab_size: int | None) -> optax.GradientTransformation:
    match config:
        case AdamW(beta1=b1, beta2=b2, epsilon=epsilon):
            return optax.scale_by_adam(b1, b2, epsilon)
        case Lion(beta1=b1, beta2=b2):
            return optax.scale_by_lion(b1, b2)
        case Muon():
            return muon(config)
        case Adafactor():
            return adafactor(config, vocab_size)


def _scale_by(rates: optax.Schedule) -> optax.GradientTransformation:
    """Multiplies updates by minus the learning rate, which stays in the state to be read."""

    def update_fn(updates: Any, state: RateState, params: Any = None) -> tuple[Any, RateState]:
        rate = rates(state.count)
        updates = jax.tree.map(lambda u: u * -rate.astype(u.dtype), updates)
        return updates, RateState(optax.safe_increment(state.count), rate)

    return optax.GradientTransformation(lambda params: RateState(jnp.int32(0), jnp.float32(0)), update_fn)


def learning_rate(state: Any) -> jax.Array:
    """The learning rate of the last step, from an optimizer's state."""
    return optax.tree.get(state, "learning_rate")


def left_out(new: Any, old: Any) -> Any:
    """An optimizer's state after a step that changes nothing: the old one, except that the schedule counts the step.

    Args:
        new: the state with the step.
        old: the state before it.
    """
    is_rate = lambda x: isinstance(x, RateState)
    return jax.tree.map(lambda n, o: n if is_rate(n) else o, new, old, is_leaf=is_rate)
