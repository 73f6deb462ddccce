"""The gradient of a step whose layers are spread over stages: one forward, one backward."""

from collections.abc import Callable

import jax

from trellis.data.batch import Batch
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.reshard import place
from trellis.named import Stacked, is_named
from trellis.named.pipeline.by_vmap import microbatches_of, pipeline_axis
from trellis.named.pipeline.pieces import Pieces, Source, struct
from trellis.named.pipeline.run import Arrays, run
from trellis.named.pipeline.schedule import Schedule
from trellis.nn.positions import dealt
from trellis.notation.state import state_of


def stages_of(params) -> str | None:
    """The mesh axis of the stages, where the layout in force spreads these parameters' layers over one.

    Experts whose balance is that of the whole batch are no pipeline: each of its microbatches would need all others.
    """
    layout = current_layout()
    if getattr(params, "shares_wanted", False):
        return None
    stacks = [x for x in jax.tree.leaves(params, is_leaf=_is_stack) if _is_stack(x)]
    if layout is None or not stacks:
        return None
    axes = {pipeline_axis(stack.axis) for stack in stacks} - {None}
    return axes.pop() if axes else None


def _is_stack(x) -> bool:
    return isinstance(x, Stacked)


def pipelined(params, batch: Batch, cut: Callable, loss: Callable, axis: str):
    """The sums of a batch's loss, and the gradients of parameters in use, in float32.

    Args:
        params: as they are used; layers are over the stages.
        batch: named arrays.
        cut: `cut(batch, count)`, microbatches as a tree of arrays `"microbatches ..."`.
        loss: `loss(params, part, index) -> (loss, sums)` of one microbatch.
        axis: the mesh axis of the stages.
    """
    layout = current_layout()
    inside = layout.without(axis, mapped=False)
    count = microbatches_of(layout, axis, batch.tokens.shape["batch"])
    with inside:
        dealing, batch = dealt(jax.tree.map(lambda x: _placed(x, inside), batch, is_leaf=is_named))
        parts = cut(batch, count)
    leaves, tree = jax.tree.flatten(params, is_leaf=_is_stack)
    (at,) = [i for i, leaf in enumerate(leaves) if _is_stack(leaf)]
    stack, outer = leaves[at], leaves[:at] + leaves[at + 1 :]
    layers, block = jax.tree.flatten(stack.block)
    schedule = Schedule(layout.mesh.shape[axis], 1, count)
    rows = stack.axis.size // schedule.parts
    source = Source(
        function=loss,
        rebuild=lambda outer: jax.tree.unflatten(tree, [*outer[:at], stack, *outer[at:]]),
        outer=[struct(x, without=axis) for x in outer],
        block=block,
        chunk=[struct(x, ((), *state_of(x).axes[1:]), (rows, *x.shape[1:]), axis) for x in layers],
        part=jax.tree.map(lambda x: struct(x, state_of(x).axes[1:], x.shape[1:]), parts),
        count=stack.axis.size,
        groups=schedule.parts,
    )
    with inside, dealing:  # dealt out here: no permute may stand in what one stage alone does
        sums, d_outer, d_layers = run(Pieces(source), schedule, axis, Arrays(outer, layers, parts))
    d_stack = jax.tree.unflatten(jax.tree.structure(stack), d_layers)
    return sums, jax.tree.unflatten(tree, [*d_outer[:at], d_stack, *d_outer[at:]])


def _placed(x, layout: Layout):
    return x.with_array(place(x.array, layout.assign(x.names), (), frozenset(), names=x.names))
