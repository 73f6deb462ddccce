"""Moves tokens to their experts and back, in manual mode: by a gather, or by an exchange of what is needed.

Both take what the experts do as a function of rows sorted by expert, so they know nothing of products. Every device
along the exchange's mesh axes holds `count` experts, in the order of the axes, and some of the tokens.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.errors import UserError
from trellis.mesh.manual.ops import vary, varying_axes
from trellis.nn.moe.config import Dispatch
from trellis.nn.moe.dispatch import Carrier, as_returned, as_sent
from trellis.nn.moe.interleave import in_turn
from trellis.nn.moe.ragged import in_tiles
from trellis.nn.moe.rounds import Moving, in_rounds, one_round
from trellis.nn.moe.rows import Compute, local_experts, sort_by_expert, sum_rows, take_rows
from trellis.nn.moe.turns import Axes, Road, Turn
from trellis.program.said import filled_rows, loop_turns

# Tokens, each one's experts and how much these count: `x`, `ids` and `weights` of `exchange_experts`.
Tokens = tuple[jax.Array, jax.Array, jax.Array]


class ExpertsError(UserError):
    """Sizes, mesh axes or a backend with which tokens cannot be brought to their experts."""


def gather_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    compute: Compute,
    *,
    axes: Axes,
    count: int,
    tokens: Axes | None = None,
    dispatch: Dispatch | None = None,
    gathers: bool = False,
) -> jax.Array:
    """Every device gets all tokens, computes what its own experts make of them, and the sums are scattered back.

    It takes an all-gather and a reduce-scatter of all tokens, whatever their experts.

    Args:
        x: `tokens embed`, this device's.
        ids: `i32["tokens choices"]`, experts numbered over all devices; larger numbers mean none.
        weights: `f32["tokens choices"]`.
        compute: what this device's experts do to rows sorted by expert, `compute(rows, sizes, weights)`.
        axes: the mesh axes that slice experts.
        count: how many experts each device has.
        tokens: those of the axes that slice tokens too; all if not given. Along the others all devices hold the same
            tokens, and the result is each device's part of the sum.
        dispatch: the numbers in which tokens, and gradients of the sums, are gathered; None for their own.
        gathers: as in `local_experts`.

    Returns:
        `tokens embed`.

    Raises:
        ExpertsError: outside of manual mode, or the mesh has no such axis.
    """
    check_axes(axes, "gather_experts")
    tokens = axes if tokens is None else tokens
    x, ids, weights = (vary(a, axes) for a in (x, ids, weights))
    gather = lambda a, _=None: lax.all_gather(a, tokens, axis=0, tiled=True)
    scatter = lambda made, _: lax.psum_scatter(made, tokens, scatter_dimension=0, tiled=True)
    carrier = Carrier(gather, scatter, dispatch)
    if tokens:
        x, ids, weights = carrier.there(x, None), gather(ids), gather(weights)
    else:
        x = as_sent(x, dispatch)
    first = lax.axis_index(axes) * count

    def filling(*given):
        with filled_rows(ids.size // lax.axis_size(axes), ids.size):
            return compute(*given)

    made = local_experts(x, ids - first, weights, filling, count=count, gathers=gathers)
    return carrier.back(made, None) if tokens else as_returned(made, dispatch)


def exchange_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    compute: Compute,
    *,
    axes: Axes,
    count: int,
    ragged: bool,
    slack: float,
    dispatch: Dispatch | None = None,
) -> jax.Array:
    """Every token goes to the devices of its experts, and their results come back.

    No token is dropped, and no buffer has room for the case that all tokens choose one device. A buffer has room for
    `slack` times the rows of an even load. What does not fit goes in further rounds, as many as the fullest device
    needs; usually there are none, and then they cost nothing. A further round is computed again in the backward pass,
    so that it needs memory only while it runs.

    An expert knows how much each choice of it counts (a gather of one number for each choice), and weighs its results
    itself. So the backward pass needs no result again, neither an expert's last product nor the way back.

    With `ragged` only rows with a token travel (`jax.lax.ragged_all_to_all`), and a device's buffer is shared by all
    senders. Without it, for backends that have no such collective, each pair of devices exchanges a slot of the same
    size, filled or not, by a plain all-to-all; the fullest pair then determines the number of rounds.

    Args:
        x: `tokens embed`, this device's.
        ids: `i32["tokens choices"]`, experts numbered over all devices; larger numbers mean none.
        weights: `f32["tokens choices"]`.
        compute: what this device's experts do to rows sorted by expert, `compute(rows, sizes, weights)`.
        axes: the mesh axes that slice experts and tokens.
        count: how many experts each device has.
        ragged: whether only rows with a token travel.
        slack: a buffer's room, as a multiple of an even load.
        dispatch: the numbers in which tokens, and gradients of what comes back, go to experts; None for their own.

    Returns:
        `tokens embed`.

    Raises:
        ExpertsError: outside of manual mode, the mesh has no such axis, or there is no slack.
    """
    how = dict(axes=axes, count=count, ragged=ragged, slack=slack, dispatch=dispatch)
    return exchange_each([(x, ids, weights)], compute, **how)[0]


def exchange_each(
    given: Sequence[Tokens],
    compute: Compute,
    *,
    axes: Axes,
    count: int,
    ragged: bool,
    slack: float,
    dispatch: Dispatch | None = None,
    gathers: bool = False,
) -> list[jax.Array]:
    """`exchange_experts` for several parts of a device's tokens, whose exchanges follow each other (`in_turn`).

    Args:
        given: `x`, `ids` and `weights` of each, all of the same sizes.
        compute, axes, count, ragged, slack, dispatch: as there.
        gathers: whether `compute(x, sizes, weights, taken)` takes its rows itself from those that arrived, and returns
            results in their places.
    """
    given, varying = enter(given, axes, slack, "exchange_experts")
    (tokens, choices), devices = given[0][1].shape, lax.axis_size(axes)
    pairs = tokens * choices
    # The most that one device can be sent: a token's experts are all different.
    worst = devices * tokens * min(choices, count)
    room = min(worst, -(-math.ceil(slack * pairs) // devices) * devices)
    road = Road(axes, room, ragged, even=pairs, sorts=not gathers)
    carrier = Carrier(road.bring, lambda made, at: road.leave(made, at, pairs), dispatch, ragged)

    def packing(given, ids):
        x, weights = given
        known = pack(weights, ids, axes=axes, count=count, room=pairs)
        return (take_rows(x, known.tokens, known.copies), known.counted), known[1:]

    def filling(*given):
        with filled_rows(pairs, room):
            return compute(*given)

    packed = in_turn(
        packing, [((in_tiles(x) if ragged else x, weights), ids) for x, ids, weights in given], all_wait=True
    )

    def needed(counts):
        rounds = -(-counts.sum((0, 2)).max() // room) if ragged else -(-counts.sum(2).max() // (room // devices))
        return lax.pmax(rounds, varying)  # all devices of the mesh agree, whether or not they exchange rows

    parts = [Moving(rows, counted, counts, needed(counts)) for (rows, counted), (counts, *_) in packed]

    def arrive(given, known):
        at = road.known(*known, pairs)
        rows, counted = given
        return (carrier.there(rows, at), road.weigh(counted, at)), at

    leave = lambda made, at: (carrier.back(made, at), ())
    if worst > room:
        now = lambda counts, turn: Turn.of(counts, turn, axes, room, ragged).inside(pairs)
        with loop_turns(pairs, room, before=1, by_load=True):
            made = in_rounds(arrive, filling, leave, now, parts)
    else:
        made = one_round(arrive, filling, leave, parts)
    return [
        sum_rows(mine, copies, of).reshape(tokens, -1) for mine, (_, (_, of, copies)) in zip(made, packed, strict=True)
    ]


class Packed(NamedTuple):
    """The rows that leave for experts, sorted by expert, and what devices know of each other's.

    Attributes:
        counted: `f32["pairs"]`, how much the rows of all devices count.
        counts: `i32["from to count"]`, rows for each expert.
        tokens: `i32["rows"]`, which token each row is.
        copies: `i32["tokens choices"]`, where each token's rows are.
    """

    counted: jax.Array
    counts: jax.Array
    tokens: jax.Array
    copies: jax.Array


def pack(weights: jax.Array, ids: jax.Array, *, axes: Axes, count: int, room: int) -> Packed:
    """A row for each token and expert, and from all devices how much these count and how many there are.

    Args:
        weights: `f32["tokens choices"]`.
        ids: `i32["tokens choices"]`, experts numbered along `axes`; larger numbers mean none.
        axes: the mesh axes that slice the experts.
        count: how many experts each device has.
        room: rows of the result, at least those that have an expert.
    """
    devices, choices = lax.axis_size(axes), ids.shape[1]
    order, place, sizes = first_by_expert(ids, devices * count, room)
    tokens, copies = order // choices, place.reshape(ids.shape)
    counted = lax.all_gather(take_rows(weights.reshape(-1), order, place[:, None]), axes, axis=0, tiled=True)
    counts = lax.all_gather(sizes, axes, axis=0).reshape(devices, devices, count)
    return Packed(counted, counts, tokens, copies)


def first_by_expert(ids: jax.Array, count: int, room: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first `room` pairs in the order of `ids`, where each pair is among them, and how many each id has.

    Args:
        ids: `i32["tokens choices"]`; numbers from `count` on mean none.
        count: how many ids there are.
        room: pairs, at least those that have an id.

    Returns:
        `i32["room"]`, `i32["pairs"]` with `room` for nowhere, and `i32["count"]`.
    """
    order, place, sizes = sort_by_expert(ids.reshape(-1), count)
    return order[:room], jnp.where(place < jnp.sum(sizes), place, room), sizes


