"""What moves in one turn of an exchange of rows, where it goes, and its way back."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.nn.moe.ragged import in_tiles, ragged_all_to_all
from trellis.nn.moe.rows import Taken, reorder, sort_by_expert, sum_rows, take_rows
from trellis.program.said import filled_rows

Axes = tuple[str, ...]


class Turn(NamedTuple):
    """What moves in one turn of the exchange.

    Attributes:
        start: `i32["from to"]`, how many of a sender's rows for a receiver moved before.
        moved: `i32["from to"]`, how many move now.
        lands: `i32["from to"]`, where in the receiver's buffer.
        mine: `i32["to"]`, where this device's rows for each receiver begin among its rows.
        me: `i32[""]`, this device.
    """

    start: jax.Array
    moved: jax.Array
    lands: jax.Array
    mine: jax.Array
    me: jax.Array

    @staticmethod
    def of(counts: jax.Array, turn: jax.Array, axes: Axes, room: int, ragged: bool) -> "Turn":
        """The turn of this number.

        Args:
            counts: `i32["from to count"]`, rows for each expert.
            turn: from 0.
            axes: the mesh axes that the devices are along.
            room: of a buffer.
            ragged: whether senders share it.
        """
        sent, me = counts.sum(2), lax.axis_index(axes)
        # Where a sender's rows for a receiver begin among all that the receiver gets, and how many have room now.
        size = room if ragged else room // counts.shape[0]
        begins = jnp.cumsum(sent, 0) - sent if ragged else jnp.zeros_like(sent)
        start = jnp.clip(turn * size - begins, 0, sent)
        moved = jnp.clip((turn + 1) * size - begins, 0, sent) - start
        slot = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None] * size
        lands = begins + start - turn * size if ragged else jnp.broadcast_to(slot, sent.shape)
        return Turn(start, moved, jnp.clip(lands, 0, room), jnp.cumsum(sent[me]) - sent[me] + start[me], me)

    def inside(self, rows: int) -> jax.Array:
        """Which of this device's rows move: `bool["rows"]`."""
        number = jnp.arange(rows, dtype=jnp.int32)[:, None]
        mine = self.mine[None]
        return ((number >= mine) & (number < mine + self.moved[self.me][None])).any(1)


