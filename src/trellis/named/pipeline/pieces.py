"""The pieces of a pipeline: what enters, a stage, what leaves, and the gradient of each, as traced programs."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.meshes import on_another
from trellis.mesh.parts import part_of
from trellis.named.array import is_named
from trellis.named.axis import NamesError
from trellis.named.backend import written_out
from trellis.named.index import index
from trellis.named.pipeline.cut import Fold, after, before
from trellis.named.pipeline.parts import BATCH, Parts
from trellis.named.pipeline.traced import Traced
from trellis.named.scan import loop
from trellis.notation import spec_of, typeof
from trellis.notation.state import state_of
from trellis.program.reading import jaxprs_in


@dataclasses.dataclass(frozen=True)
class Together:
    """How all stages together compute what comes after the layers, if they slice some of its parameters.

    Attributes:
        layout: the one in force there, of all mesh axes.
        head: types of these parameters, a list.
        put: `put(params, head)`, the parameters with these in their place.
    """

    layout: Layout
    head: list[jax.ShapeDtypeStruct]
    put: Callable


@dataclasses.dataclass(frozen=True)
class Source:
    """What is to be run as a pipeline.

    Attributes:
        name: the layers' axis.
        function: `function(params, part) -> (loss, sums)` of one microbatch, in which the layers run.
        rebuild: gives the parameters, from the list of those outside of the layers.
        outer: types of these, as they are used.
        layers: the parameters of the layers, as `rebuild` gives them in a stack.
        layer: their types, a list, each with the layers' name in front, of size 1.
        part: types of one microbatch.
        parts: how the layers are cut.
        together: how all stages compute what comes after them; None if the last one does it alone.
    """

    name: str
    function: Callable
    rebuild: Callable
    outer: list[jax.ShapeDtypeStruct]
    layers: list[jax.Array]
    layer: list[jax.ShapeDtypeStruct]
    part: Any
    parts: Parts
    together: Together | None


def struct(array, mesh: jax.sharding.AbstractMesh, axes=None, shape=None) -> jax.ShapeDtypeStruct:
    """A type like an array's on a mesh with fewer axes, perhaps with another shape or other slices."""
    state = state_of(array)
    axes, shape = (state.axes if axes is None else axes), (array.shape if shape is None else shape)
    known = frozenset(mesh.axis_names)
    spec = spec_of(axes, state.pending & known, state.copied & known)
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))


NAMES = ("enter", "context", "row", "layer", "leave", "layer_back", "enter_back")