def check_axes(axes: Axes, where: str) -> None:
    """Checks that the axes are manual axes of the mesh.

    Raises:
        ExpertsError: they are not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if missing := [a for a in axes if a not in mesh.shape]:
        raise ExpertsError(
            "Expert parallelism must use axes of the mesh.",
            seen=f"'{missing[0]}' where the mesh has {', '.join(mesh.axis_names) or 'no axes'}",
            where=where,
            fix="use one of these, or add it to the mesh",
        )
    if missing := [a for a in axes if a not in mesh.manual_axes]:
        raise ExpertsError(
            "Tokens can be sent to their experts in manual mode only.",
            seen=f"'{missing[0]}', which is not manual here",
            where=where,
            fix="call it inside shard_map",
        )


def enter(given: Sequence[Tokens], axes: Axes, slack: float, where: str) -> tuple[list[Tokens], Axes]:
    """An exchange's inputs, all varying along the mesh axes along which any of them does; and these axes.

    Raises:
        ExpertsError: outside of manual mode, the mesh has no such axis, or there is no slack.
    """
    check_axes(axes, where)
    if slack <= 0:
        raise ExpertsError(
            "`slack` must be more than 0.",
            seen=f"slack={slack}",
            where=where,
            fix="use 1 for room for an even load, 1.5 for half as much more",
        )
    varying = tuple(sorted({*varying_axes(*(a for mine in given for a in mine)), *axes}))
    return [tuple(vary(a, varying) for a in mine) for mine in given], varying
