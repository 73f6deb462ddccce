"""Manual mode: `shard_map` that reads its shardings from the function's annotations."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.sharding import AxisType, PartitionSpec

from trellis._compat import manual_beside_explicit_axes, mapped_over, unknown_axis, zeros_in_their_states
from trellis.mesh.landing import placed
from trellis.mesh.manual.check import check_pending, met_line
from trellis.mesh.manual.mapped import map_over_states
from trellis.mesh.manual.ops import without_single_axes
from trellis.mesh.manual.refusals import none_manual, not_along, raise_in_notation, raise_of_call
from trellis.mesh.manual.reshard import TransitionError, check_slice
from trellis.mesh.manual.rules import with_checked_rules
from trellis.mesh.manual.single import trace_body
from trellis.mesh.manual.slices import check_slices, no_slice, otherwise, sliced_as
from trellis.mesh.meshes import MeshError, mesh_text, same_mesh, without_axes
from trellis.notation import (
    ArrayType,
    Bindings,
    NotationError,
    PendingSumError,
    Shape,
    TypeMismatch,
    spec_of,
    typeof,
)
from trellis.notation.annotation import DType, array_types, hint_text, hints_of, written
from trellis.notation.binding import bind_shape, binding, check_array, check_divides, held_shape, manual_axes, real_axes
from trellis.notation.checked import Leaf, is_typed_leaf, typed_leaves
from trellis.notation.state import axes_in, mesh_of, mode_of, state_of
from trellis.notation.typeof import is_array, is_named
from trellis.program.reading import Program
from trellis.program.trace import equations_of

map_over_states()


def shard_map(fn: Callable | None = None, *, mesh=None, axes: "typing.Collection[str] | None" = None) -> Callable:
    """Runs a function on each device's slices; the annotations say what is sliced over what.

    Arguments and the result are annotated arrays, named arrays, structs or
    other dataclasses, named tuples, stacks, or containers of these. Inside, an array is one device's slice, but
    its type keeps the whole sizes: a name has one length in the call, and the
    texts of `einsum`, `reshard` and the other verbs are checked against it.

    If a dimension is written without a mesh axis, and no state is written, the
    array is the same on all devices. Each array must come in as its annotation
    says: nothing is moved to make it so. A pending sum that is not settled, or
    is used for anything but a sum, is refused while tracing.

        @struct
        class Weights:
            w1: f32["in hidden/d"]

        @shard_map
        def forward(x: f32["batch/d in"], w: Weights) -> f32["batch/d hidden"]:
            w1 = all_gather("in hidden/d -> in hidden ~d", w.w1)
            return jax.nn.relu(einsum("batch/d in, in hidden ~d -> batch/d hidden", x, w1))

    Args:
        fn: the function. Arguments whose annotation mentions no array are
            passed through as they are.
        mesh: the mesh; the one in force (`with layout:`, `jax.set_mesh`) if not given.
        axes: the mesh axes that are manual; all if not given. The others are
            left to the surrounding program: sizes inside are whole along them,
            and arrays keep their sharding over them. JAX types carry no pending
            sums and copies then, so results cannot have them.

    Raises:
        TypeMismatch: an argument, the result, or an array inside is not what its text says.
        PendingSumError: a pending sum is used or returned unsettled.
        NotationError: an annotation is missing, or does not fit the mesh.
    """
    if fn is None:
        return functools.partial(shard_map, mesh=mesh, axes=axes)
    if not callable(fn):
        raise NotationError(
            f"shard_map takes a function, got {type(fn).__name__}, in shard_map: write @shard_map above one"
        )
    signature = inspect.signature(fn)
    name = getattr(written(fn), "__qualname__", repr(fn)).rsplit("<locals>.", 1)[-1]
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NotationError(
                f"a manual function cannot take *args or **kwargs, got '{parameter}', in `{name}`: name the "
                "arguments, or pass a list"
            )

    @functools.wraps(fn)
    def call(*args, **kwargs):
        return _Call(fn, signature, name, mesh, axes).run(args, kwargs)

    return call


class _Call:
    """One call of a manual function."""

    def __init__(self, fn, signature, name: str, mesh, axes):
        self.fn, self.signature, self.name, self.mesh, self.asked = fn, signature, name, mesh, axes
        self.hints = hints_of(fn)
        self.bindings = Bindings(name)
        self.rebuild: Callable | None = None

    def run(self, args, kwargs):
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        trees, leaves = {}, []
        for argument, value in bound.arguments.items():
            hint, place = self.hints.get(argument), f"argument `{argument}` of `{self.name}`"
            mine = self.typed(value, hint, place)
            if mine is not None:
                trees[argument] = jax.tree.structure(value, is_leaf=is_typed_leaf)
                leaves.append((argument, mine))
        every = [leaf for _, mine in leaves for leaf in mine]
        self.resolve_mesh(every)
        results = self.result_types()
        arrays, specs = self.enter(every)

        def body(*slices):
            return self.body(bound, trees, leaves, slices, specs, results)

        mapped = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=[spec for spec, _ in results],
            axis_names=set(self.manual),
        )
        try:
            grouped = mapped(*arrays)
        except Exception as error:
            raise_of_call(error, self.name, self.shape, self.left)
            raise
        assert self.rebuild is not None  # the body has been traced
        return self.rebuild(grouped)

    # Before.

    def typed(self, value, hint, place: str) -> list[Leaf] | None:
        if not array_types(hint):
            if any(
                isinstance(leaf, jax.Array) or is_named(leaf) for leaf in jax.tree.leaves(value, is_leaf=is_typed_leaf)
            ):
                raise NotationError(
                    f"a manual function's arrays must be annotated, got {typeof(value)} and no annotation, in "
                    f'{place}: write its type, as in f32["batch/data embed"]'
                )
            return None
        leaves = [_number(leaf) for leaf in typed_leaves(value, hint, place)]
        for leaf in leaves:
            if leaf.kind is None and is_array(leaf.value):
                raise NotationError(
                    f"a manual function's arrays must be annotated, got {typeof(leaf.value)} where {hint_text(hint)} "
                    f"has no array, in {leaf.place}: annotate that field, or pass what the annotation says"
                )
        return leaves

    def resolve_mesh(self, leaves: list[Leaf]) -> None:
        ambient = jax.sharding.get_abstract_mesh()
        if (given := self.mesh) is None and ambient.empty:
            array = next((_plain(leaf.value) for leaf in leaves if is_array(leaf.value)), None)
            given = getattr(getattr(array, "sharding", None), "mesh", None)
            if given is None or given.empty:
                raise NotationError(
                    f"manual mode needs a mesh, got none, in `{self.name}`: call it inside `with layout:`, or write "
                    "shard_map(mesh=...)"
                )
            self.mesh = given
        shown = ambient if given is None else given
        self.around = shown
        if mapped := mapped_over():  # types inside a map over slices have no such axes
            shown, self.mesh = without_axes(shown, mapped), None
        taken = frozenset(ambient.manual_axes) if not ambient.empty else frozenset()
        asked = frozenset(shown.axis_names) if self.asked is None else frozenset(self.asked)
        if unknown := sorted(asked - set(shown.axis_names)):
            raise NotationError(
                f"manual axes must be axes of the mesh, got '{unknown[0]}' where the mesh has "
                f"{', '.join(shown.axis_names)}, in `{self.name}`: use one of these"
            )
        if self.asked is not None and asked & taken:
            raise NotationError(
                f"a mesh axis cannot become manual twice, got '{sorted(asked & taken)[0]}', which is manual around "
                f"this call, in `{self.name}`: remove it from axes"
            )
        if not asked - taken:
            raise NotationError(none_manual(self.name, shown, asked))
        single = {axis for axis, size in shown.shape.items() if size == 1}
        self.shape = shown
        self.manual = tuple(a for a in shown.axis_names if a in (asked | single) - taken)
        self.left = [a for a in shown.axis_names if a not in (*self.manual, *single)]
        self.partly = bool(self.left)
        if self.partly:
            manual_beside_explicit_axes()
        else:
            zeros_in_their_states()

    def spec(self, kind: ArrayType, place: str, array=None) -> PartitionSpec:
        """How JAX slices an array of this type over the manual axes; an argument's leading dimensions as they are."""
        for axis in (*kind.shape.mesh_axes, *kind.shape.pending, *kind.shape.copied):
            if axis not in self.shape.shape:
                raise NotationError(
                    f"an annotation can only name axes of the mesh, got '{axis}' in {kind} where the mesh has "
                    f"{', '.join(self.shape.axis_names)}, in {place}: use one of these, or add '{axis}' to the mesh "
                    "(size 1 will do)"
                )
        shape = real_axes(kind.shape, self.shape)
        if self.partly and (states := (*shape.pending, *shape.copied)):
            raise NotationError(
                "JAX can pass pending sums and copies into or out of a function only if all mesh axes are manual, got "
                f"{kind} with some axes left to the surrounding program, in {place}: settle '{states[0]}' on the "
                "other side, or make all axes manual"
            )
        axes = []
        for dim in shape.dims:
            mine = self.manual_only(dim.axes)
            if dim.axes[: len(mine)] != mine:
                raise NotationError(
                    f"the manual axes of a dimension must be its major ones, got '{dim}' with manual "
                    f"{', '.join(self.manual)}, in {place}: write {'/'.join((str(dim.name), *mine))} first"
                )
            axes.append(mine)
        if kind.shape.ellipsis:
            if array is None:
                raise NotationError(
                    f"a manual function's result must have all its dimensions named, got {kind}, in {place}: write "
                    "them instead of '...'"
                )
            lead = state_of(array).axes[: len(array.shape) - len(axes)]
            axes = [*(self.manual_only(mine) for mine in lead), *axes]
        return spec_of(axes, shape.pending, shape.copied)

    def manual_only(self, axes) -> tuple[str, ...]:
        """The manual axes among these, without those of size 1."""
        return tuple(a for a in axes if a in self.manual and self.shape.shape[a] > 1)

    def enter(self, leaves: list[Leaf]):
        """Checks the arguments as whole arrays; gives the plain arrays and how to slice them."""
        arrays, specs = [], []
        for leaf in leaves:
            if leaf.kind is None:
                continue
            if not is_array(leaf.value):
                check_array(leaf.value, leaf.kind, leaf.place, self.bindings)
            array = _plain(leaf.value)
            spec = self.spec(leaf.kind, leaf.place, array)
            check_array(leaf.value, leaf.kind, leaf.place, self.bindings, strict=True)
            named = leaf.kind.shape.dims
            for dim, size in zip(named, array.shape[len(array.shape) - len(named) :], strict=True):
                check_divides(dim.name, size, self.manual_only(dim.axes), self.shape.shape, leaf.place)
            arrays.append(self.without_single_axes(self.on_mesh(array, spec, leaf)))
            specs.append(spec)
        return arrays, specs

    def on_mesh(self, array, spec: PartitionSpec, leaf: Leaf):
        """Places an array that is on no mesh: it is whole on every device, and each takes its slice.

        Raises:
            MeshError: it is on another mesh.
            TypeMismatch: it is to be a pending sum, which only an array on the mesh can be.
        """
        mesh = jax.typeof(array).sharding.mesh
        if mode_of(self.shape) != "explicit" or same_mesh(mesh, self.shape) or same_mesh(mesh, self.around):
            return array
        if not mesh.empty:
            raise MeshError(
                f"a manual function's arrays must be on its mesh, ({mesh_text(self.shape)}), got {typeof(leaf.value)} "
                f"of another mesh ({mesh_text(mesh)}), in {leaf.place}: move it there first, with jax.device_put"
            )
        if spec.unreduced:
            raise TypeMismatch(
                f"an array that is on no mesh cannot be a pending sum, got {typeof(leaf.value)} for {leaf.kind}, in "
                f"{leaf.place}: remove '+{sorted(spec.unreduced)[0]}' from the annotation"
            )
        return placed(array, spec, self.mesh)

    def without_single_axes(self, array):
        """Drops mesh axes of size 1, which JAX's types may mention and ours do not."""
        state = state_of(array)
        if state.mode != "explicit":
            return array
        mesh = mesh_of(array)

        def keep(axes):
            return tuple(a for a in axes if mesh.shape[a] > 1)

        axes = [keep(mine) for mine in state.axes]
        if axes == list(state.axes) and all(mesh.shape[a] > 1 for a in state.pending | state.copied):
            return array
        return jax.reshard(array, spec_of(axes, keep(state.pending), keep(state.copied)))

    def result_types(self) -> list[tuple[PartitionSpec, set[ArrayType]]]:
        """The different shardings of the results, and the annotated types with each."""
        hint, place = self.hints.get("return"), f"result of `{self.name}`"
        kinds = array_types(hint)
        if not kinds:
            raise NotationError(
                f"a manual function's result must be annotated, got {hint!r}, in {place}: "
                f"write '-> f32[\"batch/data\"]'"
            )
        grouped: list[tuple[PartitionSpec, set[ArrayType]]] = []
        for kind in kinds:
            spec = self.spec(kind, place)
            group = next((kinds for other, kinds in grouped if other == spec), None)
            if group is None:
                grouped.append((spec, group := set()))
            group.add(kind)
        return grouped

    # Inside.

    def body(self, bound, trees, leaves, slices, specs, results):
        out: dict = {}
        kinds = [leaf.kind for _, mine in leaves for leaf in mine if leaf.kind is not None]

        def program(*slices):
            rest = iter(slices)
            for argument, mine in leaves:
                values = [leaf.value if leaf.kind is None else self.slice(leaf, next(rest)) for leaf in mine]
                bound.arguments[argument] = jax.tree.unflatten(trees[argument], values)
            result = self.fn(*bound.args, **bound.kwargs)
            place = f"result of `{self.name}`"
            out["tree"] = jax.tree.structure(result, is_leaf=is_typed_leaf)
            out["leaves"] = [_number(leaf) for leaf in typed_leaves(result, self.hints["return"], place)]
            for leaf in out["leaves"]:
                if leaf.kind is None and is_array(leaf.value):
                    raise TypeMismatch(
                        f"a result must match its annotation, got {typeof(leaf.value)} where "
                        f"{hint_text(self.hints['return'])} has no array, in {leaf.place}: return what the annotation "
                        "says, or correct it"
                    )
                if leaf.kind is not None and not is_array(leaf.value):
                    check_array(leaf.value, leaf.kind, leaf.place, self.bindings)
            return [_plain(leaf.value) for leaf in out["leaves"] if leaf.kind is not None]

        with binding(self.bindings):
            try:
                traced = trace_body(program, slices, [kind.shape for kind in kinds], self.bindings)
            except Exception as error:
                if (name := unknown_axis(error, manual_axes())) is not None:
                    raise MeshError(not_along(name, self.name, self.shape)) from error
                raise_in_notation(error, self.bindings)
                raise
            read = Program(traced.jaxpr)
            pending, lie, untold = self.checked(read, [axes_in(spec, x.ndim) for spec, x in zip(specs, slices)])
            run = functools.partial(eval_jaxpr, with_checked_rules(traced.jaxpr, self.bindings), traced.consts)
            if any(equations_of(traced.jaxpr, "shard_map")):
                run = jax.jit(run)  # JAX runs one inside another only in a compiled program (0.10.2)
            arrays = run(*slices)
            typed = [leaf for leaf in out["leaves"] if leaf.kind is not None]
            for leaf, dims, value in zip(typed, lie, read.results, strict=True):
                self.check_result(leaf)
                self.check_lies(leaf, dims)
                self.check_same(leaf, untold.get(value, frozenset()))
            met = [functools.partial(met_line, read, value) for value in read.results]
            arrays = [self.leave(leaf, *each) for leaf, *each in zip(typed, arrays, pending, met, strict=True)]
        groups = [[] for _ in results]
        index = []
        for leaf, array in zip(typed, arrays, strict=True):
            group = next(i for i, (_, kinds) in enumerate(results) if leaf.kind in kinds)
            index.append((group, len(groups[group])))
            groups[group].append(array)

        def rebuild(grouped):
            whole = iter([grouped[group][i] for group, i in index])
            values = [leaf.value if leaf.kind is None else _like(leaf.value, next(whole)) for leaf in out["leaves"]]
            return jax.tree.unflatten(out["tree"], values)

        self.rebuild = rebuild
        return groups

    def slice(self, leaf: Leaf, array):
        """One device's slice, in the argument's own form."""
        if not is_named(leaf.value):
            return self.bindings.made(array, self.real(leaf.kind))
        lead = len(leaf.value.names) - len(leaf.kind.shape.dims)
        shape = real_axes(leaf.kind.shape, self.shape)
        leading = state_of(leaf.value.array).axes[:lead]
        slices = tuple(map(self.manual_only, leading)) + tuple(self.manual_only(dim.axes) for dim in shape.dims)
        return type(leaf.value)(array, leaf.value.names, slices)

    def real(self, kind: ArrayType) -> Shape:
        """An annotated type without mesh axes of size 1."""
        return real_axes(kind.shape, self.shape)

    def checked(self, program: Program, given: list):
        """Along which mesh axes each result is pending, how it is sliced, and what JAX's types do not say of values.

        A lost sum is the first thing to tell, but what types do not say is known only once slices were followed.
        """
        untold, wrong = None, None
        try:
            lie, untold = check_slices(program, given, self.bindings)
        except TypeMismatch as error:
            wrong = error
        pending = check_pending(program, self.bindings, untold)
        if wrong is not None:
            raise wrong
        return pending, lie, untold

    def check_result(self, leaf: Leaf) -> None:
        """Checks the names, dtype and sizes of a result; its sharding is checked in `leave`."""
        bare = ArrayType(leaf.kind.dtype, leaf.kind.shape.bare())
        check_array(leaf.value, bare, leaf.place, Bindings(self.name))
        if own := getattr(leaf.value, "slices", ()):  # a named array remembers how it is sliced
            wanted = [self.manual_only(dim.axes) for dim in real_axes(leaf.kind.shape, self.shape).dims]
            if [self.manual_only(axes) for axes in own][len(own) - len(wanted) :] != wanted:
                raise TypeMismatch(
                    f"a result must be sliced as its annotation says, got {typeof(leaf.value)} for {leaf.kind}, in "
                    f"{leaf.place}: reshard it before the function ends, or correct the annotation"
                )
        bind_shape(leaf.kind.shape, _plain(leaf.value), leaf.place, self.bindings)

    def check_lies(self, leaf: Leaf, dims: tuple) -> None:
        """Checks which dimensions of a result mesh axes slice, and in which order: JAX's type does not say it."""
        wanted = self.real(leaf.kind)
        if otherwise(dims, tuple(self.manual_only(dim.axes) for dim in wanted.dims)):
            why, fix = no_slice(wanted, dims)
            raise TypeMismatch(
                f"a result must match its annotation, got a slice '{sliced_as(wanted, dims)}' for {leaf.kind}{why}, "
                f"in {leaf.place}: {fix or 'reshard it'}, or correct the annotation"
            )

    def check_same(self, leaf: Leaf, untold: frozenset[str]) -> None:
        """Refuses a result that differs along a mesh axis although JAX's type says that it does not."""
        if along := sorted(untold - set(self.real(leaf.kind).mesh_axes)):
            raise TypeMismatch(
                f"a result must match its annotation, got one that differs along {', '.join(along)} for {leaf.kind}, "
                f"in {leaf.place}: gather it before the function ends, or correct the annotation (JAX's types count "
                "the result of argsort, or of a branch or a loop that each device chooses for itself, as the same on "
                "all devices)"
            )

    def leave(self, leaf: Leaf, array, pending: frozenset[str], met: Callable):
        wanted = real_axes(leaf.kind.shape, self.shape)
        if forgotten := sorted(pending - set(wanted.pending)):
            held = Shape(wanted.dims, tuple(sorted(pending)), wanted.copied, wanted.ellipsis)
            raise PendingSumError(
                f"a result must match its annotation, got a sum pending along {', '.join(forgotten)} for {leaf.kind}, "
                f'in {leaf.place}: end the function with reshard("{held} -> {wanted}", ...)'
                + ("" if self.partly else f", or annotate {leaf.kind.dtype}[{held}]")
            )
        if missing := sorted(set(wanted.pending) - pending):
            raise TypeMismatch(
                f"a result must match its annotation, got {typeof(array)}, which has no sum pending along "
                f"{', '.join(missing)}, for {leaf.kind}, in {leaf.place}: remove '+{missing[0]}' from the annotation"
            )
        if self.partly:
            held = held_shape(wanted, array)
            kinds = zip(self.shape.axis_names, self.shape.axis_types, strict=True)
            typed = {a for a, kind in kinds if kind != AxisType.Auto} - set(self.manual)
            left, said = ([tuple(a for a in d.axes if a in typed) for d in each.dims] for each in (held, wanted))
            if left != said:
                raise TypeMismatch(
                    f"a result must match its annotation, got '{held}' for {leaf.kind}, in {leaf.place}: correct the "
                    "mesh axes that are left to the surrounding program"
                )
        try:
            return check_slice(without_single_axes(array), wanted, leaf.place, "a result must match its annotation")
        except TransitionError as error:
            if line := met(wanted.mesh_axes):
                raise type(error)(f"{error}, or gather it before it meets values that do not differ{line}") from None
            raise


def _number(leaf: Leaf) -> Leaf:
    """A leaf with the Python number in place of a scalar made an array, and NumPy's numbers in JAX's bits."""
    if leaf.kind is not None and isinstance(leaf.value, np.ndarray | np.generic) and leaf.value.dtype.kind in "iufc":
        return dataclasses.replace(leaf, value=leaf.value.astype(jax.dtypes.canonicalize_dtype(leaf.value.dtype)))
    if leaf.kind is None or leaf.kind.shape.dims or not isinstance(leaf.value, bool | int | float):
        return leaf
    dtype = None if leaf.kind.dtype == "shaped" else DType(leaf.kind.dtype).jax
    holds = {bool: jnp.generic, int: jnp.number}.get(type(leaf.value), jnp.inexact)
    if dtype is not None and not jnp.issubdtype(dtype, holds):
        return leaf
    return dataclasses.replace(leaf, value=jnp.asarray(leaf.value, dtype))


def _plain(x):
    return x.array if is_named(x) else x


def _like(value, array):
    """A whole result in the form that the function returned its slice in."""
    return type(value)(array, value.names) if is_named(value) else array
