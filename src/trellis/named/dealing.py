"""Positions dealt out over the slices of a sequence, by name, under a layout that says so (`Layout.dealt`).

Every array with the name `pos` has its positions in the order of `trellis.mesh.dealing` there.
"""

from collections.abc import Callable

from trellis.mesh import dealing
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import POSITIONS, Layout, current_layout
from trellis.named.arguments import function_of
from trellis.named.array import NamedArray
from trellis.named.placing import move
from trellis.notation import spec_of
from trellis.notation.state import state_of


def in_order(function: Callable[[NamedArray], NamedArray], x: NamedArray) -> NamedArray:
    """`function(x)` of all positions in their natural order, where they are dealt out; the result is dealt out again.

    Args:
        function: to an array with the same names; it may go by the order of `pos`, along which its argument is whole.
        x: has the name `pos`.
    """
    function_of(function, "in_order", "write in_order(lambda x: ..., x)")
    layout = current_layout()
    if layout is None or not layout.dealt:
        return function(x)
    held, all_of_it = state_of(x.array).axes, _whole(x)
    with layout.with_dealt(()):
        made = function(all_of_it.with_array(dealing.undeal(all_of_it.array, layout.slices_dealt, x.index(POSITIONS))))
    return _dealt(_whole(made.transpose(x.names)), held, layout)


def deal(x: NamedArray) -> NamedArray:
    """An array in natural order, dealt out as the layout in force says."""
    layout, held = current_layout(), state_of(x.array).axes
    dim = x.index(POSITIONS)
    if held[dim] != layout.dealt:
        return _dealt(_whole(x), held, layout)
    spec = spec_of(held)
    local = lambda part: dealing.deal_slices(part, layout.dealt, dim)
    return x.with_array(by_device(local, in_specs=spec, out_specs=spec)(x.array))


def _dealt(x: NamedArray, axes, layout: Layout) -> NamedArray:
    return move(x.with_array(dealing.deal(x.array, layout.slices_dealt, x.index(POSITIONS))), axes, frozenset())


def _whole(x: NamedArray) -> NamedArray:
    axes = state_of(x.array).axes
    return move(x, tuple(() if i == x.index(POSITIONS) else mine for i, mine in enumerate(axes)), frozenset())
