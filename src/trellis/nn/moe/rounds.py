"""Further rounds of an exchange, which cost nothing if none is needed.

A round is a function of rows, and of what experts compute with. The first is an ordinary part of the program, so that
rematerialization sees what it keeps. The others stand in a loop, which rarely runs: forward it starts from the first's
result, backward from the first's gradients, so nothing is added or set to zero if there are no others.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.linear import linear
from trellis.mesh.manual.ops import vary, varying_axes
from trellis.nn.moe.interleave import Stage, in_turn


class Moving(NamedTuple):
    """Rows that move in rounds.

    Attributes:
        rows: `rows ...`.
        counted: `f32["..."]`, how much they count.
        counts: integers, how many there are.
        needed: `i32[""]`, how many rounds, the same on all devices.
        first: what the first round gets instead of `counts`, if that differs.
    """

    rows: jax.Array
    counted: jax.Array
    counts: Any
    needed: jax.Array
    first: Any = None


def one_round(arrive: Stage, compute: Callable, leave: Stage, parts: Sequence[Moving]) -> list[jax.Array]:
    """Experts' results for the rows of a round, for each part; places of rows that do not move hold anything.

    Args:
        arrive: from rows and how much they count, with `counts` and the round's number, to those that arrive here, with
            their `sizes`, what is `taken` of them, and whatever else `leave` asks for.
        compute: what this device's experts do to them, `compute(rows, sizes, weights, *taken)`.
        leave: brings results to where the rows came from.
        parts: what moves.
    """
    return _round(arrive, [compute] * len(parts), leave, parts, 0)


def in_rounds(
    arrive: Stage, compute: Callable, leave: Stage, now: Callable, parts: Sequence[Moving]
) -> list[jax.Array]:
    """The result of all rounds of each part: for each row, that of the round in which it moved.

    Args:
        arrive, compute, leave, parts: as in `one_round`.
        now: `now(counts, turn)`, which rows move in a turn, `bool["rows"]`.
    """
    rows, counted, counts, *_ = parts[0]
    known = lambda rows, counted: arrive((rows, counted), (counts, jnp.int32(0)))
    (given, weights), at = jax.eval_shape(known, rows, counted)
    pure, held = jax.closure_convert(compute, given, at.sizes, weights, *at.taken)
    computing = lambda held: lambda *given: pure(*given, *held)

    def one(rows, counted, counts, turn, held):
        (made,) = _round(arrive, [computing(held)], leave, [Moving(rows, counted, counts, turn)], turn)
        return made

    like = jax.eval_shape(one, rows, counted, counts, jnp.int32(0), held)
    shared = [_shared(one, now, (like.shape, like.dtype), *part[:4], held) for part in parts]
    parts = [part._replace(rows=rows, counted=counted) for part, (rows, counted, *_) in zip(parts, shared, strict=True)]
    made = _round(arrive, [computing(held) for *_, held, _ in shared], leave, parts, 0)
    fixed = lax.stop_gradient([part[:3] for part in shared])
    return [
        _further(one, now, mine, relayed, rows, counted, part.counts, part.needed, held)
        for mine, part, (rows, counted, held), (*_, relayed) in zip(made, parts, fixed, shared, strict=True)
    ]


def _round(arrive: Stage, computes: Sequence[Callable], leave: Stage, parts: Sequence[Moving], turn):
    turn = jnp.int32(turn)
    known = [(part.counts if part.first is None else part.first, turn) for part in parts]
    given = [((part.rows, part.counted), mine) for part, mine in zip(parts, known, strict=True)]
    arrived = in_turn(arrive, given, all_wait=True)
    made = [
        (compute(rows, at.sizes, weights, *at.taken), at)
        for compute, ((rows, weights), at) in zip(computes, arrived, strict=True)
    ]
    return [out for out, _ in in_turn(leave, made)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further(one, now, made, relayed, rows, counted, counts, needed, held):
    """`made`, with the rows of later rounds replaced; the gradient is relayed to `_shared`."""

    def body(turn, total):
        return _chosen(now(counts, turn), one(rows, counted, counts, turn, held), total)

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
    return _mapped_alike((rows, counted, held, vary(jnp.zeros(*like), varying_axes(rows))))


def _mapped_alike(tree):
    """The same arrays, of which a `vmap` around maps all if it maps one.

    Results of a `jax.custom_vjp` that a `vmap` does not map have one gradient, the sum of all turns'. Where its rule
    adds this to what is mapped, JAX (0.10.2 to 0.12.0) counts it once for each turn.
    """
    leaves, structure = jax.tree.flatten(tree)
    again = lambda _, arrays, dims: _mapped_alike(jax.vmap(lambda *a: a, in_axes=tuple(dims[1]))(*arrays))
    same = linear(lambda _, arrays: arrays, lambda _, gradients: gradients, like=leaves, mapped=again)
    return structure.unflatten(same((), leaves))


def _shared_forward(one, now, like, *given):
    return _shared(one, now, like, *given), given


def _shared_backward(one, now, like, kept, d):
    rows, counted, counts, needed, held = kept
    *first, d_made = d

    def body(turn, total):
        _, pull = jax.vjp(lambda rows, counted, held: one(rows, counted, counts, turn, held), rows, counted, held)
        d_rows, *more = pull(d_made)
        return [_chosen(now(counts, turn), d_rows, total[0]), *jax.tree.map(jnp.add, total[1:], more)]

    d_rows, d_counted, d_held = lax.fori_loop(jnp.int32(1), needed, body, first)
    return d_rows, d_counted, None, None, d_held


_shared.defvjp(_shared_forward, _shared_backward)


def _chosen(moves, new, old):
    return jnp.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, old)
