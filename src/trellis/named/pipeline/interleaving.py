"""Layers dealt out to stages in several groups each (Narayanan et al., 2021, arXiv:2104.04473, section 2.2).

At rest a stage holds neighbouring layers. With two groups on two stages, of eight layers:

    at rest   stage 0: 0 1 2 3   stage 1: 4 5 6 7
    dealt     stage 0: 0 1 4 5   stage 1: 2 3 6 7      a microbatch goes around the stages twice

They are dealt out once a step, before they are gathered for use, in permutes of what a device holds; gradients come
back the same way.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from trellis.mesh.permute import permute
from trellis.mesh.reshard import scope_name
from trellis.named.array import NamedArray
from trellis.notation import spec_of
from trellis.notation.state import state_of


def interleaved(x: NamedArray, axis: str, stages: int, groups: int) -> NamedArray:
    """A parameter `"layers/stage ..."`, its layers dealt out to the stages in this many groups."""
    if groups == 1:
        return x

    def deal(mine):
        parts = mine.reshape(groups, -1, *mine.shape[1:])
        return jnp.concatenate([_collected(parts, group, axis, stages) for group in range(groups)])

    spec = spec_of(state_of(x.array).axes)
    with jax.named_scope(scope_name(f"{x.type} -> {x.type}")):
        return x.with_array(jax.shard_map(deal, in_specs=spec, out_specs=spec)(x.array))


def _collected(parts, group: int, axis: str, stages: int):
    """The part of a group that this stage works on: part `group * stages + stage` of all, which is at rest in place
    `part % groups` of stage `part // groups`."""
    groups = len(parts)
    found = []  # a stage gets one part, and zeros from the other permutes
    for place in range(groups):
        of = [(group * stages + stage, stage) for stage in range(stages)]
        if routes := [(part // groups, stage) for part, stage in of if part % groups == place]:
            found.append(permute(parts[place], (axis,), routes))
    return functools.reduce(operator.add, found)
