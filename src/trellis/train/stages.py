"""The gradient of a step whose layers are spread over stages: one forward, one backward.

What a stage does with a microbatch is traced on the mesh without the stages, as a program of whole arrays, forward and
backward. So no sum that a gradient needs can reach another stage, which has another microbatch. `run` puts these pieces
into the program of one device, with the ticks around them.
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis.data.batch import Batch
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.meshes import on_another, without_axis
from trellis.mesh.reshard import place
from trellis.named import NamesError, Stacked, arange, broadcast_to, is_named
from trellis.named.pipeline.by_vmap import leading, microbatches_of, pipeline_axis
from trellis.named.pipeline.interleaving import interleaved
from trellis.named.pipeline.parts import Parts, spread
from trellis.named.pipeline.pieces import Pieces, Source, Together, struct
from trellis.named.pipeline.run import Arrays, run
from trellis.named.pipeline.schedule import Schedule
from trellis.nn.positions import dealt, dealt_axes
from trellis.notation.state import state_of

# The axis that the stages slice, if the layout says so, to compute the loss together.
_VOCAB = "vocab"


def stages_of(model) -> str | None:
    """The mesh axis of the stages, if the layout in force spreads this model's layers over one.

    Experts that are balanced over the whole batch cannot be a pipeline: each microbatch would need all others.
    """
    layout = current_layout()
    if layout is None or model.looks_ahead:
        return None
    return pipeline_axis(model.layers.axis)


def schedule_of(model, rows: int, times: int) -> Schedule | None:
    """When each stage does what in a step, if the layout in force spreads this model's layers over stages.

    Args:
        model: the model, or its types.
        rows: the rows of a batch.
        times: the number of parts of the batch; the layout says into how many microbatches each part is cut.

    Raises:
        NamesError: more stages and groups than layers, or groups and stages that do not divide the microbatches.
    """
    if (axis := stages_of(model)) is None:
        return None
    layout = current_layout()
    stages, groups = layout.mesh.shape[axis], layout.pipeline_groups
    microbatches = times * microbatches_of(layout, axis, rows // times)
    Parts.of(model.layers.axis, stages, groups)
    if groups > 1 and microbatches % stages:
        raise NamesError(
            f"with several groups of layers on a stage, stages must divide the microbatches, got {microbatches} of "
            f"them on {stages} stages with {groups} groups each: use a multiple of {stages} as pipeline_microbatches"
        )
    return Schedule(stages, groups, microbatches)


def dealt_out(params, axis: str):
    """Parameters with their layers dealt out to the stages in the layout's groups of layers. Each layer has its own of
    what all share, so that gradients are summed over layers and stages where they leave the stages.
    """
    layout, layers = current_layout(), params.layers.axis
    assert layout is not None  # which has the stages
    parts = Parts.of(layers, layout.mesh.shape[axis], layout.pipeline_groups)

    def deal(x):
        if x.names[:1] != (layers.name,):
            with layout:  # in which uneven layers are whole
                x = leading(x, layers)
            state = state_of(x.array)
            axes = ((() if parts.uneven else (axis,)), *state.axes[1:])
            x = x.with_array(place(x.array, axes, (), state.copied, names=x.names))
        return spread(x, layers.name, axis, parts) if parts.uneven else interleaved(x, axis, parts.stages, parts.groups)

    return apart(params, stacked=deal, others=lambda x: x)


def in_stages(params, axis: str):
    """Parameters as the stages use them: layers where they are, all others whole along the stages, as copies.

    The gradients of the copies are partial sums over the stages. What is outside the stack is not a layer, whatever its
    names.
    """
    layers = params.layers.axis.name

    def whole(x):
        state = state_of(x.array)
        axes = tuple(tuple(a for a in mine if a != axis) for mine in state.axes)
        return x.with_array(place(x.array, axes, (), state.copied | {axis}, names=x.names))

    return apart(params, stacked=lambda x: x if layers in x.names else whole(x), others=whole)


def apart(params, *, stacked: Callable, others: Callable):
    """Parameters with one function applied to those of the layers, and another to all others.

    The first runs where every stage has the same number of layers. That holds for the stack once it is dealt out, and
    for nothing else.
    """
    name = params.layers.axis.name

    def part(x):
        if not _is_stack(x, name):
            return others(x)
        with current_layout().even():
            return jax.tree.map(stacked, x, is_leaf=is_named)

    return jax.tree.map(part, params, is_leaf=lambda x: is_named(x) or _is_stack(x, name))


def _is_stack(x, name: str) -> bool:
    """Whether this is a stack of layers of this name."""
    return isinstance(x, Stacked) and x.axis.name == name


def around_loss(model, axis: str) -> Layout | None:
    """The layout for all stages to compute the loss together, each with its slice of the vocabulary.

    None if the last stage computes it: the layout does not slice the vocabulary over the stages, or they differ in
    their number of layers. What only some stages do must not be beside what all of them do together: devices of a CPU
    would mix the two up.
    """
    layout = current_layout()
    (over,) = layout.assign((_VOCAB,))
    if axis not in over or Parts.of(model.layers.axis, layout.mesh.shape[axis], layout.pipeline_groups).uneven:
        return None
    around = layout.without(axis)
    compute = [(name, over if name == _VOCAB else mine) for name, mine in around.compute]
    return dataclasses.replace(around, compute=compute, mapped=layout.mapped)


def head_of(model) -> list:
    """The parameters that the loss multiplies by and adds."""
    return [x for x in (model.unembedding, model.unembedding_bias) if x is not None]


def put_head(model, head: list):
    """The model with these parameters in the loss."""
    return eqx.tree_at(head_of, model, head)


def for_loss(head: list) -> list:
    """Parameters as all stages use them in the loss, in the layout of `around_loss`: the stages' slices come first.

    They also stay sliced over any other mesh axes that slice them at rest.
    """
    layout = current_layout()

    def leaf(x):
        state, over = state_of(x.array), layout.assign(x.names)
        rest = [tuple(a for a in mine if a not in sum(over, ())) for mine in state.axes]
        axes = [(*mine, *more) for mine, more in zip(over, rest, strict=True)]
        layout.check(x.names, tuple(x.shape[name] for name in x.names))
        return x.with_array(place(x.array, axes, (), frozenset(), names=x.names))

    return [leaf(x) for x in head]


def pipelined(
    params,
    head: list,
    around_head: Layout | None,
    batch: Batch,
    cut: Callable,
    shared: Callable,
    loss: Callable,
    schedule: Schedule,
    axis: str,
):
    """The sums of a batch's loss, and the gradients of parameters in use and of the head, in float32.

    Args:
        params: as they are used, by `dealt_out` and `in_stages`.
        head: what all stages use in the loss, by `for_loss`; empty if the last one computes it.
        around_head: the layout of the head, by `around_loss`.
        batch: named arrays.
        cut: `cut(batch, count)`, microbatches as a tree of arrays `"microbatches ..."`.
        shared: `shared(numbers)`, further arguments of each microbatch's loss, a tree of `"microbatches ..."`.
        loss: `loss(params, part, shared) -> (loss, sums)` of one microbatch.
        schedule: the schedule, by `schedule_of`.
        axis: the mesh axis of the stages.
    """
    layout, count = current_layout(), schedule.microbatches
    around, together = dataclasses.replace(layout.without(axis), mapped=layout.mapped), None
    with around:
        if batch.positions is None and dealt_axes(around):  # they are cut into microbatches as the tokens are
            positions = arange(batch.tokens.axis("pos"), dtype=jnp.int32)
            batch = dataclasses.replace(batch, positions=broadcast_to(positions, batch.tokens.shape))
        dealing, batch = dealt(jax.tree.map(lambda x: _placed(x, around), batch, is_leaf=is_named))
        parts = cut(batch, count), shared(jnp.arange(count))
        with dealing:  # out here: what one stage does alone may hold no permute
            inside = dataclasses.replace(current_layout(), mesh=without_axis(layout.mesh, axis))
    if around_head is not None:
        last = dataclasses.replace(around_head, dealt=inside.dealt)
        types = [struct(x.array, last.mesh.abstract_mesh) for x in head]
        named = lambda arrays: [x.with_array(array) for x, array in zip(head, arrays, strict=True)]
        together = Together(last, types, lambda params, arrays: put_head(params, named(arrays)))
    name = params.layers.axis.name  # a stack of another name is whole on every stage, and runs in the first
    leaves, tree = jax.tree.flatten(params, is_leaf=lambda x: _is_stack(x, name))
    at, *others = [i for i, leaf in enumerate(leaves) if _is_stack(leaf, name)]
    if others:
        raise NamesError(
            f"a pipeline's layers must be one stack, got {1 + len(others)} of them in a model: make one stack of "
            f"groups of layers, or remove '{name}' from the layout's compute"
        )
    stack, outer = leaves[at], leaves[:at] + leaves[at + 1 :]
    layers = jax.tree.leaves(stack.block)
    here = inside.mesh.abstract_mesh
    source = Source(
        name=name,
        function=lambda params, part: loss(params, *part),
        rebuild=lambda outer: jax.tree.unflatten(tree, [*outer[:at], stack, *outer[at:]]),
        outer=[struct(x, here) for x in outer],
        layers=layers,
        layer=[struct(x, here, ((), *state_of(x).axes[1:]), (1, *x.shape[1:])) for x in layers],
        part=jax.tree.map(lambda x: struct(x, here, state_of(x).axes[1:], x.shape[1:]), parts),
        parts=Parts.of(stack.axis, schedule.stages, schedule.groups),
        together=together,
    )
    with on_another(inside.mesh), inside:
        pieces = Pieces(source)
    arrays = Arrays(outer, [x.array for x in head], layers, parts)
    sums, d_outer, d_head, d_layers = run(pieces, schedule, axis, arrays)
    d_stack = jax.tree.unflatten(jax.tree.structure(stack), d_layers)
    d_head = [x.with_array(d) for x, d in zip(head, d_head, strict=True)]
    return sums, (jax.tree.unflatten(tree, [*d_outer[:at], d_stack, *d_outer[at:]]), d_head)


def _placed(x, layout: Layout):
    return x.with_array(place(x.array, layout.assign(x.names), (), frozenset(), names=x.names))
