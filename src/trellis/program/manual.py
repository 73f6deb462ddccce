"""The collectives of manual mode (`shard_map`), which are operations on one device's slices."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jax.extend.core import JaxprEqn

from trellis.program.moves import Move, wire_bytes
from trellis.program.pairs import axes_of_pairs
from trellis.program.reading import Operation, Value
from trellis.program.scopes import transition_in

# The names are the same in JAX 0.10.2 and 0.12.
COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_reduced": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "permute",
    "pbroadcast": "permute",
}
# Those that settle a sum.
SUMS = frozenset("psum psum_invariant unreduced_psum reduce_scatter unreduced_reduce_scatter".split())


def axes_over(operation: Operation | JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a collective runs over."""
    named = operation.params.get("axes", operation.params.get("axis_name", ()))
    return (named,) if isinstance(named, str) else tuple(axis for axis in named if isinstance(axis, str))


def moves(operation: Operation, sizes: Mapping[str, int]) -> Iterator[tuple[Move, Value, Value, str]]:
    """The communication of a manual collective: how much, its operand and result, and what is uncertain."""
    kind = COLLECTIVES[operation.name]
    axes = tuple(axis for axis in axes_over(operation) if sizes.get(axis, 1) > 1)
    groups = operation.params.get("axis_index_groups")
    count = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    if kind == "permute" and (pairs := operation.params.get("perm")):
        if all(source == target for source, target in pairs):
            return
        axes = axes_of_pairs(pairs, {axis: sizes[axis] for axis in axes_over(operation)}) or axes
    note = "at most: the sizes are known when it runs" if operation.name == "ragged_all_to_all" else ""
    for before, after in zip(operation.operands, operation.results):  # a ragged exchange's sizes come last
        payload = (after if kind == "all-gather" else before).num_bytes
        if axes and payload:
            yield Move(kind, axes, payload, wire_bytes(kind, count, payload)), before, after, note


def text_of(scope: str, value: Value) -> str | None:
    """The transition that Trellis wrote into a name scope, if this operand can be its left side."""
    found = transition_in(scope)
    if found is None:
        return None
    before, after = found
    states = getattr(value.aval, "mat", None)
    pending, varying = (set(getattr(states, kind, ()) or ()) for kind in ("unreduced", "varying"))
    settled = set(before.pending) == pending or (not pending and set(before.pending) <= varying)
    return f"{before} -> {after}" if len(before.dims) == len(value.shape) and settled else None


def words(value: Value) -> str:
    """A manual-mode type: one device's sizes, the axes left to explicit mode, and the states along manual axes."""
    states = getattr(value.aval, "mat", None)
    pending, copied = (frozenset(getattr(states, kind, ()) or ()) for kind in ("unreduced", "reduced"))
    state = value.state
    return dataclasses.replace(state, pending=state.pending | pending, copied=state.copied | copied).words(value.shape)
