"""A pipeline's loss and gradients, one forward, one backward: what a stage does in each tick, on one device.

All that a stage keeps for its backward passes are `Schedule.slots` of them, however many microbatches there are. The
gradient is made here, not by differentiating the ticks, in which every forward pass would come before any backward one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.device.view import View
from trellis.mesh.permute import permute
from trellis.named.pipeline.pieces import Layers, Pieces
from trellis.named.pipeline.schedule import Schedule, Unit
from trellis.notation import spec_of
from trellis.notation.state import State, state_of
from trellis.program.scopes import sometimes


class Arrays(NamedTuple):
    """What a pipeline is given: parameters outside of the layers, those of the layers, and the microbatches.

    Attributes:
        outer: as they are used.
        layers: `"layers ..."`, over the stages.
        parts: a tree of `"microbatches ..."`, the same on all stages.
    """

    outer: list[jax.Array]
    layers: list[jax.Array]
    parts: Any


class _Carried(NamedTuple):
    """What a device has between two ticks.

    Attributes:
        arrived: from the stage before.
        returned: the gradient of what was sent, from the stage after.
        kept: what its forward passes left for their backward passes, each in its slot.
        d_layers, d_outer: gradients so far, in float32.
        sums: of the loss so far.
    """

    arrived: Any
    returned: Any
    kept: Any
    d_layers: list[jax.Array]
    d_outer: list[jax.Array]
    sums: Any


def run(pieces: Pieces, schedule: Schedule, axis: str, arrays: Arrays):
    """The sums of the loss over all microbatches, and the gradients of `outer` and `layers`.

    Gradients lie as the arrays promise: copies have partial sums.
    """
    specs = jax.tree.map(lambda x: spec_of(*_fields(state_of(x))), arrays)
    gradients = [[spec_of(*_gradient(state_of(x))) for x in group] for group in (arrays.outer, arrays.layers)]
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
        pieces, schedule: of the pipeline.
        axis: the mesh axis of the stages.
        view: runs the pieces on this device's parts.
        pending: of each array outside of the layers, whether its gradient may stay a sum over the stages.
    """

    pieces: Pieces
    schedule: Schedule
    axis: str
    view: View
    pending: Sequence[bool]

    def run(self, outer, layers, parts):
        schedule = self.schedule
        groups = [x.reshape(schedule.groups, -1, *x.shape[1:]) for x in layers]
        program = _Program(self, outer, groups, parts)
        carry = program.start()
        first = range(schedule.forward_only)
        both = range(schedule.forward_only, schedule.forward_ends)
        last = range(schedule.forward_ends, schedule.ends)
        carry = _each(first, carry, lambda carry, tick: program.forward(carry, tick, first)[0])
        carry = _each(both, carry, lambda c, tick: program.backward(*program.forward(c, tick, both), tick, both))
        carry = _each(last, carry, lambda carry, tick: program.backward(carry, None, tick, last))
        sums = jax.tree.map(lambda x: lax.psum(x, self.axis), carry.sums)
        d_outer = [d if stays else lax.psum(d, self.axis) for d, stays in zip(carry.d_outer, self.pending, strict=True)]
        return sums, d_outer, [d.reshape(-1, *d.shape[2:]) for d in carry.d_layers]


def _each(ticks: range, carry, body):
    if not ticks:
        return carry
    return lax.scan(lambda carry, tick: (body(carry, tick), None), carry, jnp.arange(ticks.start, ticks.stop))[0]