class Arrived(NamedTuple):
    """Where a device's rows came from.

    Attributes:
        sizes: `i32["count"]`, how many each expert has.
        order, place: `i32["room"]`, from the buffer to rows sorted by expert, and back.
        taken: one `Taken`, if whoever computes takes rows in this order from the buffer; otherwise none.
        counts: `i32["from to count"]`, rows for each expert.
        turn: in which they moved.
        beside: the number of each among all devices' rows, and where each of those is.
    """

    sizes: jax.Array
    order: jax.Array
    place: jax.Array
    taken: tuple[Taken, ...]
    counts: jax.Array
    turn: Turn
    beside: tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Road:
    """A road between devices, for rows that go there and for their results, which come home.

    Attributes:
        axes: the mesh axes that the devices are along.
        room: places of the buffer in which rows arrive; those without a row hold anything.
        ragged: whether only rows with a token travel.
        even: how many arrive under an even load.
        sorts: whether rows that arrive are sorted by expert, and results come in that order; otherwise both are as
            rows arrive.
    """

    axes: Axes
    room: int
    ragged: bool
    even: int
    sorts: bool = True

    def there(self, rows: jax.Array, counts: jax.Array, turn: Turn) -> jax.Array:
        """Sends rows to other devices.

        Args:
            rows: `rows ...`, sorted by receiver.
            counts: `i32["from to count"]`, of which `turn` is one.
            turn: what moves.
        """
        if self.ragged:
            return self._travel(rows, self.room, *self._ways(counts, turn))
        index, places = self._slots(rows.shape[0], turn)
        return lax.all_to_all(take_rows(rows, index, places), self.axes, 0, 0, tiled=True)

    def home(self, made: jax.Array, counts: jax.Array, turn: Turn, rows: int) -> jax.Array:
        """Sends the results of rows that arrived to the places that these came from.

        Args:
            made: `room ...`.
            counts, turn: as they went.
            rows: how many places there are.
        """
        if self.ragged:
            return self._travel(made, rows, *reversed(self._ways(counts, turn)))
        index, places = self._slots(rows, turn)
        return sum_rows(lax.all_to_all(made, self.axes, 0, 0, tiled=True), places, index)

    def known(self, counts: jax.Array, number: jax.Array, rows: int) -> "Arrived":
        """Where a round's rows came from, and where they lie sorted by this device's experts.

        Args:
            counts: `i32["from to count"]`, rows for each expert.
            number: of the round.
            rows: of each device, sorted by expert.
        """
        turn = Turn.of(counts, number, self.axes, self.room, self.ragged)
        expert, sender, mine = arrivals(counts, turn, self.room)
        beside = brought_with(counts, turn, sender, mine, self.room, rows)
        order, place, sizes = sort_by_expert(expert, counts.shape[2])
        taken = () if self.sorts else (Taken(order, None),)
        return Arrived(sizes, order, place, taken, counts, turn, beside)

    def bring(self, rows: jax.Array, at: "Arrived") -> jax.Array:
        """`room embed`: brings a round's rows, `rows ...`, sorted by this device's experts or not."""
        arrived = self.there(rows, at.counts, at.turn)
        return (reorder(arrived, at.order, at.place) if self.sorts else arrived).reshape(self.room, -1)

    def weigh(self, counted: jax.Array, at: "Arrived") -> jax.Array:
        """`f32["room"]`, how much each of them counts, from `f32["pairs"]` for the rows of all devices."""
        return reorder(take_rows(counted, *at.beside), at.order, at.place)

    def leave(self, made: jax.Array, at: "Arrived", rows: int) -> jax.Array:
        """Results of rows that arrived, at their places among the rows that were sent; others hold anything."""
        made = in_tiles(made) if self.ragged else made
        return self.home(reorder(made, at.place, at.order) if self.sorts else made, at.counts, at.turn, rows)

    def _ways(self, counts, turn: Turn):
        me = turn.me
        there = (turn.mine, turn.moved[me], turn.lands[me], turn.moved[:, me])
        return there, (turn.lands[:, me], turn.moved[:, me], _from(counts, turn), turn.moved[me])

    def _travel(self, x, room: int, *ways):
        with filled_rows(self.even, x.shape[0]), filled_rows(self.even, room):  # forward and backward
            return ragged_all_to_all(x, room, *ways, self.axes)

    def _slots(self, rows: int, turn: Turn):
        """Which row is in each place of the slots (`rows` for none), and each row's place (all places for none)."""
        first, moved = turn.mine, turn.moved[turn.me]
        size = self.room // moved.shape[0]
        within = jnp.arange(size, dtype=jnp.int32)
        index = jnp.where(within[None] < moved[:, None], first[:, None] + within[None], rows).reshape(-1)
        number = jnp.arange(rows, dtype=jnp.int32)
        inside = (number[:, None] >= first[None]) & (number[:, None] < (first + moved)[None])
        to = jnp.argmax(inside, 1).astype(jnp.int32)
        places = jnp.where(inside.any(1), to * size + number - first[to], first.shape[0] * size)
        return index, places[:, None]


def _from(counts, turn: Turn):
    """Where this device's results go: the place of its rows from each sender among that sender's rows."""
    sent = counts.sum(2)
    return (jnp.cumsum(sent, 1) - sent + turn.start)[:, turn.me]


def brought_with(counts, turn: Turn, sender, number, room: int, pairs: int):
    """Which of all devices' pairs belongs to each place of this device's buffer, and in which place each is.

    Args:
        counts, turn: of the exchange.
        sender, number: `i32["places"]`, for each place the device that its row is from, and which of its rows for us.
        room: places in the buffer.
        pairs: of each device.
    """
    sent, me = counts.sum(2), turn.me
    begins = (jnp.cumsum(sent, 1) - sent)[:, me]  # of our rows among each sender's
    number_of = jnp.arange(pairs, dtype=jnp.int32)[None] - (begins + turn.start[:, me])[:, None]
    inside = (number_of >= 0) & (number_of < turn.moved[:, me, None])
    places = jnp.where(inside, turn.lands[:, me, None] + number_of, room)
    return sender * pairs + begins[sender] + number, places.reshape(-1, 1)


def arrivals(counts, turn: Turn, room: int):
    """For every place of this device's buffer: the expert, numbered here (the number of experts for places without a
    row), the sender, and which of the sender's rows for this device it has.

    Args:
        counts: `i32["from to count"]`, rows for each expert, which come in this order.
        turn: of the exchange.
        room: places in the buffer.
    """
    counts, start, moved, lands = (a[:, turn.me] for a in (counts, turn.start, turn.moved, turn.lands))
    place = jnp.arange(room, dtype=jnp.int32)
    inside = (place[:, None] >= lands[None]) & (place[:, None] < (lands + moved)[None])
    sender = jnp.argmax(inside, 1)
    number = place - lands[sender] + start[sender]  # which of the sender's rows for this device
    expert = (number[:, None] >= jnp.cumsum(counts, 1)[sender]).sum(1, dtype=jnp.int32)
    return jnp.where(inside.any(1), expert, counts.shape[1]), sender, number
