"""The pieces of a pipeline: what enters, a stage, what leaves, and the gradient of each, as traced programs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from trellis.named.array import is_named
from trellis.named.axis import NamesError
from trellis.named.pipeline.cut import Fold, after, before
from trellis.named.pipeline.traced import Traced
from trellis.notation import spec_of
from trellis.notation.state import state_of
from trellis.program.reading import jaxprs_in


@dataclasses.dataclass(frozen=True)
class Source:
    """What is to be run as a pipeline.

    Attributes:
        name: of the layers' axis.
        function: `function(params, part) -> (loss, sums)` of one microbatch, in which the layers run.
        rebuild: parameters, from the list of those outside of the layers.
        outer: types of these, as they are used.
        block: the tree of the parameters of one stage's group of layers.
        chunk: their types, a list.
        part: types of one microbatch.
        count: how many layers there are.
        groups: of layers, on all stages together.
    """

    name: str
    function: Callable
    rebuild: Callable
    outer: list[jax.ShapeDtypeStruct]
    block: Any
    chunk: list[jax.ShapeDtypeStruct]
    part: Any
    count: int
    groups: int

    @property
    def rows(self) -> int:
        """Layers of a group."""
        return self.count // self.groups


def struct(array, mesh: jax.sharding.AbstractMesh, axes=None, shape=None) -> jax.ShapeDtypeStruct:
    """A type like that of an array on a mesh with fewer axes, of another shape, sliced otherwise."""
    state = state_of(array)
    axes, shape = (state.axes if axes is None else axes), (array.shape if shape is None else shape)
    known = frozenset(mesh.axis_names)
    spec = spec_of(axes, state.pending & known, state.copied & known)
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))


NAMES = ("enter", "context", "stage", "leave", "stage_back", "enter_back")


class Pieces:
    """The traced pieces; each is of whole arrays, for one microbatch.

    Attributes:
        enter: `(outer, part) -> carried`, for the first stage.
        context: `(outer, part) -> (args, each)`, what all layers get, and what each gets.
        stage: `(chunk, carried, args, each, start) -> (carried, kept)`, the second what the backward pass needs.
        stage_back: `(chunk, carried, args, each, start, kept, d_carried) -> (d_chunk, d_carried)`.
        leave: `(outer, part, carried) -> (sums, d_outer, d_carried)`.
        enter_back: `(outer, part, d_carried) -> d_outer`.
    """

    def __init__(self, source: Source):
        self.source = source
        self.outer, self.chunk, self.part = source.outer, source.chunk, source.part
        mesh = self.chunk[0].sharding.mesh
        self.start = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))
        self.fold: Fold
        x = Traced.of(lambda *args: self._before(*args).x, self.outer, self.part)
        self.enter = without_dead(x)
        self._check_enter()
        pair = lambda *args: (lambda fold: (fold.args, fold.each))(self._before(*args))
        self.context = without_dead(Traced.of(pair, self.outer, self.part))
        self._check_context()
        self.args, self.each = self.context.out
        self.carried = (self.enter.out, self._made())
        self._trace_gradients()

    def all(self) -> dict[str, Traced]:
        """Every traced piece."""
        return {name: getattr(self, name) for name in NAMES}

    # What is traced.

    def _before(self, outer, part) -> Fold:
        self.fold = before(self.source.name, self.source.function, self.source.rebuild(outer), part)
        return self.fold

    def _stage(self, chunk, carried, args, each, start):
        fold, (x, made) = self.fold, carried
        layers, mine = self._layers(chunk, each, start)
        if not fold.makes:
            return layers.fold(x, *args, each=mine, call=fold.call, policy=fold.policy), made
        x, new = layers.scan(x, *args, each=mine, call=fold.call, policy=fold.policy)
        put = lambda all_, y: jax.lax.dynamic_update_slice_in_dim(all_, y.astype(all_.dtype), start, 0)
        return x, jax.tree.map(put, made, new)

    def _layers(self, chunk, each, start):
        """One stage's group of layers, and its rows of what each layer gets."""
        block = jax.tree.unflatten(self.source.block, chunk)
        layers = dataclasses.replace(self.fold.stack, block=block, axis=self.fold.stack.axis.resize(self.source.rows))
        return layers, jax.tree.map(lambda e: self._rows(e, start), each, is_leaf=is_named)

    def _finish(self, outer, carried, part):
        result = carried if self.fold.makes else carried[0]
        return after(self.source.name, self.source.function, result, self.source.rebuild(outer), part)

    def _trace_gradients(self) -> None:
        rebuilt = {}

        def forward(chunk, carried, args, each, start):
            run = lambda chunk, carried: self._stage(chunk, carried, args, each, start)
            out, pull = jax.vjp(run, chunk, carried)
            kept, rebuilt["pull"] = _split(pull, (chunk, carried))
            return out, kept

        def backward(chunk, carried, args, each, start, kept, d_carried):
            return rebuilt["pull"]((chunk, carried), kept)(d_carried)

        stage = (self.chunk, self.carried, self.args, self.each, self.start)
        self.stage = Traced.of(forward, *stage)
        kept = self.stage.out[1]
        self.stage_back = without_dead(Traced.of(backward, *stage, kept, self.carried))

        def leave(outer, part, carried):
            finish = lambda outer, carried: self._finish(outer, carried, part)
            (_, sums), (d_outer, d_carried) = jax.value_and_grad(finish, argnums=(0, 1), has_aux=True)(outer, carried)
            return sums, d_outer, d_carried

        def enter_back(outer, part, d_x):
            _, pull = jax.vjp(lambda outer: self._before(outer, part).x, outer)
            return pull(d_x)[0]

        self.leave = without_dead(Traced.of(leave, self.outer, self.part, self.carried))
        self.enter_back = without_dead(Traced.of(enter_back, self.outer, self.part, self.enter.out))

    def _check_enter(self) -> None:
        """A permute is one of all devices, in the backward pass too; a gather is one of those that it names."""
        if _permutes(self.enter.closed.jaxpr):
            raise NamesError(
                f"what comes before the '{self.source.name}' of a pipeline runs on its first stage alone, where no "
                "permute may stand, got one, as of a ring along sliced positions: reach other slices by a gather or an "
                "exchange (the layout's context), or take the positions or the layers out of the layout's compute"
            )

    def _check_context(self) -> None:
        """What all layers get is made again on every stage; of parameters its gradient would have to come back."""
        count = len(self.outer)
        live = dce_jaxpr(self.context.closed.jaxpr, [True] * len(self.context.closed.jaxpr.outvars))[1]
        if any(live[:count]):
            raise NamesError(
                "what all layers of a pipeline get is made of the batch alone, got an argument of the layers that is "
                "made of parameters: give it to the layers as a part of what they carry"
            )

    def _made(self):
        """Types of what all layers make beside what they carry, each under the layers' name."""
        if not self.fold.makes:
            return None
        fold, mesh = self.fold, self.start.sharding.mesh

        def scanned(chunk, x, args, each, start):
            layers, mine = self._layers(chunk, each, start)
            return layers.scan(x, *args, each=mine, call=fold.call, policy=fold.policy)[1]

        one = jax.eval_shape(scanned, self.chunk, self.enter.out, self.args, self.each, self.start)
        return jax.tree.map(lambda y: struct(y, mesh, shape=(self.source.count, *y.shape[1:])), one)

    def _rows(self, x, start):
        """One group's rows of what each layer gets."""
        name = self.fold.stack.axis.name
        if not (is_named(x) and name in x.names):
            return x
        dim = x.index(name)
        return x.with_array(jax.lax.dynamic_slice_in_dim(x.array, start, self.source.rows, dim))


