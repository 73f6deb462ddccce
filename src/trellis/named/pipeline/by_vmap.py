"""Layers as a pipeline (GPipe: Huang et al., 2019, arXiv:1811.06965): each stage of a mesh axis holds some of them.

The batch goes through in microbatches. In tick `t` stage `s` runs its layers on microbatch `t - s` and passes the
result on, all stages at once:

    tick       0   1   2   3   4       4 microbatches through 2 stages
    stage 0    0   1   2   3   -
    stage 1    -   0   1   2   3       a stage idles in 1 of 5 ticks: the bubble

Stages are a dimension of ordinary arrays, and so are the slices of the batch, each with its own copy of the layers:
`"layers/stage copies/data batch pos embed"`. One stage's layers are mapped over both, and the gradient is JAX's: the
same ticks in the opposite order. A tick moves one microbatch from every stage to the next, in one permute; parameters
are gathered once, before the first tick, and their gradients summed over the batch once, after the last.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis._compat import keep_mapped_axes_sharded
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.manual.ops import vary
from trellis.mesh.reshard import scope_name
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import Axis, NamesError
from trellis.named.contract import einsum
from trellis.named.create import arange
from trellis.named.elementwise import where
from trellis.named.pipeline.parts import BATCH, Parts, spread
from trellis.named.placing import move, settle
from trellis.named.random import for_part
from trellis.named.reshape import broadcast_to, merge_axes, split_axis, transpose
from trellis.named.scan import scan
from trellis.named.vmap import map_as_it_is
from trellis.notation import Dim, Shape, spec_of
from trellis.notation.state import mode_of, state_of

COPIES, TICK, IN_STAGE = "copies", "tick", "in_stage"


def pipeline_axis(layers: Axis) -> str | None:
    """The mesh axis over which the layout in force spreads these layers in use, if it does.

    Raises:
        NamesError: several axes, or a mesh that is not in explicit mode.
    """
    layout = current_layout()
    axes = layout.even().assign((layers.name,))[0] if layout is not None else ()
    if layout is None or not axes:
        return None
    written = f"'{'/'.join((layers.name, *axes))}'"
    if len(axes) > 1:
        raise NamesError(f"a pipeline must run along one mesh axis, got {written}: choose one of them")
    if mode_of(layout.mesh) != "explicit":
        raise NamesError(f"a pipeline needs a mesh in explicit mode, got {written} in auto mode: make an explicit mesh")
    return axes[0]


def microbatches_of(layout: Layout, axis: str, batch: int) -> int:
    """The number of parts of a batch.

    Raises:
        NamesError: the layout says a number that does not cut every slice of the batch into equal parts.
    """
    (over,) = layout.without(axis).assign((BATCH,))
    copies = math.prod(layout.mesh.shape[a] for a in over)
    fits = [n for n in range(1, batch + 1) if batch % (n * copies) == 0]
    count = layout.pipeline_microbatches or max((n for n in fits if n <= 4 * layout.mesh.shape[axis]), default=0)
    if count not in fits:
        raise NamesError(
            f"a pipeline's microbatches must divide every slice of the batch evenly, got {count} for {BATCH}={batch} "
            f"in {copies} slices: "
            + (f"use one of {', '.join(map(str, fits))} as pipeline_microbatches" if fits else "use a larger batch")
        )
    return count


def fold_pipeline(stage: Callable, layers: Axis, axis: str, x, args, block, each):
    """Carries `x` through all layers, which the stages of a mesh axis hold in equal parts.

    Args:
        stage: `stage(x, args, block, each)`: the fold through the layers of one stage.
        layers: all layers.
        axis: the mesh axis of the stages.
        x: a tree of arrays that have the name `batch`.
        args: what every layer gets; arrays that have the name `batch` travel with their microbatch. Of others every
            stage has its own for each slice of the batch, as of the layers, so that their gradients are summed once.
        block: the stacked layers, with their name anywhere in an array; an array without it belongs to every layer.
            Gradients are added up over the ticks in float32.
        each: a tree of arrays with the layers' name. What a layer draws along `batch`, from whatever key, is drawn for
            each slice's microbatch by its number; what it draws along other names is the same for all.

    Raises:
        NamesError: `x` has no batch, or one that cannot be cut.
    """
    keep_mapped_axes_sharded()
    flat = lambda tree: jax.tree.leaves(tree, is_leaf=is_named)
    leaves, structure = jax.tree.flatten((x, args), is_leaf=is_named)
    travels = [is_named(leaf) and BATCH in leaf.names for leaf in leaves]
    carried = len(flat(x))
    if not all(travels[:carried]):
        raise NamesError(
            f"every value that a pipeline carries must have the name '{BATCH}', got one without it: carry named "
            f"arrays that have it, or remove '{layers.name}' from the layout's compute"
        )
    travelling = [leaf for leaf, does in zip(leaves, travels, strict=True) if does]
    plan = _Plan.of(layers, axis, travelling[0].shape[BATCH])
    entering = [plan.cut(leaf) for leaf in travelling]
    block = jax.tree.map(lambda p: leading(p, layers), block, is_leaf=is_named)
    kinds = [p.dtype for p in flat(block)]
    copied, form = jax.tree.flatten(jax.tree.map(plan.spread, block, is_leaf=is_named), is_leaf=is_named)
    each = jax.tree.map(plan.by_stage, each, is_leaf=is_named)
    shares = [not does and _is_float(leaf) for leaf, does in zip(leaves, travels, strict=True)]
    copied = copied, [plan.share(leaf) for leaf, does in zip(leaves, shares, strict=True) if does]

    def work(part, travelling, copied, each):
        """One stage in one tick, on the part with this number of one slice of the batch."""
        arrived, (copied, shared) = iter(travelling), copied
        own = iter(shared)
        mine = lambda leaf: next(own)[IN_STAGE, 0].astype(leaf.dtype)
        slots = [
            next(arrived) if does else mine(leaf) if is_shared else leaf
            for leaf, does, is_shared in zip(leaves, travels, shares, strict=True)
        ]
        x, args = jax.tree.unflatten(structure, slots)
        block = jax.tree.unflatten(form, [p.astype(kind) for p, kind in zip(copied, kinds, strict=True)])
        with plan.inside, for_part(part.array):
            x = stage(x, args, *_renamed((block, each), layers.name))
        return [*flat(x), *travelling[carried:]]

    def run(passed, tick, entering):
        here = arange(Axis(layers.name, plan.stages))
        moved = [plan.pass_on(x) for x in passed]
        ready = [where(here == 0, new, old) for new, old in zip(entering, moved, strict=True)]

        def one_stage(here, ready, copied, each):
            one_copy = lambda part, ready, copied: work(part, ready, copied, each)
            numbers = (tick - here) * plan.copies + arange(Axis(COPIES, plan.copies))
            return map_as_it_is(one_copy, COPIES, plan.over)(numbers, ready, copied)

        done = map_as_it_is(one_stage, layers.name, (axis,))(here, ready, copied, each)
        return done, done[:carried]

    with plan.around:
        first = [x[TICK, 0] for x in entering]
        start = [broadcast_to(x, {layers.name: plan.stages, **x.shape}) for x in first]
        _, left = scan(run, TICK)(start, arange(Axis(TICK, plan.microbatches + plan.stages - 1)), entering)
    collected = [transpose(plan.collect(y), was.names) for y, was in zip(left, flat(x), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(x, is_leaf=is_named), collected)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How arrays are cut for a pipeline.

    Attributes:
        layers: the name of all layers; within the pipeline, that of the stages.
        axis: the mesh axis of the stages.
        over: the mesh axes that slice the batch.
        stages, copies, microbatches: how many; there is a copy of the layers for each slice of the batch.
        outside: the layout around the pipeline.
        around: that of a tick, in which stages and copies are dimensions.
        inside: that of one stage's layers on one slice of the batch.
    """

    layers: str
    axis: str
    over: tuple[str, ...]
    stages: int
    copies: int
    microbatches: int
    outside: Layout
    around: Layout
    inside: Layout

    @staticmethod
    def of(layers: Axis, axis: str, batch: int) -> "_Plan":
        outside = dataclasses.replace(current_layout().even(), cut=())
        stages = outside.mesh.shape[axis]
        (over,) = outside.without(axis).assign((BATCH,))
        copies = math.prod(outside.mesh.shape[a] for a in over)
        count = microbatches_of(outside, axis, batch)
        inside = dataclasses.replace(outside.without(axis).without(*over), cut=(BATCH,), overlap=())
        around = dataclasses.replace(inside, cut=()).with_compute({layers.name: axis, COPIES: over})
        return _Plan(layers.name, axis, over, stages, copies, count, outside, around, inside)

    def cut(self, x: NamedArray) -> NamedArray:
        """Cuts `"batch ..."` into what enters in each tick, `"tick copies batch ..."`, the last microbatch repeated.

        All stages get it. Every device's rows are dealt out in turn, so that nothing else moves.
        """
        x = move(x, self.outside.without(self.axis).assign(x.names), frozenset({self.axis}))
        rows = x.shape[BATCH] // (self.copies * self.microbatches)
        x = split_axis(x, BATCH, {COPIES: self.copies, BATCH: rows, TICK: self.microbatches})
        x = transpose(x, (TICK, COPIES, BATCH, *(n for n in x.names if n not in (TICK, COPIES, BATCH))))
        last = jax.lax.slice_in_dim(x.array, self.microbatches - 1, self.microbatches)
        return x.with_array(jnp.concatenate([x.array, *[last] * (self.stages - 1)]))

    def collect(self, x: NamedArray) -> NamedArray:
        """What the last stage made of each microbatch, as one batch, from `"tick layers copies batch ..."`."""
        x = x[TICK, self.stages - 1 :]
        with self.around:
            x = merge_axes(x, (COPIES, BATCH, TICK), BATCH)
            last = (arange(Axis(self.layers, self.stages)) == self.stages - 1).astype(x.dtype)
        return einsum(
            f"{self.layers}, {' '.join(x.names)} -> {' '.join(n for n in x.names if n != self.layers)}", last, x
        )

    def spread(self, p):
        """A parameter `"layers ..."` as `f32["layers copies in_stage ..."]`: a whole copy for each slice of the batch.

        It takes one gather; the gradient's sum over the batch is one reduce-scatter (an all-reduce if the parameter is
        held whole). If the parameter is held as copies already, its gradient stays the partial sums of those copies,
        for the caller to add up over microbatches and settle once.
        """
        if not is_named(p):
            return p
        (over,) = self.around.assign((COPIES,))
        state = state_of(p.array)
        held = [(), *(tuple(a for a in mine if a in over) for mine in state.axes[1:])]  # layers go to their stages
        copied = state.copied & frozenset(over)
        used = self.inside.assign(p.names)
        p = move(p, ((self.axis,), *((*u, *h) for u, h in zip(used[1:], held[1:], strict=True))), copied)

        def gather(part):
            for dim, mine in enumerate(held):
                for a in reversed(mine):
                    part = jax.lax.all_gather(part, a, axis=dim, tiled=True)
            return jnp.expand_dims(vary(part, over), 1)

        whole = spec_of(((self.axis,), over, *used[1:]))
        dims = tuple(map(Dim, p.names, ((self.axis,), *used[1:])))
        with jax.named_scope(scope_name(f"{p.type} -> {Shape(dims, copied=tuple(sorted(over)))}")):
            inputs = spec_of(state_of(p.array).axes, (), copied)
            array = jax.shard_map(gather, in_specs=inputs, out_specs=whole)(p.array)
        p = NamedArray(array, (p.names[0], COPIES, *p.names[1:]))
        p = p.astype(jnp.float32) if jnp.issubdtype(p.dtype, jnp.floating) else p
        return self.split(p)

    def share(self, p: NamedArray) -> NamedArray:
        """What every layer gets, `"..."`, as `f32["layers copies in_stage ..."]`: one for each stage."""
        return self.spread(broadcast_to(p, {self.layers: self.stages, **p.shape}))

    def by_stage(self, p):
        """What each layer gets, `"layers ..."`, as `"layers in_stage ..."`, the first over the stages."""
        if not is_named(p):
            return p
        with self.outside:
            return self.split(settle(p))

    def split(self, p: NamedArray) -> NamedArray:
        """`"layers ..."` as `"layers in_stage ..."`: the stages, and the layers of one."""
        return split_axis(p, self.layers, {self.layers: self.stages, IN_STAGE: -1})

    def pass_on(self, x: NamedArray) -> NamedArray:
        """Moves every stage's part to the next stage."""
        spec = spec_of(state_of(x.array).axes)
        steps = [(s, s + 1) for s in range(self.stages - 1)]
        permute = lambda part: jax.lax.ppermute(part, self.axis, steps)
        with jax.named_scope(scope_name(f"{x.type} -> {x.type}")):
            return x.with_array(jax.shard_map(permute, in_specs=spec, out_specs=spec)(x.array))


