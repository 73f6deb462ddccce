"""The collectives of manual mode (`shard_map`), where they are equations on one device's slices."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import JaxprEqn

from trellis.notation import Shape, parse_transition

from .rows import wire_bytes
from .rules import num_bytes, place_of
from .source import direction_of
from .transition import Move, Place

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


def moves(equation: JaxprEqn, sizes: Mapping[str, int]) -> Iterator[tuple[Move, Any, Any, str]]:
    """The communication of a manual collective: how much, its operand's and result's types, and what is uncertain."""
    kind = COLLECTIVES[equation.primitive.name]
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    named = (named,) if isinstance(named, str) else tuple(axis for axis in named if isinstance(axis, str))
    axes = tuple(axis for axis in named if sizes.get(axis, 1) > 1)
    groups = equation.params.get("axis_index_groups")
    count = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    if kind == "permute" and all(source == target for source, target in equation.params.get("perm", ((0, 1),))):
        return
    ragged = equation.primitive.name == "ragged_all_to_all"
    note = "at most: the sizes are known when it runs" if ragged else ""
    for before, after in zip(equation.invars, equation.outvars):  # a ragged exchange has its sizes behind its operand
        whole = after.aval if kind == "all-gather" else before.aval
        payload = num_bytes(whole) // math.prod(sizes.get(axis, 1) for axis in place_of(whole).sharded)
        if axes and payload:
            yield Move(kind, axes, payload, wire_bytes(kind, count, payload)), before.aval, after.aval, note


def text_of(scope: str, aval) -> str | None:
    """The transition that the language wrote into a name scope, if this operand can be its left side.

    In the backward pass it is the transition's gradient: the other way around, `+x` where it was `~x`.
    """
    texts = _TEXT.findall(scope)
    if not texts:
        return None
    before, after = parse_transition(texts[-1])
    if direction_of(scope) == "backward":
        before, after = (Shape(s.dims, s.copied, s.pending, s.ellipsis) for s in (after, before))
    states = getattr(aval, "mat", None)
    pending, varying = (set(getattr(states, kind, ()) or ()) for kind in ("unreduced", "varying"))
    settled = set(before.pending) == pending or (not pending and set(before.pending) <= varying)
    fits = len(before.dims) == len(aval.shape) and settled
    return f"{before} -> {after}" if fits else None


_TEXT = re.compile(r"(?:reshard|ring)\[([^\[\]]*->[^\[\]]*)\]")


def words(aval) -> str:
    """A manual-mode type: one device's sizes, the axes left to explicit mode, and the states along manual axes."""
    outside = place_of(aval)
    states = getattr(aval, "mat", None)
    pending = frozenset(getattr(states, "unreduced", ()) or ())
    copied = frozenset(getattr(states, "reduced", ()) or ())
    place = Place(outside.dims, outside.pending | pending, outside.copied | copied)
    return place.words(tuple(map(str, aval.shape)))