class Pieces:
    """The traced pieces, each of whole arrays, for one microbatch.

    Each layer is a piece of its own. So a device's program reads its parameters where they are, and puts what it keeps,
    and the gradients, where they stay: nothing of a stage is stacked and copied first.

    Attributes:
        enter: `(outer, part) -> x`, for the first stage.
        context: `(outer, part) -> (args, each)`, what all layers get, and what each gets.
        row: `(each, number) -> each`, what one layer gets of `each`.
        layer: `(block, x, args, each) -> ((x, y), kept)`, `kept` being what the backward pass needs besides the
            arguments.
        layer_back: `(block, x, args, each, kept, d_x, d_y) -> (d_block, d_x)`.
        leave: `(outer, head, part, carried) -> (sums, d_outer, d_head, d_carried)`, with `d_outer` of `left_by` alone;
            of arrays of the whole mesh if all stages compute it together, else `head` is empty.
        enter_back: `(outer, part, d_x) -> d_outer`, with the gradients of `entered_by` alone.
        entered_by: which of the parameters outside of the layers are read before them.
        left_by: which of them are read after the layers.
    """

    def __init__(self, source: Source):
        self.source = source
        self.outer, self.part = source.outer, source.part
        mesh = source.layer[0].sharding.mesh
        self.number = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, jax.P()))
        self.fold: Fold
        self.enter = without_dead(Traced.of(lambda *args: self._before(*args).x, self.outer, self.part))
        self._check_enter()
        self.entered_by = self._read_by(self.enter)
        pair = lambda *args: (lambda fold: (fold.args, fold.each))(self._before(*args))
        self.context = without_dead(Traced.of(pair, self.outer, self.part))
        self._check_context()
        self.args, self.each = self.context.out
        self.row = Traced.of(self._row, self.each, self.number)
        self.carried = (self.enter.out, self._made())
        self._check_carried()
        self._trace_gradients()

    def all(self) -> dict[str, Traced]:
        """Every traced piece."""
        return {name: getattr(self, name) for name in NAMES}

    @property
    def unroll(self) -> int:
        """How many layers of a group one turn of the loop over them holds."""
        stack, rows = self.fold.stack, self.source.parts.least
        return rows if stack.unrolled or written_out(rows, self.enter.out) else min(stack.unroll or 1, rows)

    # What is traced.

    def _before(self, outer, part) -> Fold:
        self.fold = before(self.source.name, self.source.function, self.source.rebuild(outer), part)
        return self.fold

    def _block(self, block) -> tuple[list[int], Any]:
        """Where the parameters of the layers that the program runs are among the model's, and their tree.

        Raises:
            NamesError: one is none of them: what the program makes is not what every stage has.
        """
        given, places = self.source.layers, []
        number = {id(x): i for i, x in enumerate(given)}
        leaves, tree = jax.tree_util.tree_flatten_with_path(block)
        for i, (path, x) in enumerate(leaves):
            if id(x) not in number:
                name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".array")
                raise NamesError(
                    "the layers that a pipeline runs must have the parameters of the model's stack as they are, got "
                    f"another array as `{name}`: make it of the stack's in each layer (`fold` takes a `call`), or hold "
                    "it in the model's stack, without the layers' name if all layers share it"
                )
            places.append(i if i < len(given) and given[i] is x else number[id(x)])
        return places, tree

    def _layer(self, block, x, args, each):
        """One layer. It picks its parameters where it reads them, so its backward pass keeps the arguments."""
        fold, name = self.fold, self.fold.stack.axis.name
        places, tree = self._block(fold.stack.block)
        stack = dataclasses.replace(fold.stack, block=jax.tree.unflatten(tree, [block[i] for i in places]))
        pick = lambda e: index(e, {name: 0}) if is_named(e) and name in e.names else e

        def one(x):
            mine = jax.tree.map(pick, each, is_leaf=is_named)
            with cut_batch(sums=fold.makes):  # what layers measure of a microbatch is summed over all
                made = fold.call(stack.layer(0), x, *mine, *args)
            return made if fold.makes else (made, None)

        return loop(one, fold.stack.axis.resize(1), False, 1, fold.policy, once=lambda body: body)(x)

    def _finish(self, outer, head, carried, part):
        result, params = carried if self.fold.makes else carried[0], self.source.rebuild(outer)
        if self.source.together is not None:
            params = self.source.together.put(params, head)
        return after(self.source.name, self.source.function, result, params, part)

    @contextlib.contextmanager
    def _after_layers(self) -> Generator[tuple]:
        """Where what comes after the layers is traced, and the types of its arguments there."""
        together = self.source.together
        if together is None:
            yield self.outer, [], self.part, self.carried
            return
        mesh = together.layout.mesh
        outer, part, carried = jax.tree.map(
            lambda x: struct(x, mesh.abstract_mesh), (self.outer, self.part, self.carried)
        )
        with on_another(mesh), together.layout:
            yield outer, together.head, part, carried

    def _trace_gradients(self) -> None:
        rebuilt = {}

        def forward(block, x, args, each):
            out, pull = jax.vjp(lambda block, x: self._layer(block, x, args, each), block, x)
            kept, rebuilt["pull"] = _split(pull, (block, x, args, each))
            return out, kept

        def backward(block, x, args, each, kept, d_x, d_y):
            return rebuilt["pull"]((block, x, args, each), kept)((d_x, d_y))

        layer = (self.source.layer, self.enter.out, self.args, self.row.out)
        self.layer = Traced.of(forward, *layer)
        (x, y), kept = self.layer.out
        self.layer_back = without_dead(Traced.of(backward, *layer, kept, x, y))
        self._check_layers()

        def enter_back(outer, part, d_x):
            some = [outer[i] for i in self.entered_by]
            _, pull = jax.vjp(lambda some: self._before(put(outer, self.entered_by, some), part).x, some)
            return pull(d_x)[0]

        self.enter_back = without_dead(Traced.of(enter_back, self.outer, self.part, self.enter.out))
        with self._after_layers() as types:
            self._trace_leave(types)

    def _trace_leave(self, types) -> None:
        def loss(outer, head, part, carried):
            return self._finish(outer, head, carried, part)[1]

        self.left_by = self._read_by(without_dead(Traced.of(loss, *types)))

        def leave(outer, head, part, carried):
            some = [outer[i] for i in self.left_by]
            finish = lambda some, *rest: self._finish(put(outer, self.left_by, some), *rest, part)
            by = jax.value_and_grad(finish, argnums=(0, 1, 2), has_aux=True)
            (_, sums), gradients = by(some, head, carried)
            return sums, *gradients

        self.leave = without_dead(Traced.of(leave, *types))

    def _check_enter(self) -> None:
        """Refuses permutes: they involve all devices, in the backward pass too; a gather involves those named."""
        if _permutes(self.enter.closed.jaxpr):
            raise NamesError(
                f"code before the '{self.source.name}' of a pipeline runs on the first stage only and cannot contain "
                "a permute, got one, as from a ring along sliced positions: reach other slices by a gather or an "
                "exchange (the layout's context), or remove the positions or the layers from the layout's compute"
            )

    def _check_carried(self) -> None:
        """Refuses integers beside the stream: what stages pass on comes back as a gradient."""
        for x in jax.tree.leaves(self.carried, is_leaf=is_named):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise NamesError(
                    "what the layers of a pipeline carry and give must be floating-point numbers, which have a "
                    f"gradient, got {typeof(x)}: make it float32 or, if no layer changes it, pass it to the layers as "
                    "an argument"
                )

    def _check_layers(self) -> None:
        """Refuses permutes in uneven parts: they involve all devices; some stages lack a layer."""
        parts = self.source.parts
        if parts.uneven and any(_permutes(piece.closed.jaxpr) for piece in (self.layer, self.layer_back)):
            raise NamesError(
                "layers that permute (a ring along sliced positions, overlapped products) must be split evenly over "
                f"the stages of a pipeline, got {parts.layers} '{self.source.name}' in {parts.count} parts: use "
                "stages and groups that divide them, or reach other slices by an exchange or, without a window, a "
                "gather (the layout's context), and no overlap"
            )

    def _read_by(self, traced: Traced) -> list[int]:
        """Which of the parameters outside of the layers a piece reads."""
        return [i for i, live in enumerate(_live(traced)[: len(self.outer)]) if live]

    def _check_context(self) -> None:
        """Refuses layers' arguments made of parameters: every stage makes them, and gradients would have to return."""
        if self._read_by(self.context):
            raise NamesError(
                "arguments shared by all layers of a pipeline must be made from the batch alone, got an argument of "
                "the layers that is made from parameters: pass it to the layers as a part of what they carry, or hold "
                "a parameter that all layers share in their stack, without the layers' name"
            )

    def _made(self):
        """Types of what all layers make besides what they carry, each under the layers' name."""
        mesh = self.number.sharding.mesh
        one = jax.eval_shape(self._layer, self.source.layer, self.enter.out, self.args, self.row.out)[1]
        return jax.tree.map(lambda y: struct(y, mesh, shape=(self.source.parts.layers, *y.shape[1:])), one)

    def _row(self, each, number):
        """What one layer gets of `each`."""
        name = self.fold.stack.axis.name
        pick = lambda x: part_of(x.array, number, 1, x.index(name))
        has = lambda x: is_named(x) and name in x.names
        return jax.tree.map(lambda x: x.with_array(pick(x)) if has(x) else x, each, is_leaf=is_named)


