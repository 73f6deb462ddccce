"""Homogeneous layers: stacked under a name and scanned (one compilation), or unrolled, under one interface."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax

from trellis.mesh.layout import current_layout
from trellis.named.around import any_narrow
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import Axis, NamesError
from trellis.named.backend import written_out
from trellis.named.index import index, positions
from trellis.named.pipeline import cut
from trellis.named.pipeline.by_vmap import fold_pipeline, made_alike, pipeline_axis
from trellis.named.pipeline.parts import Parts
from trellis.named.random import split
from trellis.named.saving import Keep
from trellis.named.scan import loop
from trellis.named.vmap import vmap
from trellis.notation.state import state_of


class Stacked(eqx.Module):
    """Layers of one kind: every parameter of the block gets the layers' name in front.

    `layers.fold(x)` computes `for layer in layers: x = layer(x)` as a scan, so the
    block is traced and compiled once; `unrolled=True` runs them one by one.

    Attributes:
        block: the block, with stacked parameters; a tuple of blocks if they are taken apart.
        axis: the layers' axis.
        unrolled: one after the other instead of a scan.
        unroll: how many layers one iteration of the scan holds. None: on a CPU and on a GPU that is alone, where a loop
            copies every saved value into and out of a stack, all of them if there are at most 16 or 64; else one.
    """

    block: eqx.Module | tuple[eqx.Module, ...]
    axis: Axis = eqx.field(static=True)
    unrolled: bool = eqx.field(static=True, default=False)
    unroll: int | None = eqx.field(static=True, default=None)

    @staticmethod
    def init(make: Callable, axis: Axis, *, key, unrolled: bool = False, unroll: int | None = None) -> "Stacked":
        """Makes the layers: `Stacked.init(lambda key: Block(config, key=key), Axis("layers", 4), key=key)`.

        Raises:
            NamesError: the layers are not an axis.
        """
        if not isinstance(axis, Axis):
            raise NamesError(
                f"layers must be made along an axis, got {axis!r}, in Stacked.init: write Axis('layers', 4)"
            )
        return Stacked(vmap(make, axis)(split(key, axis)), axis, unrolled, unroll)

    def layer(self, i: int):
        """The block at one position."""
        if isinstance(self.block, tuple):
            return self.block[i]
        return jax.tree.map(lambda p: index(p, {self.axis.name: i}) if is_named(p) else p, self.block, is_leaf=is_named)

    def apart(self) -> "Stacked":
        """The same layers, each with parameters of its own, if they are written out; else these layers.

        If several microbatches use the parameters, XLA cuts each layer's out of the stack for every one, and stacks the
        gradients of all layers for every one.
        """
        leaves, structure = jax.tree.flatten(self.block, is_leaf=is_named)
        stacked = [is_named(p) and self.axis.name in p.names for p in leaves]
        if (
            isinstance(self.block, tuple)
            or self.unrolled
            or self.unroll
            or not self._written_out(leaves)
            or any(p.names[0] != self.axis.name or state_of(p.array).axes[0] for p, s in zip(leaves, stacked) if s)
        ):
            return self
        taken = [
            [NamedArray(part, p.names[1:], p.slices[1:]) for part in positions(p.array, 0)]
            if s
            else [p] * self.axis.size
            for p, s in zip(leaves, stacked, strict=True)
        ]
        return dataclasses.replace(self, block=tuple(map(structure.unflatten, zip(*taken, strict=True))))

    def fold(self, x, *args, each=(), call: Callable | None = None, policy: Keep | None = None):
        """Carries `x` through the layers.

        Args:
            x: what the first layer gets; each layer's result goes to the next.
            *args: passed to every layer. Their gradients are summed over the layers of a compiled loop, in float32 if
                they have fewer bits; what `call` closes over is summed in its own type.
            each: a tree of arrays with the layers' name; every layer gets its position.
            call: `call(layer, x, *each, *args)` instead of `layer(x, *each, *args)`.
            policy: what each layer keeps for the backward pass.
        """
        if (met := cut.meet(cut.Fold(self, x, args, tuple(each), _call(call), policy, makes=False))) is not None:
            return met[0]
        axis = pipeline_axis(self.axis)
        if axis is not None:
            parts = Parts.of(self.axis, current_layout().mesh.shape[axis])
            run, block, each = made_alike(parts, self.axis.name, axis, _call(call), self.block, tuple(each))

            def stage(x, args, block, each):
                part = dataclasses.replace(self, block=block, axis=self.axis.resize(parts.most))
                return part.fold(x, *args, each=each, call=run, policy=policy)

            return fold_pipeline(stage, self.axis.resize(parts.most * parts.stages), axis, x, args, block, each)
        return self._run(lambda layer, x, *rest: (_call(call)(layer, x, *rest), None), x, args, each, policy)[0]

    def scan(self, x, *args, each=(), call: Callable | None = None, policy: Keep | None = None):
        """`fold` for layers that give `(x, y)`: also the ys, under the layers' name.

        Never a pipeline: if a layout spreads the layers over a mesh axis in use, they are gathered first.
        """
        if (met := cut.meet(cut.Fold(self, x, args, tuple(each), _call(call), policy, makes=True))) is not None:
            return met[0]
        return self._run(_call(call), x, args, each, policy)

    def _written_out(self, carried) -> bool:
        weights = lambda: sum(getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self.block))
        return written_out(self.axis.size, carried, weights)

    def _run(self, body, x, args, each, policy):
        one = lambda carry, block, each: body(block, carry, *each, *args)
        if isinstance(self.block, tuple):
            return loop(one, self.axis, False, 1, policy, once=jax.jit, own=self.block)(x, tuple(each))
        if self.unrolled:
            run = loop(one, self.axis, False, self.axis.size, policy, once=lambda layer: layer)
        else:
            unroll = self.unroll or (self.axis.size if self._written_out(x) else 1)
            wide = bool(args) and any_narrow(args)
            run = loop(one, self.axis, False, unroll, policy, once=jax.jit, wide=wide)
        return run(x, self.block, tuple(each))

    def __call__(self, x, *args, **kwargs):
        return self.fold(x, *args, **kwargs)


def taken_apart(params):
    """A tree of parameters with its stacks taken apart (`Stacked.apart`)."""
    is_stack = lambda p: isinstance(p, Stacked)
    return jax.tree.map(lambda p: p.apart() if is_stack(p) else p, params, is_leaf=is_stack)


def _call(call: Callable | None) -> Callable:
    return call or (lambda layer, x, *rest: layer(x, *rest))
