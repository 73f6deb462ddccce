"""Tokens to the experts that they chose and back, in manual mode: by a gather, or by an exchange of what is needed.

Both take what the experts do as a function of rows sorted by expert, so they know nothing of products. Every device
along the exchange's mesh axes holds `count` experts, in the order of the axes, and some of the tokens.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.errors import UserError
from trellis.mesh.manual.ops import vary, varying_axes
from trellis.nn.moe.ragged import ragged_all_to_all
from trellis.nn.moe.rows import Compute, combine, local_experts, sort_by_expert, take_rows
from trellis.program.said import filled_rows, loop_turns

Axes = tuple[str, ...]


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
) -> jax.Array:
    """Every device gets all tokens, computes what its own experts make of them, and the sums are scattered back.

    An all-gather and a reduce-scatter of all tokens, whoever chose whom.

    Args:
        x: `tokens embed`, this device's.
        ids: `i32["tokens choices"]`, experts counted over all devices; larger numbers are nobody's.
        weights: `f32["tokens choices"]`.
        compute: what this device's experts do to rows sorted by expert, `compute(rows, sizes)`.
        axes: the mesh axes that slice experts.
        count: how many experts each device has.
        tokens: those of the axes that slice tokens too; all if not given. Along the others all devices hold the same
            tokens, and the result is each device's part of the sum.

    Returns:
        `tokens embed`.

    Raises:
        ExpertsError: outside of manual mode, or the mesh has no such axis.
    """
    check_axes(axes, "gather_experts")
    tokens = axes if tokens is None else tokens
    x, ids, weights = (vary(a, axes) for a in (x, ids, weights))
    if tokens:
        x, ids, weights = (lax.all_gather(a, tokens, axis=0, tiled=True) for a in (x, ids, weights))
    first = lax.axis_index(axes) * count

    def filling(rows, sizes):
        with filled_rows(ids.size // lax.axis_size(axes), ids.size):
            return compute(rows, sizes)

    made = local_experts(x, ids - first, weights, filling, count=count)
    return lax.psum_scatter(made, tokens, scatter_dimension=0, tiled=True) if tokens else made


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
) -> jax.Array:
    """Every token goes to the devices of its experts, and what they made of it comes back.

    No token is dropped, and no buffer has room for the case that all tokens choose one device. A buffer has room for
    `slack` times the rows of an even load. What does not fit goes in further rounds, as many as the fullest device
    needs; usually there are none. A further round is computed again in the backward pass, so that it needs memory
    only while it runs.

    With `ragged` only rows with a token travel (`jax.lax.ragged_all_to_all`), and a device's buffer is shared by all
    senders. Without it, for backends that have no such collective, each pair of devices exchanges a slot of the same
    size, filled or not, by a plain all-to-all: then the fullest pair says how many rounds there are.

    Args:
        x: `tokens embed`, this device's.
        ids: `i32["tokens choices"]`, experts counted over all devices; larger numbers are nobody's.
        weights: `f32["tokens choices"]`.
        compute: what this device's experts do to rows sorted by expert, `compute(rows, sizes)`.
        axes: the mesh axes that slice experts and tokens.
        count: how many experts each device has.
        ragged: whether only rows with a token travel.
        slack: a buffer's room, in rows of an even load.

    Returns:
        `tokens embed`.

    Raises:
        ExpertsError: outside of manual mode, the mesh has no such axis, or there is no slack.
    """
    check_axes(axes, "exchange_experts")
    if slack <= 0:
        raise ExpertsError(
            "A buffer has room for some rows.",
            seen=f"slack={slack}",
            where="exchange_experts",
            fix="use 1 for the rows of an even load, 1.5 for half as many more",
        )
    tokens, choices = ids.shape
    pairs, devices = tokens * choices, lax.axis_size(axes)
    varying = tuple(sorted({*varying_axes(x, ids, weights), *axes}))
    x, ids, weights = (vary(a, varying) for a in (x, ids, weights))
    order, place, sizes = sort_by_expert(ids.reshape(-1), devices * count)
    real = jnp.sum(sizes)
    order = jnp.where(jnp.arange(pairs) < real, order, pairs)
    place = jnp.where(place < real, place, pairs)
    rows = take_rows(x, jnp.where(order < pairs, order // choices, tokens), place.reshape(tokens, choices))
    # From every device, how many rows it has for every expert.
    counts = lax.all_gather(sizes, axes, axis=0).reshape(devices, devices, count)

    # The most that one device can be sent: a token's experts are all different.
    worst = devices * tokens * min(choices, count)
    room = min(worst, -(-math.ceil(slack * pairs) // devices) * devices)
    if ragged:
        needed = -(-counts.sum((0, 2)).max() // room)
    else:
        needed = -(-counts.sum(2).max() // (room // devices))
    needed = lax.pmax(needed, varying)  # all devices of the mesh agree, whether or not they exchange rows

    def filling(rows, sizes):
        with filled_rows(pairs, room):
            return compute(rows, sizes)

    def one(rows, counts, turn):
        return _round(rows, counts, turn, filling, axes=axes, room=room, ragged=ragged)

    made = one(rows, counts, jnp.int32(0))
    if worst > room:
        pure, held = jax.closure_convert(one, rows, counts, jnp.int32(1))
        with loop_turns(pairs, room, before=1, by_load=True):
            made = _further(pure, made, rows, counts, needed, held)
    return combine(made, weights, place.reshape(tokens, choices), order)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further(one, made, rows, counts, needed, held):
    """`made` and what the rounds from the second on make, as many as are needed; the backward pass makes it again.

    Args:
        one: `one(rows, counts, turn, *held)`, a round.
        made: `rows embed`, of the first round.
        rows, counts: of all rounds.
        needed: `i32[""]`, the same on all devices.
        held: what the experts compute with.
    """
    return lax.fori_loop(jnp.int32(1), needed, lambda turn, total: total + one(rows, counts, turn, *held), made)


def _further_forward(one, made, rows, counts, needed, held):
    return _further(one, made, rows, counts, needed, held), (rows, counts, needed, held)


def _further_backward(one, kept, d):
    rows, counts, needed, held = kept

    def body(turn, total):
        _, pull = jax.vjp(lambda rows, held: one(rows, counts, turn, *held), rows, held)
        return jax.tree.map(jnp.add, total, pull(d))

    none = lambda x: vary(jnp.zeros_like(x), varying_axes(x))
    d_rows, d_held = lax.fori_loop(jnp.int32(1), needed, body, jax.tree.map(none, (rows, held)))
    return d, d_rows, None, None, d_held


_further.defvjp(_further_forward, _further_backward)


def _round(rows, counts, turn, compute: Compute, *, axes: Axes, room: int, ragged: bool):
    """One turn of the exchange: the rows that have room now, at the places of `rows`; zeros at the others."""
    devices, _, count = counts.shape
    me = lax.axis_index(axes)
    sent = counts.sum(2)  # from, to
    # Where a sender's rows for a receiver begin among all that the receiver gets, and how many of them have room now.
    size = room if ragged else room // devices
    begins = jnp.cumsum(sent, 0) - sent if ragged else jnp.zeros_like(sent)
    start = jnp.clip(turn * size - begins, 0, sent)
    moved = jnp.clip((turn + 1) * size - begins, 0, sent) - start
    slot = jnp.arange(devices, dtype=jnp.int32)[:, None] * size
    lands = begins + start - turn * size if ragged else jnp.broadcast_to(slot, sent.shape)
    lands = jnp.clip(lands, 0, room)
    mine = jnp.cumsum(sent[me]) - sent[me] + start[me]  # where this device's rows for each receiver begin in `rows`

    if ragged:
        there = (mine, moved[me], lands[me], moved[:, me])
        back = (lands[:, me], moved[:, me], _from(axes, counts, start), moved[me])
        got = ragged_all_to_all(rows, room, there, back, axes)
    else:
        index, copies = _slots(mine, moved[me], size, rows.shape[0])
        got = lax.all_to_all(take_rows(rows, index, copies), axes, 0, 0, tiled=True)

    expert = _experts_of(counts[:, me], start[:, me], moved[:, me], lands[:, me], room)
    order, place, sizes = sort_by_expert(expert, count)
    made = compute(take_rows(got, order, place[:, None]), sizes)
    # Rows that nobody sent come out last, with no meaning.
    real = place < sizes.sum()
    made = take_rows(made, jnp.where(real, place, room), jnp.where(real[order], order, room)[:, None])
    if ragged:
        return ragged_all_to_all(made, rows.shape[0], back, there, axes)
    made = lax.all_to_all(made, axes, 0, 0, tiled=True)
    return take_rows(made, copies[:, 0], index[:, None])


def _from(axes: Axes, counts, start):
    """Where this device's results go to: the place of its rows from each sender among that sender's rows."""
    sent = counts.sum(2)
    begins = jnp.cumsum(sent, 1) - sent + start
    return begins[:, lax.axis_index(axes)]


def _slots(first, moved, size: int, rows: int):
    """Which row is in each place of the slots, and in which place each row is; `rows` and all places for none."""
    within = jnp.arange(size, dtype=jnp.int32)
    index = jnp.where(within[None] < moved[:, None], first[:, None] + within[None], rows).reshape(-1)
    number = jnp.arange(rows, dtype=jnp.int32)
    inside = (number[:, None] >= first[None]) & (number[:, None] < (first + moved)[None])
    to = jnp.argmax(inside, 1).astype(jnp.int32)
    places = jnp.where(inside.any(1), to * size + number - first[to], first.shape[0] * size)
    return index, places[:, None]


def _experts_of(counts, start, moved, lands, room: int):
    """The expert, counted on this device, of every place of its buffer; their number for places without a row.

    Args:
        counts: `i32["senders count"]`, rows for each of this device's experts, which come in this order.
        start: `i32["senders"]`, how many of these rows came in earlier rounds.
        moved: `i32["senders"]`, how many come now.
        lands: `i32["senders"]`, where.
        room: places in the buffer.
    """
    place = jnp.arange(room, dtype=jnp.int32)
    inside = (place[:, None] >= lands[None]) & (place[:, None] < (lands + moved)[None])
    sender = jnp.argmax(inside, 1)
    number = place - lands[sender] + start[sender]  # which of the sender's rows for this device
    expert = (number[:, None] >= jnp.cumsum(counts, 1)[sender]).sum(1, dtype=jnp.int32)
    return jnp.where(inside.any(1), expert, counts.shape[1])


def check_axes(axes: Axes, where: str) -> None:
    """The axes are manual axes of the mesh.

    Raises:
        ExpertsError: they are not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if missing := [a for a in axes if a not in mesh.shape]:
        raise ExpertsError(
            "Experts are sliced over axes of the mesh.",
            seen=f"'{missing[0]}' where the mesh has {', '.join(mesh.axis_names) or 'no axes'}",
            where=where,
            fix="use one of these, or add it to the mesh",
        )
    if missing := [a for a in axes if a not in mesh.manual_axes]:
        raise ExpertsError(
            "Tokens go to their experts in manual mode.",
            seen=f"'{missing[0]}', which is not manual here",
            where=where,
            fix="call it inside shard_map",
        )
