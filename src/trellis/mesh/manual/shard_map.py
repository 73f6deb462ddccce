"""Manual mode: `shard_map` that reads its shardings from the function's annotations."""

import functools
import inspect
import re
import typing
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from trellis.mesh.manual.check import check_pending, error_line, located, met_line, refusal
from trellis.mesh.manual.einsum import einsum_plain
from trellis.mesh.manual.ops import vary
from trellis.mesh.manual.reshard import TransitionError, check_slice, known_axes, manual_reshard
from trellis.notation import (
    ArrayType,
    Bindings,
    NotationError,
    PendingSumError,
    Shape,
    TypeMismatch,
    parse,
    spec_of,
    typeof,
)
from trellis.notation.annotation import array_types, hints_of
from trellis.notation.binding import bind_shape, binding, check_array, held_shape, live, real_axes
from trellis.notation.checked import Leaf, is_typed_leaf, typed_leaves
from trellis.notation.state import mesh_of, state_of
from trellis.notation.struct import check_divides
from trellis.notation.typeof import is_array, is_named
from trellis.program.reading import Program


def shard_map(fn: Callable | None = None, *, mesh=None, axes: "typing.Collection[str] | None" = None) -> Callable:
    """Runs a function on each device's slices; the annotations say what is sliced over what.

    Arguments and the result are annotated arrays, named arrays, structs,
    stacks, or containers of these. Inside, an array is one device's slice and
    its type keeps the whole sizes: a name has one length in the call, and the
    texts of `einsum`, `reshard` and the other verbs are held against it.

    Where a dimension is written without a mesh axis, and no state is written,
    the array is the same on all devices. Each array comes in as its annotation
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
    signature = inspect.signature(fn)
    name = getattr(fn, "__qualname__", repr(fn)).rsplit("<locals>.", 1)[-1]
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NotationError(
                f"a manual function's arguments each have an annotation, got '{parameter}', in `{name}`: "
                f"name the arguments, or pass a list"
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
        self.rebuild = None

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
            return self.body(bound, trees, leaves, slices, results)

        mapped = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=[spec for spec, _ in results],
            axis_names=set(self.manual),
        )
        try:
            grouped = mapped(*arrays)
        except NotImplementedError as error:
            if "Closing over" not in str(error):
                raise
            raise TypeMismatch(
                f"a manual function takes its arrays as arguments, got one from outside of it, in `{self.name}`: "
                f"pass it as an annotated argument ({str(error).split('Got input with ')[-1]})"
            ) from error
        return self.rebuild(grouped)

    # Before.

    def typed(self, value, hint, place: str) -> list[Leaf] | None:
        if not array_types(hint):
            if any(
                isinstance(leaf, jax.Array) or is_named(leaf) for leaf in jax.tree.leaves(value, is_leaf=is_typed_leaf)
            ):
                raise NotationError(
                    f"a manual function's arrays are annotated, got {typeof(value)} and no annotation, in {place}: "
                    f'write its type, as in f32["batch/data embed"]'
                )
            return None
        leaves = typed_leaves(value, hint, place)
        for leaf in leaves:
            if leaf.kind is None and is_array(leaf.value):
                raise NotationError(
                    f"a manual function's arrays are annotated, got {typeof(leaf.value)} and no annotation, "
                    f"in {leaf.place}: annotate that field"
                )
        return leaves

    def resolve_mesh(self, leaves: list[Leaf]) -> None:
        ambient = jax.sharding.get_abstract_mesh()
        given = self.mesh
        if given is None and ambient.empty:
            array = next((_plain(leaf.value) for leaf in leaves if is_array(leaf.value)), None)
            given = getattr(getattr(array, "sharding", None), "mesh", None)
            if given is None or given.empty:
                raise NotationError(
                    f"manual mode runs on a mesh, got none, in `{self.name}`: call it inside `with layout:`, "
                    f"or write shard_map(mesh=...)"
                )
            self.mesh = given
        shown = ambient if given is None else given
        taken = frozenset(ambient.manual_axes) if not ambient.empty else frozenset()
        asked = frozenset(shown.axis_names) if self.asked is None else frozenset(self.asked)
        if unknown := sorted(asked - set(shown.axis_names)):
            raise NotationError(
                f"manual axes are axes of the mesh, got '{unknown[0]}' where the mesh has "
                f"{', '.join(shown.axis_names)}, "
                f"in `{self.name}`: use one of these"
            )
        if self.asked is not None and asked & taken:
            raise NotationError(
                f"a mesh axis becomes manual once, got '{sorted(asked & taken)[0]}', which is manual around this call, "
                f"in `{self.name}`: take it out of axes"
            )
        single = {axis for axis, size in shown.shape.items() if size == 1}
        self.shape = shown
        self.manual = tuple(a for a in shown.axis_names if a in (asked | single) - taken)
        left = [a for a in shown.axis_names if a not in (*self.manual, *single)]
        self.partly = bool(left)

    def spec(self, kind: ArrayType, place: str, rank: int | None = None) -> PartitionSpec:
        """How JAX slices an array of this type over the manual axes."""
        for axis in (*kind.shape.mesh_axes, *kind.shape.pending, *kind.shape.copied):
            if axis not in self.shape.shape:
                raise NotationError(
                    f"an annotation names axes of the mesh, got '{axis}' in {kind} where the mesh has "
                    f"{', '.join(self.shape.axis_names)}, in {place}: use one of these, or add '{axis}' to the mesh "
                    f"(size 1 will do)"
                )
        shape = real_axes(kind.shape, self.shape)
        if self.partly and (states := (*shape.pending, *shape.copied)):
            raise NotationError(
                f"JAX carries pending sums and copies into and out of a function only where all mesh axes are "
                "manual, got "
                f"{kind} with some axes left to the surrounding program, in {place}: settle '{states[0]}' on the other "
                f"side, or make all axes manual"
            )
        axes = []
        for dim in shape.dims:
            mine = self.manual_only(dim.axes)
            if dim.axes[: len(mine)] != mine:
                raise NotationError(
                    f"the manual axes of a dimension are its major ones, got '{dim}' with manual "
                    f"{', '.join(self.manual)}, in {place}: write {'/'.join((str(dim.name), *mine))} first"
                )
            axes.append(mine)
        if kind.shape.ellipsis:
            if rank is None:
                raise NotationError(
                    f"a manual function's result has all its dimensions named, got {kind}, in {place}: "
                    f"write them instead of '...'"
                )
            axes = [()] * (rank - len(axes)) + axes
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
            array = _plain(leaf.value)
            spec = self.spec(leaf.kind, leaf.place, len(array.shape))
            check_array(leaf.value, leaf.kind, leaf.place, self.bindings, strict=True)
            named = leaf.kind.shape.dims
            for dim, size in zip(named, array.shape[len(array.shape) - len(named) :], strict=True):
                check_divides(dim.name, size, self.manual_only(dim.axes), self.shape.shape, leaf.place)
            arrays.append(self.without_single_axes(array))
            specs.append(spec)
        return arrays, specs

    def without_single_axes(self, array):
        """JAX's types may mention mesh axes of size 1, ours do not."""
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
        """The different shardings that results have, and the annotated types of each."""
        hint, place = self.hints.get("return"), f"result of `{self.name}`"
        kinds = array_types(hint)
        if not kinds:
            raise NotationError(
                f"a manual function's result is annotated, got {hint!r}, in {place}: write '-> f32[\"batch/data\"]'"
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

    def body(self, bound, trees, leaves, slices, results):
        out: dict = {}

        def program(*slices):
            rest = iter(slices)
            for argument, mine in leaves:
                values = [leaf.value if leaf.kind is None else self.slice(leaf, next(rest)) for leaf in mine]
                bound.arguments[argument] = jax.tree.unflatten(trees[argument], values)
            result = self.fn(*bound.args, **bound.kwargs)
            place = f"result of `{self.name}`"
            out["tree"] = jax.tree.structure(result, is_leaf=is_typed_leaf)
            out["leaves"] = typed_leaves(result, self.hints["return"], place)
            for leaf in out["leaves"]:
                if leaf.kind is not None and not is_array(leaf.value):
                    check_array(leaf.value, leaf.kind, leaf.place, self.bindings)
            return [_plain(leaf.value) for leaf in out["leaves"] if leaf.kind is not None]

        with binding(self.bindings):
            try:
                traced = jax.make_jaxpr(program)(*slices)
            except Exception as error:
                raise_in_notation(error, self.bindings)
                raise
            read = Program(traced.jaxpr)
            pending = check_pending(read, self.bindings)
            arrays = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *slices)
            typed = [leaf for leaf in out["leaves"] if leaf.kind is not None]
            for leaf in typed:
                self.check_result(leaf)
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
            return array
        lead = len(leaf.value.names) - len(leaf.kind.shape.dims)
        shape = real_axes(leaf.kind.shape, self.shape)
        slices = ((),) * lead + tuple(self.manual_only(dim.axes) for dim in shape.dims)
        return type(leaf.value)(array, leaf.value.names, slices)

    def check_result(self, leaf: Leaf) -> None:
        """Names, dtype and sizes of a result; its sharding is checked in `leave`."""
        bare = ArrayType(leaf.kind.dtype, leaf.kind.shape.bare())
        check_array(leaf.value, bare, leaf.place, Bindings(self.name))
        if own := getattr(leaf.value, "slices", ()):  # a named array remembers how it is sliced
            wanted = [self.manual_only(dim.axes) for dim in real_axes(leaf.kind.shape, self.shape).dims]
            if [self.manual_only(axes) for axes in own][len(own) - len(wanted) :] != wanted:
                raise TypeMismatch(
                    f"a result is sliced as its annotation says, got {typeof(leaf.value)} for {leaf.kind}, "
                    f"in {leaf.place}: reshard it before the function ends, or correct the annotation"
                )
        bind_shape(leaf.kind.shape, _plain(leaf.value), leaf.place, self.bindings)

    def leave(self, leaf: Leaf, array, pending: frozenset[str], met: Callable):
        wanted = real_axes(leaf.kind.shape, self.shape)
        if forgotten := sorted(pending - set(wanted.pending)):
            held = Shape(wanted.dims, tuple(sorted(pending)), wanted.copied, wanted.ellipsis)
            raise PendingSumError(
                f"a result is what its annotation says, got a sum pending along {', '.join(forgotten)} for "
                f"{leaf.kind}, "
                f'in {leaf.place}: end the function with reshard("{held} -> {wanted}", ...)'
                + ("" if self.partly else f", or annotate {leaf.kind.dtype}[{held}]")
            )
        if missing := sorted(set(wanted.pending) - pending):
            raise TypeMismatch(
                f"a result is what its annotation says, got {typeof(array)}, of which no sum is pending along "
                f"{', '.join(missing)}, for {leaf.kind}, in {leaf.place}: take '+{missing[0]}' out of the annotation"
            )
        if self.partly:
            held = held_shape(wanted, array)
            left = [tuple(a for a in d.axes if a not in self.manual) for d in held.dims]
            said = [tuple(a for a in d.axes if a not in self.manual) for d in wanted.dims]
            if left != said:
                raise TypeMismatch(
                    f"a result is what its annotation says, got '{held}' for {leaf.kind}, in {leaf.place}: "
                    f"correct the mesh axes that are left to the surrounding program"
                )
        try:
            return check_slice(array, wanted, leaf.place, "a result is what its annotation says")
        except TransitionError as error:
            if line := met(wanted.mesh_axes):
                raise type(error)(f"{error}, or gather it before it meets what does not differ{line}") from None
            raise


