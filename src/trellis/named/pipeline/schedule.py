"""When a stage does what: one forward, one backward (Narayanan et al., 2021, arXiv:2104.04473), in ticks.

Layers are cut into `stages * groups` parts; part `g * stages + s` is on stage `s`, so that with one group a stage has
neighbouring layers, and with more (interleaved) a microbatch goes around the stages `groups` times. Every tick has a
forward half and a backward half, and what a stage makes in one reaches its neighbour for the next:

    tick           0    1    2    3    4    5    6    7          4 microbatches, 2 stages, 1 group
    stage 0  F     0    1    2    3    .                         fills in S - 1 ticks, and drains in as many:
             B               .    0    1    2    3               M V + S - 1 ticks of both halves are S - 1 more than
    stage 1  F     .    0    1    2    3                         the M V that have work
             B          0    1    2    3    .

What a stage keeps of its forward halves waits `2 (stages * groups - stage) - 1` ticks at most, however many
microbatches there are. With more groups a tick is shorter, so the stages idle for less of the time, and a microbatch is
sent `groups` times.

The same functions serve the program, where ticks and stages are traced, and its chart, where they are numbers.
"""

import dataclasses
import heapq
from typing import Any, NamedTuple

import numpy as np


class Unit(NamedTuple):
    """What one stage does in one half of a tick; if `works` is false, nothing useful.

    Attributes:
        works: whether there is something to do.
        number: that of the forward pass on this stage, from 0; its backward pass has the same.
        group: which of the stage's parts of the layers.
        microbatch: which.
    """

    works: Any
    number: Any
    group: Any
    microbatch: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Stages, groups of layers on each, and microbatches; with several groups, the stages divide the microbatches."""

    stages: int
    groups: int
    microbatches: int

    @property
    def parts(self) -> int:
        """How many parts the layers have."""
        return self.stages * self.groups

    @property
    def units(self) -> int:
        """How many forward passes a stage has, and backward passes."""
        return self.microbatches * self.groups

    @property
    def slots(self) -> int:
        """How many of a stage's forward passes wait for their backward pass, at most."""
        return int(self.places().max()) + 1

    def places(self) -> np.ndarray:
        """Where a stage stores what it keeps of a forward pass, `i32["stages units"]`: in the lowest free place.

        >>> Schedule(4, 1, 16).slots, Schedule(4, 4, 16).slots
        (7, 19)
        """
        found = np.zeros((self.stages, self.units), np.int32)
        for stage in range(self.stages):
            free: list[int] = []
            for tick in range(self.ends):
                done, now = self.backward(tick, stage), self.forward(tick, stage)
                if now.works:
                    if not free:
                        free.append(found[stage, : now.number].max(initial=-1) + 1 if now.number else 0)
                    found[stage, now.number] = heapq.heappop(free)
                if done.works:
                    heapq.heappush(free, int(found[stage, done.number]))
        return found

    @property
    def forward_only(self) -> int:
        """Ticks before the first backward half."""
        return self.parts - 1

    @property
    def forward_ends(self) -> int:
        """Ticks with a forward half."""
        return self.units + self.stages - 1

    @property
    def ends(self) -> int:
        """All ticks."""
        return self.units + self.parts + self.stages - 2

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage has nothing to do, if the halves of all ticks take equally long.

        >>> Schedule(4, 1, 16).bubble, Schedule(4, 4, 16).bubble
        (0.15789473684210525, 0.04477611940298507)
        """
        return (self.stages - 1) / (self.units + self.stages - 1)

    def forward(self, tick, stage) -> Unit:
        """The forward half of a tick on a stage."""
        return self._unit(tick - stage, backward=False)

    def backward(self, tick, stage) -> Unit:
        """The backward half."""
        return self._unit(tick - self.forward_only - (self.stages - 1 - stage), backward=True)

    def entering(self, tick) -> Unit:
        """The microbatch that enters the first stage in this tick, if one does."""
        unit = self.forward(tick, 0)
        return unit._replace(works=unit.works & (unit.group == 0))

    def leaving(self, tick) -> Unit:
        """The microbatch whose result the last stage makes in this tick, if it makes one."""
        unit = self.forward(tick, self.stages - 1)
        return unit._replace(works=unit.works & (unit.group == self.groups - 1))

    def returned(self, tick) -> Unit:
        """The microbatch for which the first stage makes the gradient of what entered, if it makes one."""
        unit = self.backward(tick, 0)
        return unit._replace(works=unit.works & (unit.group == 0))

    def _unit(self, count, *, backward: bool) -> Unit:
        works = (count >= 0) & (count < self.units)
        count = _within(count, self.units)
        of_all, turn = count // self.parts, count // self.stages % self.groups
        group = self.groups - 1 - turn if backward else turn
        microbatch = of_all * self.stages + count % self.stages
        return Unit(works, of_all * self.parts + group * self.stages + count % self.stages, group, microbatch)


def _within(count, size: int):
    """A number or an array, clipped to 0 to size - 1."""
    if isinstance(count, int):
        return min(max(count, 0), size - 1)
    return count.clip(0, size - 1)