def _is_float(x) -> bool:
    return is_named(x) and jnp.issubdtype(x.dtype, jnp.floating)


def leading(p, layers: Axis):
    """A parameter with the layers' name in front.

    Raises:
        NamesError: it has the name that a pipeline cuts.
    """
    if not is_named(p):
        return p
    if BATCH in p.names:
        raise NamesError(
            f"the layers of a pipeline cannot have the name '{BATCH}', got a parameter {p.type}: rename it there, or "
            f"remove '{layers.name}' from the layout's compute"
        )
    if layers.name not in p.names:
        return broadcast_to(p, {layers.name: layers.size, **p.shape})
    return transpose(p, (layers.name, *(n for n in p.names if n != layers.name)))


def made_alike(parts: Parts, layers: str, axis: str, call: Callable, block, each: tuple):
    """Uneven parts as parts of one size: how a layer is called, the stacked layers, and what each layer gets.

    A part's surplus layers are computed and left out.
    """
    if not parts.uneven:
        return call, block, each
    deal = lambda x: spread(x, layers, axis, parts) if is_named(x) and layers in x.names else x

    def real_only(layer, x, real, *rest):
        made = call(layer, x, *rest)
        return jax.tree.map(lambda new, old: where(real, new, old), made, x, is_leaf=is_named)

    real = NamedArray(jnp.asarray(parts.real()), (layers,))
    block, each = (jax.tree.map(deal, tree, is_leaf=is_named) for tree in (block, each))
    return real_only, block, (real, *each)


def _renamed(tree, layers: str):
    """The layers of one stage under the layers' own name again."""
    return jax.tree.map(lambda p: p.rename(in_stage=layers) if is_named(p) else p, tree, is_leaf=is_named)
