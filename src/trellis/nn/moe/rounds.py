"""Further rounds of an exchange, which cost nothing where none is needed.

A round is a function of rows, and of what experts compute with. The first is an ordinary part of the program, so that
rematerialization sees what it keeps. The others stand in a loop, which rarely runs: forward it starts from the first's
result, backward from the first's gradients, so that nothing is added or set to zero where there are no others.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes


def in_rounds(one: Callable, now: Callable, rows, counted, counts, needed) -> jax.Array:
    """The result of all rounds: for each row, that of the round in which it moved.

    Args:
        one: `one(rows, counted, counts, turn)`, a round: rows in the places of those that move, anything in others.
        now: `now(counts, turn)`, which rows move in a turn, `bool["rows"]`.
        rows: `rows ...`.
        counted: `f32["..."]`, what they count.
        counts: integers, how many there are.
        needed: `i32[""]`, the same on all devices.
    """
    pure, held = jax.closure_convert(one, rows, counted, counts, jnp.int32(1))
    like = jax.eval_shape(pure, rows, counted, counts, jnp.int32(0), *held)
    rows, counted, held, relayed = _shared(pure, now, (like.shape, like.dtype), rows, counted, counts, needed, held)
    made = pure(rows, counted, counts, jnp.int32(0), *held)
    fixed = jax.tree.map(lax.stop_gradient, (rows, counted, held))
    return _further(pure, now, made, relayed, *fixed[:2], counts, needed, fixed[2])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further(one, now, made, relayed, rows, counted, counts, needed, held):
    """`made`, with the rows of later rounds replaced; the gradient is relayed to `_shared`."""

    def body(turn, total):
        return _chosen(now(counts, turn), one(rows, counted, counts, turn, *held), total)

    return lax.fori_loop(jnp.int32(1), needed, body, made)


def _further_forward(one, now, *given):
    return _further(one, now, *given), None


def _further_backward(one, now, kept, d):
    return d, d, None, None, None, None, None


_further.defvjp(_further_forward, _further_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _shared(one, now, like, rows, counted, counts, needed, held):
    """What all rounds read, and a value of the shape and dtype `like` whose gradient is that of their result.

    Its backward pass runs after the first round's, and runs the other rounds from the gradients of the first.
    """
    return rows, counted, held, vary(jnp.zeros(*like), varying_axes(rows))


def _shared_forward(one, now, like, *given):
    return _shared(one, now, like, *given), given


def _shared_backward(one, now, like, kept, d):
    rows, counted, counts, needed, held = kept
    *first, d_made = d

    def body(turn, total):
        _, pull = jax.vjp(lambda rows, counted, held: one(rows, counted, counts, turn, *held), rows, counted, held)
        d_rows, *more = pull(d_made)
        return [_chosen(now(counts, turn), d_rows, total[0]), *jax.tree.map(jnp.add, total[1:], more)]

    d_rows, d_counted, d_held = lax.fori_loop(jnp.int32(1), needed, body, first)
    return d_rows, d_counted, None, None, d_held


_shared.defvjp(_shared_forward, _shared_backward)


def _chosen(moves, new, old):
    return jnp.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, old)
