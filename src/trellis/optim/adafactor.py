"""Adafactor on named arrays: the second moments of each matrix as the sums of its rows and of its columns."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trellis.named import is_named
from trellis.named.reduce import without
from trellis.nn.parameters import Parameter, Role, parameters
from trellis.notation.state import state_of
from trellis.optim.config import Adafactor
from trellis.optim.groups import label, moved, sides, with_leaves

# Added to squares, so that a row of zeros has a root to divide by.
_EPSILON = 1e-30


class Factors(NamedTuple):
    """The second moments of a matrix: of all elements of each row, and of each column, the moving sum of squares."""

    rows: Any
    columns: Any


class FactoredState(NamedTuple):
    """Steps taken, and a tree like the parameters: `Factors` of each stack of matrices, else a square per element."""

    count: jax.Array
    squares: Any


def adafactor(config: Adafactor, vocab_size: int | None = None) -> optax.GradientTransformation:
    """Adafactor's direction, without the learning rate and weight decay.

    A matrix has the sides that it has for Muon (`trellis.optim.groups.sides`); if there are more, the first and all
    else. What has several side by side (`layers`, `experts`, `qkv`) is treated matrix by matrix, or vector by vector:
    each has second moments of its own, and its update is clipped by its own root mean square. Vectors are not factored.

    The state keeps the names of the axes that are left. Sums, unlike means, are the same however a vocabulary is
    padded, because padding has no gradient; so a state can be resumed with another padding.

    Args:
        config: the rule.
        vocab_size: the true size of a vocabulary that is padded.

    Moves: all-reduces of sums over sliced axes.

    Source:
        Shazeer and Stern, 2018, arXiv:1804.04235, algorithms 4 and 5. Of one plain matrix the updates are those of
        `optax.scale_by_factored_rms` and `optax.clip_by_block_rms`.
    """
    b1, clip = config.beta1, config.clip_update_rms
    return optax.chain(
        _by_factors(config.decay_exponent, config.min_factored_size, vocab_size),
        optax.identity() if clip is None else _clip_each(clip, vocab_size),
        optax.identity() if b1 is None else optax.ema(b1, debias=False),
    )


def _by_factors(exponent: float, least: int, vocab_size: int | None) -> optax.GradientTransformation:
    """Divides gradients by the roots of their second moments."""

    def fresh(p: Parameter) -> Any:
        like = lambda gone: jax.eval_shape(lambda x: jnp.sum(x.real, gone), _array(p))
        zeros = lambda gone: _rewrap(p, jnp.zeros_like(like(gone)), gone)
        found = _matrix(p, least, vocab_size)
        return zeros(()) if found is None else Factors(zeros(found[1]), zeros(found[0]))

    def divided(p: Parameter, kept: Any, decay: jax.Array) -> tuple[Any, Any]:
        gradient = _array(p)
        squares = _squared(gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))) + _EPSILON

        def average(before: Any, gone: tuple[int, ...]) -> tuple[jax.Array, Any]:
            old = before.array if is_named(before) else before
            now = jnp.sum(squares, gone)
            # A layout may slice what is left along the mesh axis that sliced what is gone.
            new = decay * moved(old, state_of(now).axes) + (1.0 - decay) * now
            return jnp.expand_dims(new, gone), _rewrap(p, moved(new.astype(old.dtype), state_of(old).axes), gone)

        if not isinstance(kept, Factors):
            new, kept = average(kept, ())
            update = gradient * new**-0.5
        else:
            first, rest = _matrix(p, least, vocab_size)
            rows, kept_rows = average(kept.rows, rest)
            columns, kept_columns = average(kept.columns, first)
            kept = Factors(kept_rows, kept_columns)
            # rows * columns / sum(rows), neither of whose parts is too small for float32; the padding of rows cancels.
            mean = jnp.mean(rows, first, keepdims=True)
            # One after the other: XLA squares the scale of a constant gradient, which both together are too large for.
            update = gradient * (rows / mean) ** -0.5
            update = update * (columns / math.prod(gradient.shape[a] for a in first)) ** -0.5
        return _rewrap(p, update.astype(gradient.dtype)), kept

    def init(params: Any) -> FactoredState:
        return FactoredState(jnp.int32(0), with_leaves(params, map(fresh, parameters(params))))

    def update(updates: Any, state: FactoredState, params: Any = None) -> tuple[Any, FactoredState]:
        count = optax.safe_increment(state.count)
        decay = 1.0 - count.astype(jnp.float32) ** -exponent
        kept = jax.tree.leaves(state.squares, is_leaf=lambda x: isinstance(x, Factors) or is_named(x))
        done = [divided(p, x, decay) for p, x in zip(parameters(updates), kept, strict=True)]
        new, kept = (with_leaves(updates, [each[i] for each in done]) for i in range(2))
        return new, FactoredState(count, kept)

    return optax.GradientTransformation(init, update)


def _clip_each(threshold: float, vocab_size: int | None) -> optax.GradientTransformation:
    """Scales each matrix and each vector down to a root mean square, which is that of its real rows."""

    def one(p: Parameter) -> jax.Array:
        update, axes = _array(p), tuple(a for side in sides(p) for a in side)
        # Padding has no gradient, so it adds nothing to the sum.
        mean = jnp.sum(_squared(update), axes, keepdims=True) / _length(p, axes, vocab_size)
        return update / jnp.maximum(1.0, jnp.sqrt(mean) / threshold)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return label(updates, one), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _squared(x: jax.Array) -> jax.Array:
    """The squares of magnitudes, which of complex numbers are real."""
    return jnp.square(jnp.abs(x) if jnp.iscomplexobj(x) else x)


def _matrix(p: Parameter, least: int, vocab_size: int | None) -> Any:
    """The axes of the two sides by which a parameter is factored, or None."""
    first, *others = sides(p) or ((),)
    rest = tuple(a for side in others for a in side)
    short = min(_length(p, side, vocab_size) for side in (first, rest)) < least
    return None if p.role not in (Role.WEIGHT, Role.TABLE) or not rest or short else (first, rest)


def _length(p: Parameter, axes: tuple[int, ...], vocab_size: int | None) -> int:
    """How many elements there are along axes, without a vocabulary's padding."""
    real = {"vocab": vocab_size} if vocab_size else {}
    shape = [real.get(name, size) for name, size in p.leaf.shape.items()] if is_named(p.leaf) else p.leaf.shape
    return math.prod(shape[a] for a in axes)


def _array(p: Parameter) -> Any:
    return p.leaf.array if is_named(p.leaf) else p.leaf


def _rewrap(p: Parameter, array: Any, gone: tuple[int, ...] = ()) -> Any:
    """An array with the names of a parameter, without some of its axes."""
    return without(p.leaf, array, {p.names[a] for a in gone}) if is_named(p.leaf) else array
