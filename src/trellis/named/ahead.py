"""Parameters moved to where operations want them before a loop, instead of in each of its turns."""

import jax

from trellis.mesh.layout import current_layout
from trellis.named.arguments import names_of
from trellis.named.array import is_named
from trellis.named.axis import Names, name_of
from trellis.named.placing import move
from trellis.notation.state import state_of


def gathered(tree, over: Names = "batch"):
    """Parameters as operations want them: each is gathered once for all that follow, and its gradient scattered once.

    An operation moves its own operands. So a loop over positions whose body reads a parameter gathers it in each turn,
    which holds it whole for that turn alone, and scatters its gradient in each. Moved ahead, it is whole for the whole
    loop, as copies (`~`) whose gradients are summed on each device first. Without a layout, and where the compiler
    places arrays or each device its own, the tree stays as it is.

    >>> layout = tr.Layout(tr.make_mesh(data=8), params={"embed": "data"}, compute={"batch": "data"})
    >>> with layout:
    ...     w, xs = tr.ones({"embed": 8, "hidden": 8}), tr.ones({"batch": 8, "pos": 4, "embed": 8})
    ...     w, h, xs = tr.shard(w), *tr.shard((tr.zeros({"batch": 8, "hidden": 8}), xs), "compute")
    ...     def total(w):
    ...         step = lambda h, x: (tr.tanh(tr.dot(x, w, over="embed") + h), None)
    ...         return tr.scan(step, "pos")(h, xs)[0].sum().array
    ...     for fn in (total, lambda w: total(tr.gathered(w))):
    ...         print([row.times for row in tr.ledger(jax.grad(fn), w) if row.kind == "reduce-scatter"])
    [4]
    [1]

    Names: those of each array.
    Gradient: summed on each device over all uses first; a reduce-scatter of what was gathered.
    Moves: an all-gather of what rests in slices.

    Args:
        tree: any tree; what is no named array in it stays.
        over: names of the arrays that the parameters meet in the loop, along whose mesh axes they are held as copies.
    """
    layout = current_layout()
    if layout is None:
        return tree
    given = names_of(over, "gathered", "pass 'batch', or another name that the arrays in the loop have")
    names = tuple(name_of(name, "gathered") for name in given)
    slicing = frozenset(axis for axes in layout.assign(names) for axis in axes)

    def moved(x):
        if not is_named(x) or state_of(x.array).mode != "explicit":
            return x
        axes = layout.assign((*names, *x.names))[len(names) :]  # an axis that slices one of the names slices no other
        return move(x, axes, slicing.difference(*axes))

    return jax.tree.map(moved, tree, is_leaf=is_named)
