"""Moves tokens to their experts in two steps: once to each part of the first mesh axis, and on from there.

If the first axis crosses hosts and the others lie inside one, a token with several experts in a host is sent there
once, and their results come back as one sum (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", 3.2.2).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trellis.mesh.manual.ops import vary
from trellis.named import save
from trellis.nn.moe.config import FAR_ROWS, Dispatch
from trellis.nn.moe.dispatch import Carrier
from trellis.nn.moe.exchange import Tokens, enter, first_by_expert, pack
from trellis.nn.moe.interleave import after
from trellis.nn.moe.ragged import in_tiles
from trellis.nn.moe.rounds import Moving, in_rounds, one_round
from trellis.nn.moe.rows import Compute, Taken, sum_rows, take_rows
from trellis.nn.moe.turns import Arrived, Axes, Road, Turn, arrivals, brought_with
from trellis.program.said import filled_rows, loop_turns


def hierarchical_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    compute: Compute,
    *,
    axes: Axes,
    count: int,
    ragged: bool,
    slack: float,
    most: int | None = None,
    dispatch: Dispatch | None = None,
) -> jax.Array:
    """Every token goes once to each part of the first axis where it has experts, from there to these along the others,
    and the sums of each part come back.

    In another part, a token goes to the device at the same place on the other axes. No token is dropped: buffers have
    room for `slack` times the rows of an even load, and if one is too small the tokens of all devices take turns, in 2,
    4, 8 or as many parts as it takes. With an even load there is one turn. Further ones are computed again in the
    backward pass.

    Args:
        x: `tokens embed`, this device's.
        ids: `i32["tokens choices"]`, experts numbered over all devices; larger numbers mean none.
        weights: `f32["tokens choices"]`.
        compute: what this device's experts do to rows sorted by expert, `compute(rows, sizes, weights)`.
        axes: the mesh axes that slice experts and tokens, two or more; the first is the one to save bytes on.
        count: how many experts each device has.
        ragged: whether only rows with a token travel (`jax.lax.ragged_all_to_all`), or slots of one size.
        slack: a buffer's room, as a multiple of an even load.
        most: the most parts of the first axis in which a token has experts, by the router's limits; None without any.
            Buffers are made for it. Tokens in more parts than that cost further turns, and are not lost.
        dispatch: the numbers in which tokens, and gradients of what comes back, go to experts; None for their own.

    Returns:
        `tokens embed`.

    Raises:
        ExpertsError: outside of manual mode, the mesh has no such axis, or there is no slack.
    """
    how = dict(axes=axes, count=count, ragged=ragged, slack=slack, most=most, dispatch=dispatch)
    return hierarchical_each([(x, ids, weights)], compute, **how)[0]


def hierarchical_each(
    given: Sequence[Tokens],
    compute: Compute,
    *,
    axes: Axes,
    count: int,
    ragged: bool,
    slack: float,
    most: int | None = None,
    dispatch: Dispatch | None = None,
    gathers: bool = False,
) -> list[jax.Array]:
    """`hierarchical_experts` for several parts of a device's tokens, whose exchanges follow each other (`in_turn`).

    Args:
        given: `x`, `ids` and `weights` of each, all of the same sizes.
        compute, axes, count, ragged, slack, most, dispatch: as there.
        gathers: as in `exchange_each`.
    """
    given, varying = enter(given, axes, slack, "hierarchical_experts")
    rooms = _Rooms(*given[0][1].shape, lax.axis_size(axes[0]), lax.axis_size(axes[1:]), count, ragged, slack, most)
    halvings = rooms.parts_at_worst()

    def filling(*given):
        with filled_rows(rooms.pairs, rooms.last):
            return compute(*given)

    def agreed(ids):
        return lax.pmax(vary(_parts_needed(ids, rooms, halvings, axes), varying), varying)

    parts: list[Moving] = []
    for x, ids, weights in given:
        # Later parts agree on their first round when those before have arrived, which do not wait for this routing.
        needed = agreed(after(parts[-1].needed, ids) if parts else ids)
        first = (ids, None) if parts else None
        parts.append(Moving(in_tiles(x) if ragged else x, weights, (ids, needed), needed, first))
    roads = _Roads(
        Road(axes[:1], rooms.arrived, ragged, even=rooms.even),
        Road(axes[1:], rooms.last, ragged, even=rooms.pairs, sorts=not gathers),
    )
    leaving = functools.partial(_leave, rooms=rooms, roads=roads)
    carrier = Carrier(functools.partial(_bring, roads=roads), leaving, dispatch, ragged)

    def arrive(given, known):
        (rows, weights), ((ids, needed), turn) = given, known
        moves = _part_of(ids.shape[0], agreed(ids) if needed is None else needed) == turn
        weights, at = _known(weights, ids, moves, rooms, roads)
        return (carrier.there(rows, at), weights), at

    leave = lambda made, at: (carrier.back(made, at), ())
    if halvings > 1:
        with loop_turns(rooms.pairs, rooms.last, before=1, by_load=True):
            made = in_rounds(arrive, filling, leave, _moves, parts)
    else:
        made = one_round(arrive, filling, leave, parts)
    return [mine.reshape(x.shape) for mine, (x, *_) in zip(made, given, strict=True)]


def parts_met(parts: int, groups: int, of_token: int) -> int | None:
    """In how many of `parts` equal parts of the experts a token has some at most, by the router's limits; None without
    limits.

    >>> parts_met(8, groups=8, of_token=4), parts_met(16, groups=8, of_token=4), parts_met(4, groups=8, of_token=2)
    (4, 8, 2)
    >>> parts_met(8, groups=1, of_token=1)

    Args:
        parts: of the experts.
        groups: that the router picks from (`Routing`).
        of_token: how many of these a token's experts come from.
    """
    if of_token == groups or (groups % parts and parts % groups):
        return None
    return of_token * max(parts // groups, 1)


def copies_of(choices: int, parts: int, most: int | None = None) -> float:
    """In how many parts of the experts a token has some, on average over all ways to choose them with repetition.

    >>> copies_of(8, 8, most=4)
    3.59954833984375

    Args:
        choices: experts of a token.
        parts: of the experts.
        most: in how many of them a token's experts are at most.
    """
    among = min(most or parts, parts)
    return among * (1 - (1 - 1 / among) ** choices)  # the power is the chance that all choices leave one out


class _Rooms:
    """Sizes of what a device sends and of its buffers, in rows.

    Attributes:
        tokens, choices: of a device.
        far, near: devices along the first axis, and along the others.
        count: experts of a device.
        ragged: whether senders share a buffer.
        nobody: the number of an expert that no device has.
        of_device, of_part: how many experts of one token a device and a part of the first axis have, at most.
        parts: how many parts of the first axis a token goes to, at most.
        pairs: pairs of a token and one of its experts.
        even: pairs of a token and a part of the first axis where it has experts, with an even load.
        sent: rows that leave for other parts.
        arrived: the buffer of those that come from other parts.
        passed: rows that go on from there.
        last: the buffer of the experts.
    """

    def __init__(self, tokens, choices, far, near, count, ragged, slack, most):
        self.tokens, self.choices, self.far, self.near, self.count = tokens, choices, far, near, count
        self.ragged = ragged
        self.nobody = far * near * count
        self.pairs = tokens * choices
        self.parts, among = min(choices, far), min(most or far, far)
        self.even = math.ceil(tokens * copies_of(choices, far, most))

        def room(even: int, worst: int, least: int, slots: int = 1) -> int:
            return -(-max(min(math.ceil(slack * even), worst), least) // slots) * slots

        # A token's experts are all different.
        self.of_device, self.of_part = min(choices, count), min(choices, near * count)
        self.sent = room(self.even, tokens * min(self.parts, among), self.parts)
        self.arrived = room(self.even, far * tokens, far, far)
        self.passed = room(self.pairs, self.arrived * self.of_part, far * self.of_part)
        of_all = far * near * self.of_device
        self.last = room(self.pairs, tokens * of_all, of_all, near)

    def parts_at_worst(self) -> int:
        """In how many parts tokens fit, whichever experts they choose."""
        parts = 1
        while not self._fits_at_worst(-(-self.tokens // parts)):
            parts *= 2
        return parts

    def _fits_at_worst(self, tokens: int) -> bool:
        senders, buffer = (self.near, self.last) if self.ragged else (1, self.last // self.near)
        needs = (
            (tokens * self.parts, self.sent),
            (self.far * tokens, self.arrived),
            (self.far * tokens * self.of_part, self.passed),
            (self.far * tokens * self.of_device * senders, buffer),
        )
        return all(rows <= room for rows, room in needs)


def _moves(counts, turn):
    """Which tokens take this turn: `bool["tokens"]`."""
    ids, parts = counts
    return _part_of(ids.shape[0], parts) == turn


def _part_of(tokens: int, parts):
    """In which of `parts` parts each token is; twice a power of two halves each of its parts."""
    number = jnp.arange(tokens, dtype=jnp.int32)
    return number * parts // tokens


def _parts_needed(ids, rooms: _Rooms, parts: int, axes: Axes) -> jax.Array:
    """The least power of two, up to `parts`, such that so many parts of the tokens fit all buffers of this device, and
    those of the devices that it knows of."""
    if parts == 1:
        return jnp.int32(1)
    devices = rooms.far * rooms.near
    to = (ids[..., None] // rooms.count == jnp.arange(devices)[None, None]).sum(1, dtype=jnp.int32)  # "tokens devices"
    to_parts = (to.reshape(-1, rooms.far, rooms.near).sum(2) > 0).astype(jnp.int32)
    ends = -(-rooms.tokens * np.arange(parts + 1) // parts)  # of the parts of tokens, as in `_part_of`
    counted = lambda a: jnp.diff(jnp.cumsum(jnp.pad(a, ((1, 0), (0, 0))), axis=0)[ends], axis=0)
    # How many rows go to each part of the first axis, and how many choices to each device, from devices at this place.
    rows, pairs = counted(to_parts), lax.psum(counted(to), axes[0])
    pairs = pairs.reshape(parts, rooms.far, rooms.near)
    loads = [(rows.sum(1), rooms.sent), (pairs.sum(2), rooms.passed)]
    if rooms.ragged:
        loads += [(lax.psum(rows, axes[0]), rooms.arrived), (lax.psum(pairs, axes[1:]), rooms.last)]
    else:
        loads += [(rows, rooms.arrived // rooms.far), (pairs, rooms.last // rooms.near)]
    needed, fewer = jnp.int32(parts), parts // 2
    while fewer:
        together = [load.reshape(fewer, parts // fewer, *load.shape[1:]).sum(1).max() <= room for load, room in loads]
        needed = jnp.where(functools.reduce(jnp.logical_and, together), fewer, needed)
        fewer //= 2
    return needed


class _Roads(NamedTuple):
    """The road along the first axis, and that along the others."""

    far: Road
    near: Road


class _Arrived(NamedTuple):
    """Where rows came from, for their way back.

    Attributes:
        sizes: `i32["count"]`, how many each expert has.
        near: along the last axes.
        near_rows: where the copies of each row that went on there are, and which row each of these is.
        far: rows of each device and what moved along the first axis.
        far_rows: the same for the rows that left.
    """

    sizes: jax.Array
    near: Arrived
    near_rows: tuple[jax.Array, jax.Array]
    far: tuple[jax.Array, Turn]
    far_rows: tuple[jax.Array, jax.Array]

    @property
    def taken(self) -> tuple[Taken, ...]:
        """As along the last axes."""
        return self.near.taken


def _known(weights, ids, moves, rooms: _Rooms, roads: _Roads) -> tuple[jax.Array, _Arrived]:
    """How much the rows that arrive at this device's experts count, and which tokens these are."""
    of_part, far = rooms.near * rooms.count, roads.far.axes
    ids = jnp.where(moves[:, None], ids, rooms.nobody)
    parts = jnp.where(ids < rooms.nobody, ids // of_part, rooms.far)
    earlier = jnp.tril(jnp.ones((rooms.choices, rooms.choices), bool), -1)
    again = ((parts[:, :, None] == parts[:, None, :]) & earlier[None]).any(2)
    order, place, sizes = first_by_expert(jnp.where(again, rooms.far, parts), rooms.far, rooms.sent)
    tokens = order // rooms.choices
    copies = jnp.sort(place.reshape(ids.shape), axis=1)[:, : rooms.parts]
    beside = functools.partial(lax.all_gather, axis_name=far, axis=0, tiled=True)
    all_ids, all_weights = beside(ids[tokens]), beside(take_rows(weights, tokens, copies))
    sizes = beside(sizes[None])[..., None]
    moved = Turn.of(sizes, jnp.int32(0), far, rooms.arrived, rooms.ragged)
    nobody, sender, number = arrivals(sizes, moved, rooms.arrived)
    index, places = brought_with(sizes, moved, sender, number, rooms.arrived, rooms.sent)
    here = all_ids.at[index].get(mode="clip", wrap_negative_indices=False) - lax.axis_index(far) * of_part
    here = jnp.where((nobody == 0)[:, None] & (here >= 0) & (here < of_part), here, of_part)
    mine = take_rows(all_weights, index, places)
    on = pack(mine, here, axes=roads.near.axes, count=rooms.count, room=rooms.passed)
    near = roads.near.known(on.counts, jnp.int32(0), rooms.passed)
    at = _Arrived(near.sizes, near, (on.copies, on.tokens), (sizes, moved), (copies, tokens))
    return roads.near.weigh(on.counted, near), at


def _bring(rows, at: _Arrived, *, roads: _Roads):
    """Moves tokens to the parts of the first axis where they have experts, and from there to these."""
    got = roads.far.there(take_rows(rows, *reversed(at.far_rows)), *at.far)
    got = save(got, FAR_ROWS, if_named=True)
    return roads.near.bring(take_rows(got, *reversed(at.near_rows)), at.near)


def _leave(made, at: _Arrived, *, rooms: _Rooms, roads: _Roads):
    """Moves the sums of experts' results back to where the tokens came from."""
    sums = sum_rows(roads.near.leave(made, at.near, rooms.passed), *at.near_rows)
    return sum_rows(roads.far.home(sums, *at.far, rooms.sent), *at.far_rows)
