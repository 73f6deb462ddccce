"""A pipeline's loss and gradients, one forward, one backward: what one device of a stage does in each tick.

A stage keeps the values of at most `Schedule.slots` passes for their backward passes, however many microbatches there
are. The gradient is made here, not by differentiating the ticks: then every forward pass would come before any backward
one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.device.view import View
from trellis.mesh.parts import one_of, part_of, with_one, with_part
from trellis.mesh.permute import permute
from trellis.named.pipeline.onto import onto
from trellis.named.pipeline.pieces import Pieces, put
from trellis.named.pipeline.schedule import Schedule, Unit
from trellis.notation import spec_of
from trellis.notation.state import State, state_of
from trellis.program.said import held_as
from trellis.program.scopes import sometimes


class Arrays(NamedTuple):
    """What a pipeline is given.

    Attributes:
        outer: the parameters outside of the layers, as they are used.
        head: those of them that all stages slice to compute together what comes after the layers, as they use them
            there.
        layers: the layers' parameters, `"layers ..."`, over the stages.
        parts: the microbatches, a tree of `"microbatches ..."`, the same on all stages.
    """

    outer: list[jax.Array]
    head: list[jax.Array]
    layers: list[jax.Array]
    parts: Any


class _Carried(NamedTuple):
    """What a device has between two ticks.

    Attributes:
        arrived: what the stage before sent.
        returned: the gradient of what was sent, from the stage after.
        kept: what its forward passes left for their backward passes, each in its slot.
        d_layers, d_outer, d_head: gradients so far, in float32.
        sums: the loss's sums so far.
    """

    arrived: Any
    returned: Any
    kept: Any
    d_layers: list[jax.Array]
    d_outer: list[jax.Array]
    d_head: list[jax.Array]
    sums: Any


def run(pieces: Pieces, schedule: Schedule, axis: str, arrays: Arrays):
    """The sums of the loss over all microbatches, and the gradients of `outer`, `head` and `layers`.

    Gradients are placed as the arrays say: copies have partial sums.
    """
    specs = jax.tree.map(lambda x: spec_of(*_fields(state_of(x))), arrays)
    gradients = [[spec_of(*_gradient(state_of(x))) for x in group] for group in arrays[:3]]
    sums = jax.tree.map(lambda _: jax.P(), pieces.leave.out[0])
    mesh = jax.typeof(arrays.layers[0]).sharding.mesh
    device = _Device(pieces, schedule, axis, View(dict(mesh.shape)), [_copied(x, axis) for x in arrays.outer])
    run = jax.shard_map(device.run, mesh=mesh, in_specs=tuple(specs), out_specs=(sums, *gradients), check_vma=False)
    return run(*arrays)


def _fields(state: State):
    return state.axes, state.pending, state.copied


def _gradient(state: State):
    return state.axes, state.copied, state.pending


def _copied(x: jax.Array, axis: str) -> bool:
    return axis in state_of(x).copied


@dataclasses.dataclass(frozen=True)
class _Device:
    """One device's program.

    Attributes:
        pieces, schedule: the pipeline's.
        axis: the mesh axis of the stages.
        view: runs the pieces on this device's parts.
        pending: for each array outside of the layers, whether its gradient may stay a sum over the stages.
    """

    pieces: Pieces
    schedule: Schedule
    axis: str
    view: View
    pending: Sequence[bool]

    def run(self, *arrays):
        schedule = self.schedule
        program = _Program(self, Arrays(*arrays))
        carry = program.start()
        first = range(schedule.forward_only)
        both = range(schedule.forward_only, schedule.forward_ends)
        last = range(schedule.forward_ends, schedule.ends)
        carry = _each(first, carry, lambda carry, tick: program.forward(carry, tick, first)[0])
        carry = _each(both, carry, lambda c, tick: program.backward(*program.forward(c, tick, both), tick, both))
        carry = _each(last, carry, lambda carry, tick: program.backward(carry, None, tick, last))
        sums = jax.tree.map(lambda x: lax.psum(x, self.axis), carry.sums)
        d_outer = [d if stays else lax.psum(d, self.axis) for d, stays in zip(carry.d_outer, self.pending, strict=True)]
        return sums, d_outer, carry.d_head, carry.d_layers


def _each(ticks: range, carry, body):
    if not ticks:
        return carry
    return lax.scan(lambda carry, tick: (body(carry, tick), None), carry, jnp.arange(ticks.start, ticks.stop))[0]


class _Program:
    """The two halves of ticks, on one device."""

    def __init__(self, device: _Device, arrays: Arrays):
        self.pieces, self.schedule, self.axis, self.view = device.pieces, device.schedule, device.axis, device.view
        self.outer, self.head, self.layers, self.parts = arrays
        self.stage = lax.axis_index(self.axis)
        self.last = self.stage == self.schedule.stages - 1
        self.places = jnp.asarray(self.schedule.places())[self.stage]
        self.all, self.together = self.pieces.source.parts, self.pieces.source.together is not None

    def start(self) -> _Carried:
        """The carry before any tick."""
        pieces, places = self.pieces, (self.schedule.slots + 1, self.all.most)
        slot = (pieces.enter.out, pieces.layer.out[1])
        with held_as("activations"):
            kept = jax.tree.map(lambda x: lax.empty((*places, *self._local(x)), x.dtype), slot)
        whole = lambda arrays: [jnp.zeros(x.shape, jnp.float32) for x in arrays]
        zeros = lambda tree: jax.tree.map(self._zeros, tree)
        carried = zeros(pieces.carried)
        with held_as("gradients"):
            gradients = whole(self.layers), whole(self.outer), whole(self.head)
        return _Carried(carried, carried, kept, *gradients, zeros(pieces.leave.out[0]))

    def forward(self, carry: _Carried, tick, ticks: range):
        """The forward half of one of these ticks, and the gradient of what leaves the last stage in it, if any."""
        unit = self.schedule.forward(tick, self.stage)
        part = self._part(unit.microbatch)
        entered, made = carry.arrived
        first = (self.stage == 0) & (unit.group == 0)
        enters = sum(self.schedule.entering(t).works for t in ticks)
        with sometimes(enters, len(ticks)):
            entered = lax.cond(first, lambda: self._call("enter", self.outer, part), lambda: entered)
        args, each = self._call("context", self.outer, part)
        place = jnp.where(unit.works, self.places[unit.number], self.schedule.slots)

        def layer(state, row, there):
            x, made, kept = state
            number = self._number(unit, row)
            own = lambda: jax.tree.map(lambda all_: part_of(all_, number, 1), made)
            given = self._block(unit, row), x, args, self._call("row", each, number)
            no_layer = lambda: ((x, own()), jax.tree.map(self._zeros, self.pieces.layer.out[1]))
            (out, y), more = _where(there, lambda: self._call("layer", *given), no_layer)
            kept = jax.tree.map(lambda all_, one: with_one(all_, one, (place, row)), kept, (x, more))
            put = lambda all_, one: with_part(all_, one, number)
            return out, jax.tree.map(put, made, y), kept

        *out, kept = self._layers(unit, layer, (entered, made, carry.kept))
        out = tuple(out)
        carry = carry._replace(arrived=self._sent(out, 1), kept=kept)
        leaves = sum(self.schedule.leaving(t).works for t in ticks)
        if not leaves:
            return carry, None
        leaving = self.schedule.leaving(tick)
        here = leaving.works if self.together else leaving.works & self.last
        totals = carry.sums, carry.d_outer, carry.d_head
        nothing = lambda: (totals, jax.tree.map(self._zeros, self.pieces.carried))
        with sometimes(leaves, len(ticks)):
            totals, d_out = lax.cond(here, lambda: self._left(totals, self._part(leaving.microbatch), out), nothing)
        return carry._replace(**dict(zip(("sums", "d_outer", "d_head"), totals, strict=True))), d_out

    def _left(self, totals, part, out):
        """Adds a microbatch that has left the layers to sums and gradients; also gives the gradient of what left.

        If all stages compute these together, the last one sends them what has left, and it alone counts what all of
        them find alike.
        """
        if self.together:
            out = jax.tree.map(lambda x: lax.psum(self._of_last(x), self.axis), out)
        sums, d_outer, d_head, d_out = self._call("leave", self.outer, self.head, part, out)
        if self.together:
            sums, d_outer = jax.tree.map(self._of_last, (sums, d_outer))
        places = self.pieces.left_by
        d_outer = put(totals[1], places, _added([totals[1][i] for i in places], d_outer))
        return (_added(totals[0], sums), d_outer, _added(totals[2], d_head)), d_out

    def backward(self, carry: _Carried, d_out, tick, ticks: range) -> _Carried:
        """The backward half; `d_out` is the gradient of what left in the same tick, or None if nothing leaves."""
        unit = self.schedule.backward(tick, self.stage)
        part = self._part(unit.microbatch)
        d_carried = carry.returned
        if d_out is not None:
            own = self.last & (unit.group == self.schedule.groups - 1)
            d_carried = jax.tree.map(lambda mine, sent: jnp.where(own, mine, sent), d_out, d_carried)
        args, each = self._call("context", self.outer, part)
        place = self.places[unit.number]
        d_x, d_made = d_carried

        def layer(state, row, there):
            d_x, d_layers = state
            number = self._number(unit, row)
            x, kept = jax.tree.map(lambda all_: one_of(all_, (place, row)), carry.kept)
            d_y = jax.tree.map(lambda d: part_of(d, number, 1), d_made)
            given = self._block(unit, row), x, args, self._call("row", each, number), kept
            no_layer = lambda: (jax.tree.map(self._zeros, self.pieces.layer_back.out[0]), d_x)
            d_block, d_x = _where(there, lambda: self._call("layer_back", *given, d_x, d_y), no_layer)
            at = self._place(unit, row)
            mine = [jnp.where(unit.works, d, 0) for d in d_block]
            return d_x, [_add(total, d, at) for total, d in zip(d_layers, mine, strict=True)]

        d_x, d_layers = self._layers(unit, layer, (d_x, carry.d_layers), reverse=True)
        carry = carry._replace(returned=self._sent((d_x, d_made), -1), d_layers=d_layers)
        returns = sum(self.schedule.returned(t).works for t in ticks)
        if not returns:
            return carry
        here = unit.works & (self.stage == 0) & (unit.group == 0)
        d_outer = carry.d_outer
        back = lambda: self._entered(d_outer, part, d_x)
        with sometimes(returns, len(ticks)):
            return carry._replace(d_outer=lax.cond(here, back, lambda: d_outer))

    def _entered(self, d_outer: list[jax.Array], part, d_x) -> list[jax.Array]:
        """The gradients outside of the layers, with those of a microbatch that enters them added."""
        places = self.pieces.entered_by
        back = lambda *args: self._call("enter_back", *args)
        found = onto([d_outer[i] for i in places], back, self.outer, part, d_x)
        return put(d_outer, places, found)

    # Parts of these.

    def _call(self, name: str, *args):
        piece = getattr(self.pieces, name)
        return piece(self.view, *args)

    def _layers(self, unit: Unit, body, carry, reverse: bool = False):
        """Runs the layers of a group in turn: `body(carry, row, there)`.

        `there` is None for layers that every group has. For the last layer of larger groups, which follows these, it
        says whether this group has it.
        """
        least = self.all.least
        step = lambda carry, row: (body(carry, row, None), None)
        alike = lambda carry: lax.scan(step, carry, jnp.arange(least), reverse=reverse, unroll=self.pieces.unroll)[0]
        if not self.all.uneven:
            return alike(carry)
        further = lambda carry: body(carry, least, jnp.asarray(self.all.sizes)[self._group(unit)] > least)
        return alike(further(carry)) if reverse else further(alike(carry))

    def _group(self, unit: Unit):
        """Which of all groups this one is."""
        return unit.group * self.schedule.stages + self.stage

    def _place(self, unit: Unit, row):
        """Which of this device's layers this one is."""
        return unit.group * self.all.most + row

    def _number(self, unit: Unit, row):
        """Which of all layers this one is."""
        return jnp.asarray(self.all.firsts)[self._group(unit)] + row

    def _block(self, unit: Unit, row) -> list[jax.Array]:
        place = self._place(unit, row)
        return [part_of(x, place, 1) for x in self.layers]

    def _local(self, x) -> tuple[int, ...]:
        return self.view.local(x.shape, state_of(x).axes)

    def _of_last(self, x):
        return jnp.where(self.last, x, jnp.zeros_like(x))

    def _zeros(self, x):
        return jnp.zeros(self._local(x), x.dtype)

    def _part(self, microbatch):
        return jax.tree.map(lambda x: one_of(x, (microbatch,)), self.parts)

    def _sent(self, tree, by: int):
        """Sends to the stage after or before."""
        count = self.schedule.stages
        routes = [(s, (s + by) % count) for s in range(count)]
        return jax.tree.map(lambda x: permute(x, (self.axis,), routes), tree)


def _where(there, make: Callable, leave: Callable):
    """What `make` gives if a layer is there, else what `leave` gives. None: it is there on all stages."""
    return make() if there is None else lax.cond(there, make, leave)


def _added(total, more):
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _add(total, more, at):
    """Adds to a row in place, by the product that makes `more`."""
    return with_part(total, _added(part_of(total, at, 1), more), at)
