"""Positions dealt out over the slices of a sequence, by name, under a layout that says so (`Layout.dealt`).

There every array with the name `pos` has its positions in the order of `trellis.mesh.dealing`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from trellis._compat import is_tracer
from trellis.mesh import dealing
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import KEY_POSITIONS, POSITIONS, Layout, current_layout
from trellis.named.arguments import function_of, shown
from trellis.named.array import NamedArray, is_named, reads
from trellis.named.axis import NamesError
from trellis.named.operand import operand
from trellis.named.placing import move
from trellis.notation import spec_of, typeof
from trellis.notation.state import state_of
from trellis.notation.typeof import is_array


def in_order(function: Callable[[Any], Any], x: Any) -> Any:
    """`function(x)` on all positions in natural order, if they are dealt out; results are dealt out again.

    Args:
        function: may go by the order of `pos`, along which its arguments are whole. Every array with positions that it
            reads must be an argument or made in it: one from around it is dealt out, and refused. (Where positions are
            dealt out, the function is traced once more, to see what it reads.) Arrays in its result with the name `pos`
            or `key_pos` are dealt out, and placed as `x` is along the names that both have; others stay as they are.
        x: a named array with the name `pos`, or a tree in which some are: `in_order(f, (x, mask))`.

    Raises:
        NamesError: nothing in `x` has the name `pos`, or the function reads positions from around it.
    """
    function_of(function, "in_order", "write in_order(lambda x: ..., x)")
    given = [leaf for leaf in jax.tree.leaves(x, is_leaf=is_named) if is_named(leaf) and POSITIONS in leaf.names]
    if not given:
        raise NamesError(
            f"in_order needs an array with the name 'pos', got {shown(x)}, in in_order: call the function directly"
        )
    layout = current_layout()
    if layout is None or not layout.dealt:
        return function(x)
    held = {n: axes for leaf in reversed(given) for n, axes in zip(leaf.names, state_of(leaf.array).axes, strict=True)}
    x = jax.tree.map(lambda leaf: _natural(leaf, layout), x, is_leaf=is_named)
    with layout.with_dealt(()):
        _refuse_from_around(function, x)
        made = function(x)
    return jax.tree.map(lambda leaf: _dealt_by_name(leaf, held, layout), made, is_leaf=is_named)


def _refuse_from_around(function: Callable[[Any], Any], x: Any) -> None:
    """Refuses a function that reads positions which are dealt out: nothing on an array says that they are.

    In a trace of the function, its arguments and what it makes are values of that trace. What is from around it is an
    array, or a constant of the trace.

    Raises:
        NamesError: it reads some.
    """
    leaves, tree = jax.tree.flatten(x, is_leaf=is_named)

    def traced(given):
        given = iter(given)
        made = function(jax.tree.unflatten(tree, [next(given) if is_named(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in jax.tree.leaves(made, is_leaf=is_named) if is_named(leaf)]

    with reads() as read:
        program = jax.make_jaxpr(traced)([leaf for leaf in leaves if is_named(leaf)])
    around = {id(constant) for constant in program.consts}
    for x, what in read:
        from_around = id(x.array) in around or (what and is_array(x.array) and not is_tracer(x.array))
        # An array that is on no mesh is in natural order everywhere.
        if from_around and _positions(x) and not jax.typeof(x.array).sharding.mesh.empty:
            raise NamesError(
                f"the function of in_order can only read positions that are its arguments, got {typeof(x)} from "
                f"around it{what and f', in {what}'}: pass it, too, as in in_order(f, (x, y))"
            )


def _positions(x) -> list[int]:
    """The dimensions of positions, of keys as well, that a value has."""
    return [dim for dim, name in enumerate(x.names) if name in (POSITIONS, KEY_POSITIONS)] if is_named(x) else []


def _natural(x, layout: Layout):
    """An array with its positions, if any, whole and in natural order."""
    if not (dims := _positions(x)):
        return x
    x = _whole(operand(x, "in_order", pending=True), dims)
    for dim in dims:
        x = x.with_array(dealing.undeal(x.array, layout.slices_dealt, dim))
    return x


def _dealt_by_name(x, held: Mapping[str, tuple[str, ...]], layout: Layout):
    """An array in natural order, if it has positions, dealt out over the mesh axes that slice each name."""
    if not (dims := _positions(x)):
        return x
    axes: list[tuple[str, ...]] = []
    for name in x.names:
        mine = held.get(name, ())
        axes.append(() if {a for others in axes for a in others}.intersection(mine) else mine)
    return _dealt(_whole(x, dims), tuple(axes), layout, dims)


def deal(x: NamedArray) -> NamedArray:
    """An array in natural order, dealt out as the layout in force says."""
    layout, held = current_layout(), state_of(x.array).axes
    dims = [dim] = [x.index(POSITIONS)]
    if not held[dim] or held[dim] != layout.axes_dealt:
        return _dealt(_whole(x, dims), held, layout, dims)
    spec = spec_of(held)
    local = lambda part: dealing.deal_slices(part, held[dim], dim)
    return x.with_array(by_device(local, in_specs=spec, out_specs=spec)(x.array))


def _dealt(x: NamedArray, axes, layout: Layout, dims: list[int]) -> NamedArray:
    for dim in dims:
        x = x.with_array(dealing.deal(x.array, layout.slices_dealt, dim))
    return move(x, axes, frozenset())


def _whole(x: NamedArray, dims: list[int]) -> NamedArray:
    axes = state_of(x.array).axes
    return move(x, tuple(() if i in dims else mine for i, mine in enumerate(axes)), frozenset())
