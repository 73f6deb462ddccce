"""Positions dealt out over the slices of a sequence, by name, under a layout that says so (`Layout.dealt`).

There every array with the name `pos` has its positions in the order of `trellis.mesh.dealing`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from trellis.mesh import dealing
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import POSITIONS, Layout, current_layout
from trellis.named.arguments import function_of, shown
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import NamesError
from trellis.named.placing import move
from trellis.notation import spec_of
from trellis.notation.state import state_of


def in_order(function: Callable[[Any], Any], x: Any) -> Any:
    """`function(x)` on all positions in natural order, if they are dealt out; results are dealt out again.

    Args:
        function: may go by the order of `pos`, along which its arguments are whole. Arrays in its result with the name
            `pos` are dealt out, and placed as `x` is along the names that both have; others stay as they are.
        x: a named array with the name `pos`, or a tree in which some are.

    Raises:
        NamesError: nothing in `x` has the name `pos`.
    """
    function_of(function, "in_order", "write in_order(lambda x: ..., x)")
    given = [leaf for leaf in jax.tree.leaves(x, is_leaf=is_named) if _has_positions(leaf)]
    if not given:
        raise NamesError(
            f"in_order needs an array with the name 'pos', got {shown(x)}, in in_order: call the function directly"
        )
    layout = current_layout()
    if layout is None or not layout.dealt:
        return function(x)
    held = {n: axes for leaf in reversed(given) for n, axes in zip(leaf.names, state_of(leaf.array).axes, strict=True)}
    with layout.with_dealt(()):
        made = function(jax.tree.map(lambda leaf: _natural(leaf, layout), x, is_leaf=is_named))
    return jax.tree.map(lambda leaf: _dealt_by_name(leaf, held, layout), made, is_leaf=is_named)


def _has_positions(x) -> bool:
    return is_named(x) and POSITIONS in x.names


def _natural(x, layout: Layout):
    """An array with its positions, if any, whole and in natural order."""
    if not _has_positions(x):
        return x
    x = _whole(x)
    return x.with_array(dealing.undeal(x.array, layout.slices_dealt, x.index(POSITIONS)))


def _dealt_by_name(x, held: Mapping[str, tuple[str, ...]], layout: Layout):
    """An array in natural order, if it has positions, dealt out over the mesh axes that slice each name."""
    if not _has_positions(x):
        return x
    axes: list[tuple[str, ...]] = []
    for name in x.names:
        mine = held.get(name, ())
        axes.append(() if {a for others in axes for a in others}.intersection(mine) else mine)
    return _dealt(_whole(x), tuple(axes), layout)


def deal(x: NamedArray) -> NamedArray:
    """An array in natural order, dealt out as the layout in force says."""
    layout, held = current_layout(), state_of(x.array).axes
    dim = x.index(POSITIONS)
    if not held[dim] or held[dim] != layout.axes_dealt:
        return _dealt(_whole(x), held, layout)
    spec = spec_of(held)
    local = lambda part: dealing.deal_slices(part, held[dim], dim)
    return x.with_array(by_device(local, in_specs=spec, out_specs=spec)(x.array))


def _dealt(x: NamedArray, axes, layout: Layout) -> NamedArray:
    return move(x.with_array(dealing.deal(x.array, layout.slices_dealt, x.index(POSITIONS))), axes, frozenset())


def _whole(x: NamedArray) -> NamedArray:
    axes = state_of(x.array).axes
    return move(x, tuple(() if i == x.index(POSITIONS) else mine for i, mine in enumerate(axes)), frozenset())