def cut_batch(*, sums: bool) -> contextlib.AbstractContextManager:
    """Keeps a program that sees a microbatch from computing along the batch, except for sums if these are added up."""
    layout = current_layout()
    return contextlib.nullcontext() if layout is None else dataclasses.replace(layout, cut=(BATCH,), sums=sums)


def put(arrays: list, places: list[int], some: list) -> list:
    """The arrays, with others at some places."""
    found = dict(zip(places, some, strict=True))
    return [found.get(i, x) for i, x in enumerate(arrays)]


def _live(traced: Traced) -> list[bool]:
    """For each argument, whether a result needs it."""
    jaxpr = traced.closed.jaxpr
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]


def _permutes(jaxpr) -> bool:
    return any(e.primitive.name == "ppermute" or any(map(_permutes, jaxprs_in(e))) for e in jaxpr.eqns)


def without_dead(traced: Traced) -> Traced:
    """The same without what nothing reads; all arguments stay."""
    jaxpr = traced.closed.jaxpr
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    consts = dict(zip(jaxpr.constvars, traced.closed.consts, strict=True))
    closed = ClosedJaxpr(live, [consts[v] for v in live.constvars if v in consts])
    return Traced(closed, traced.out)


def _split(pull: Callable, arguments) -> tuple[list[jax.Array], Callable]:
    """A function from `jax.vjp`, taken apart: what it keeps besides the arguments of the differentiated function, and
    `rebuild(arguments, kept)`, which puts it together again."""
    leaves, structure = jax.tree.flatten(pull)
    number = {id(x): i for i, x in enumerate(jax.tree.leaves(arguments))}
    given = [number.get(id(leaf)) for leaf in leaves]
    keeps = [i is None and isinstance(leaf, jax.Array) for i, leaf in zip(given, leaves, strict=True)]
    kept = [leaf for leaf, keep in zip(leaves, keeps, strict=True) if keep]
    # Only marks of the others stay: arrays belong to the trace that is over.
    marks = [None if keep or i is not None else leaf for leaf, keep, i in zip(leaves, keeps, given, strict=True)]

    def rebuild(arguments, kept):
        flat, rest = jax.tree.leaves(arguments), iter(kept)
        found = [
            next(rest) if keep else mark if i is None else flat[i]
            for keep, mark, i in zip(keeps, marks, given, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    return kept, rebuild