def _plain(x):
    return x.array if is_named(x) else x


def _like(value, array):
    """A whole result in the form that the function returned its slice in."""
    return type(value)(array, value.names) if is_named(value) else array


_REFUSED = re.compile(r"unreduced|reduced")
# How JAX 0.10 to 0.12 name the operation that they refuse.
_OPERATION = (r"rule for (\w+)", r"(\w+) is a non-linear operation", r"`(\w+)`", r"passed to (\w+)")


def raise_in_notation(error: Exception, bindings: Bindings) -> None:
    """Turns JAX's refusal of an operation on a pending sum or a copy into one in the notation; passes by any other "
    "error."""
    text = str(error)
    line = error_line(error)
    if isinstance(error, NotImplementedError) and (not text or text.startswith("Please file an issue")):
        raise NotationError(
            f"JAX cannot map over an operation that begins or ends a pending sum or a copy, got one under vmap, "
            f"in `{bindings.function}`{line}: write the mapped dimension in the text, or use jax.lax.map"
        ) from error
    if isinstance(error, NotationError):
        if (told := located(error)) != text:
            raise type(error)(told).with_traceback(error.__traceback__) from error.__cause__
        return
    if cast := re.search(r"Unsupported pcast from=(\w+), to='(\w+)'", text):
        raise TypeMismatch(
            f"a cast changes how devices hold a value, got pcast to '{cast[2]}' of one that is {cast[1]}, "
            f"in `{bindings.function}`{line}: write the reshard that was forgotten before it, or leave the cast out"
        ) from error
    if not _REFUSED.search(text):
        return
    if "Inputs cannot be replicated on the same axes" in text:
        raise TypeMismatch(
            f"a copy '~x' is for products with an operand that x slices, got an elementwise operation of one with a "
            f"value that is the same on all devices, in `{bindings.function}`{line}: use the value from before the "
            f"reshard to '~'"
        ) from error
    found = next(filter(None, (re.search(words, text) for words in _OPERATION)), None)
    axes = re.findall(r"U:\(?([\w,]+)", text)
    axes = {axis for group in axes for axis in group.split(",") if axis}
    operation = (
        found.group(1) if found else "mul" if "bilinear" in text or "should be reduced" in text else "an operation"
    )
    if not axes and not bindings.pending:
        return
    raise PendingSumError(refusal(operation, axes, line, bindings)) from error