class _Program:
    """The ticks' two halves, on one device."""

    def __init__(self, device: _Device, outer, layers, parts):
        self.pieces, self.schedule, self.axis, self.view = device.pieces, device.schedule, device.axis, device.view
        self.outer, self.layers, self.parts = outer, layers, parts
        self.stage = lax.axis_index(self.axis)
        self.last = self.stage == self.schedule.stages - 1
        self.places = jnp.asarray(self.schedule.places())[self.stage]
        parts = self.pieces.source.parts
        self.firsts, self.sizes = jnp.asarray(parts.firsts), jnp.asarray(parts.sizes)
        self.beside = self.pieces.extra is not None and self.pieces.extra.permutes

    def start(self) -> _Carried:
        """Before the first tick."""
        slot = (self.pieces.carried, self.pieces.stage.forward.out[1])
        if (extra := self.pieces.extra) is not None:
            slot = (*slot, self.pieces.carried, extra.forward.out[1])
        kept = jax.tree.map(lambda x: jnp.zeros((self.schedule.slots + 1, *self._local(x)), x.dtype), slot)
        whole = lambda arrays: [jnp.zeros(x.shape, jnp.float32) for x in arrays]
        zeros = lambda tree: jax.tree.map(self._zeros, tree)
        carried = zeros(self.pieces.carried)
        sums = zeros(self.pieces.leave.out[0])
        return _Carried(carried, carried, kept, whole(self.layers), whole(self.outer), sums)

    def forward(self, carry: _Carried, tick, ticks: range):
        """The forward half of one of these ticks, and the gradient of what leaves the last stage in it, if it does."""
        unit = self.schedule.forward(tick, self.stage)
        part = self._part(unit.microbatch)
        entered, made = carry.arrived
        first = (self.stage == 0) & (unit.group == 0)
        enters = sum(self.schedule.entering(t).works for t in ticks)
        with sometimes(enters, len(ticks)):
            entered = lax.cond(first, lambda: self._call("enter", self.outer, part), lambda: entered)
        carried = (entered, made)
        args, each = self._call("context", self.outer, part)
        out, kept = self._layers(unit, carried, args, each)
        place = jnp.where(unit.works, self.places[unit.number], self.schedule.slots)
        put = lambda all_, one: lax.dynamic_update_index_in_dim(all_, one.astype(all_.dtype), place, 0)
        carry = carry._replace(arrived=self._sent(out, 1), kept=jax.tree.map(put, carry.kept, kept))
        leaves = sum(self.schedule.leaving(t).works for t in ticks)
        if not leaves:
            return carry, None
        here = unit.works & self.last & (unit.group == self.schedule.groups - 1)
        with sometimes(leaves, len(ticks)):
            sums, d_outer, d_out = self._if(here, "leave", self.outer, part, out)
        return carry._replace(sums=_added(carry.sums, sums), d_outer=_added(carry.d_outer, d_outer)), d_out

    def backward(self, carry: _Carried, d_out, tick, ticks: range) -> _Carried:
        """The backward half; `d_out` is the gradient of what left in the same tick, or None where nothing leaves."""
        unit = self.schedule.backward(tick, self.stage)
        part = self._part(unit.microbatch)
        d_carried = carry.returned
        if d_out is not None:
            own = self.last & (unit.group == self.schedule.groups - 1)
            d_carried = jax.tree.map(lambda mine, sent: jnp.where(own, mine, sent), d_out, d_carried)
        args, each = self._call("context", self.outer, part)
        pick = lambda x: lax.dynamic_index_in_dim(x, self.places[unit.number], 0, keepdims=False)
        d_chunk, d_carried = self._layers_back(unit, args, each, jax.tree.map(pick, carry.kept), d_carried)
        add = lambda total, d: total.at[unit.group].add(jnp.where(unit.works, d, 0).astype(total.dtype))
        carry = carry._replace(
            returned=self._sent(d_carried, -1),
            d_layers=[add(total, d) for total, d in zip(carry.d_layers, d_chunk, strict=True)],
        )
        returns = sum(self.schedule.returned(t).works for t in ticks)
        if not returns:
            return carry
        with sometimes(returns, len(ticks)):
            here = unit.works & (self.stage == 0) & (unit.group == 0)
            d_outer = self._if(here, "enter_back", self.outer, part, d_carried[0])
        return carry._replace(d_outer=_added(carry.d_outer, d_outer))

    def _layers(self, unit: Unit, carried, args, each):
        """What a group of layers makes, and what it keeps for its backward pass."""
        stage, extra = self.pieces.stage, self.pieces.extra
        out, kept = self._run(stage.forward, self._chunk(unit, stage), carried, args, each, self._start(unit, stage))
        if extra is None:
            return out, (carried, kept)
        given = self._chunk(unit, extra), out, args, each, self._start(unit, extra)
        last, more = self._if_there(unit, lambda: self._run(extra.forward, *given), lambda: (out, None))
        return last, (carried, kept, out, more)

    def _layers_back(self, unit: Unit, args, each, kept, d_carried):
        """The gradients of a group's parameters, and of what entered it."""
        stage, extra = self.pieces.stage, self.pieces.extra
        run = lambda layers, carried, kept, d: self._run(
            layers.backward, self._chunk(unit, layers), carried, args, each, self._start(unit, layers), kept, d
        )
        if extra is None:
            return run(stage, *kept, d_carried)
        carried, kept, between, more = kept
        d_extra, d_carried = self._if_there(
            unit, lambda: run(extra, between, more, d_carried), lambda: (None, d_carried)
        )
        d_chunk, d_carried = run(stage, carried, kept, d_carried)
        return [jnp.concatenate(both) for both in zip(d_chunk, d_extra, strict=True)], d_carried

    # Parts of these.

    def _call(self, name: str, *args):
        return self._run(getattr(self.pieces, name), *args)

    def _if(self, here, name: str, *args):
        """What a piece gives on the device where it belongs, and zeros elsewhere."""
        out = getattr(self.pieces, name).out
        return lax.cond(here, lambda: self._call(name, *args), lambda: jax.tree.map(self._zeros, out))

    def _local(self, x) -> tuple[int, ...]:
        return self.view.local(x.shape, state_of(x).axes)

    def _zeros(self, x):
        return jnp.zeros(self._local(x), x.dtype)

    def _part(self, microbatch):
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, microbatch, 0, keepdims=False), self.parts)

    def _run(self, piece, *args):
        return piece(self.view, *args)

    def _if_there(self, unit: Unit, make, leave):
        """What the layer makes that only the larger groups have; elsewhere what `leave` gives, and zeros for None.

        Where it permutes, every stage makes it, and the others leave the result out.
        """
        there = self.sizes[self._part_of_all(unit)] > self.pieces.stage.stop
        types = jax.eval_shape(make)
        zeros = lambda one, of: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of) if one is None else one
        other = lambda: tuple(map(zeros, leave(), types))
        if not self.beside:
            return lax.cond(there, lambda: tuple(make()), other)
        return jax.tree.map(lambda mine, passed: jnp.where(there, mine, passed), tuple(make()), other())

    def _chunk(self, unit: Unit, layers: Layers) -> list[jax.Array]:
        rows = slice(layers.first, layers.stop)
        return [lax.dynamic_index_in_dim(x, unit.group, 0, keepdims=False)[rows] for x in self.layers]

    def _part_of_all(self, unit: Unit):
        return unit.group * self.schedule.stages + self.stage

    def _start(self, unit: Unit, layers: Layers):
        return self.firsts[self._part_of_all(unit)] + layers.first

    def _sent(self, tree, by: int):
        """To the next stage, or the one before."""
        count = self.schedule.stages
        routes = [(s, (s + by) % count) for s in range(count)]
        return jax.tree.map(lambda x: permute(x, (self.axis,), routes), tree)


def _added(total, more):
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