def _permutes(jaxpr) -> bool:
    equations = jaxpr.eqns
    return any(e.primitive.name == "ppermute" or any(map(_permutes, jaxprs_in(e))) for e in equations)


def without_dead(traced: Traced) -> Traced:
    """The same without what nothing reads, all arguments kept."""
    jaxpr = traced.closed.jaxpr
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    consts = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
    closed = jax.extend.core.ClosedJaxpr(live, [consts[v] for v in live.constvars if v in consts])
    return Traced(closed, traced.out)


def _split(pull: Callable, arguments) -> tuple[list[jax.Array], Callable]:
    """A function that `jax.vjp` gave, taken apart: what it keeps besides the arguments of the differentiated function,
    and `rebuild(arguments, kept)`, which puts it together again."""
    leaves, structure = jax.tree.flatten(pull)
    number = {id(x): i for i, x in enumerate(jax.tree.leaves(arguments))}
    given = [number.get(id(leaf)) for leaf in leaves]
    keeps = [i is None and isinstance(leaf, jax.Array) for i, leaf in zip(given, leaves, strict=True)]
    kept = [leaf for leaf, keep in zip(leaves, keeps, strict=True) if keep]
    # Of the others only marks stay: arrays belong to the trace that is over.
    marks = [None if keep or i is not None else leaf for leaf, keep, i in zip(leaves, keeps, given, strict=True)]

    def rebuild(arguments, kept):
        flat, rest = jax.tree.leaves(arguments), iter(kept)
        found = [
            next(rest) if keep else mark if i is None else flat[i]
            for keep, mark, i in zip(keeps, marks, given, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    return kept, rebuild