def shift(text: str, x, axis: str, *, by: int = 1):
    """Passes each device's slice to the device `by` places further along a mesh axis, around the ring (gradient: back).

    Device `i` ends up with the slice of device `i - by`. One collective permute.

    Args:
        text: the type of `x`, in which some dimension is sliced over `axis`.
        x: a plain array in manual mode.
        axis: the mesh axis of the ring.

    Raises:
        TransitionError: no dimension is sliced over `axis`, or `x` is not of that type.
    """
    where = f"shift('{text}', over='{axis}')"
    shape = parse(text)
    if axis not in shape.mesh_axes:
        raise TransitionError(
            f"a shift moves slices around a ring, got '{shape}', which '{axis}' does not slice, in {where}: "
            f"write which dimension '{axis}' slices"
        )
    mesh = jax.sharding.get_abstract_mesh()
    known_axes((shape,), mesh, where)
    bind_shape(shape, x, where, live())
    size = mesh.shape[axis]
    x = check_slice(x, real_axes(shape, mesh), where, mentioned={*shape.mesh_axes, *shape.pending, *shape.copied})
    if size == 1:
        return x
    return jax.lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])


__all__ = ["PendingSumError", "TransitionError", "einsum_plain", "manual_reshard", "shard_map", "shift", "vary"]
