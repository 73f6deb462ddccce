"""`vmap` over a name.

If the layout slices the name, devices map over their own slices. Mapped arrays bring their slices along; everything
else is whole to the function. A parameter that rests sliced over the same mesh axes is gathered once, and held as one
copy for each device. So its gradient is summed over the devices as one reduce-scatter, whatever the function does with
it, and gradients taken inside, for each example, are right as well.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis._compat import choose_among_slices, keep_mapped_axes_sharded, refuses_copies, refuses_slices
from trellis.mesh.layout import current_layout
from trellis.mesh.meshes import MeshError
from trellis.mesh.reshard import place
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import Name, NamesError, name_of
from trellis.named.mapped import (
    Mapped,
    entered,
    front,
    inside,
    is_mapped,
    length_of,
    named_leaves,
    only_arrays,
    restore,
)
from trellis.named.operand import types_of
from trellis.named.placing import mapped_name
from trellis.notation import spec_of
from trellis.notation.binding import check_divides
from trellis.notation.state import mode_of, sharding_on, state_of
from trellis.notation.typeof import is_array

Axes = tuple[str, ...]


def vmap(fn: Callable, axis: Name) -> Callable:
    """Maps a function over a name.

    Arrays that have the name are mapped, everything else is passed whole. Inside
    `fn` the name is gone; the results get it back as their first dimension.
    Keys along the name (`random.split(key, "batch", 8)`) are plain keys inside.

    >>> import jax.numpy as jnp
    >>> from trellis.named import named
    >>> x = named(jnp.ones((2, 3)), "batch embed")
    >>> vmap(lambda row: row.sum("embed"), "batch")(x).shape
    {'batch': 2}

    Args:
        fn: takes and gives trees of arrays.
        axis: the name. Given as an axis, no argument needs to have it.

    Raises:
        NamesError: no argument has the name, or with different sizes, or a result has it already.
    """
    name = name_of(axis, "vmap")

    def mapped(*args, **kwargs):
        tree = entered((args, kwargs), "vmap", pending=False, copies=False)
        length = length_of(tree, axis, "vmap")
        if mode_of(jax.sharding.get_abstract_mesh()) == "manual":
            return _in_manual(fn, name, length, tree)
        axes = _axes_of(tree, name)
        layout = current_layout()
        with layout.without(*axes) if layout is not None and axes else contextlib.nullcontext():
            return _Map(fn, name, length, axes).run(tree)

    return mapped


def map_as_it_is(fn: Callable, name: str, axes: Axes) -> Callable:
    """`vmap` over a name with arrays as they are, for programs that say themselves which mesh axes share it."""

    def mapped(*args):
        tree = (args, {})
        return restore(_plainly(fn, front(tree, name), length_of(tree, name, "vmap"), axes), name, "vmap")

    return mapped


def _in_manual(fn: Callable, name: str, length: int, tree):
    having = [x for x in named_leaves(tree) if name in x.names]
    sliced = {x.slices[x.index(name)] if x.slices else () for x in having} or {()}
    if len(sliced) > 1:
        raise NamesError(
            f"in manual mode a name must be sliced the same way in all operands, got {types_of(having)}, in vmap over "
            f"'{name}': reshard one of them"
        )
    (axes,) = sliced
    length //= math.prod(jax.sharding.get_abstract_mesh().shape[a] for a in axes)
    return restore(_plainly(fn, front(tree, name), length), name, "vmap", axes)


def _plainly(fn: Callable, tree, length: int, over: Axes = ()):
    """Maps the function over the leading dimension of a tree's marked values: devices along the mesh axes `over`."""
    axis_name = mapped_name(over) if over else None
    in_axes = jax.tree.map(lambda x: 0 if is_mapped(x) else None, tree, is_leaf=is_mapped)

    def call(tree, _=None):
        args, kwargs = inside(tree)
        return only_arrays(fn(*args, **kwargs), "vmap")

    try:
        if any(axis == 0 for axis in jax.tree.leaves(in_axes)):
            return jax.vmap(call, in_axes=(in_axes,), axis_size=length, axis_name=axis_name)(tree)
        counted = jnp.zeros(length, jnp.int8)  # an axis that no argument has
        return jax.vmap(call, in_axes=(in_axes, 0), axis_name=axis_name)(tree, counted)
    except Exception as error:
        layout = current_layout()
        if refuses_copies(error) and layout is not None and not (layout.mapped or over):
            # Once more, as if over slices, where lookups, losses and attention take no copies into their programs.
            with dataclasses.replace(layout, mapped=((),)):
                return _plainly(fn, tree, length, over)
        if (said := _in_our_words(error)) is None:
            raise
        raise MeshError(said) from error


def _in_our_words(error: Exception) -> str | None:
    """JAX's refusal of a `vmap`, in our words, or None."""
    text = str(error)
    if "Mapped away dimension" in text:
        return (
            f"vmap needs arrays whose mapped dimension is sliced the same way, got {text.split(': ')[-1]} of one "
            "mapped array and another: call it while their layout is in force, or place one with shard(x, {...})"
        )
    if "Length of device assignment" in text:
        return (
            "vmap needs arrays of one mesh, got some that are on none, while no layout is in force: call it inside "
            "`with layout:`, which puts them there"
        )
    if refuses_copies(error) and mode_of(jax.sharding.get_abstract_mesh()) == "manual":
        return (
            "in manual mode JAX cannot map an operation that begins or ends a pending sum or a copy (`~`), got one, in "
            "vmap: write it by name on the whole array, or go through its positions with jax.lax.map"
        )
    if refuses_copies(error):  # under a map `nn` makes no copies in what is called at once
        return (
            "JAX cannot map an operation on copies (`~`) over slices, got one inside a cond, a loop or a jit, in "
            "vmap: use where(...) instead of cond, or let the layout's compute slice the mapped name"
        )
    if text.startswith("Resource axis:") and text.rstrip(".").endswith("is not found in mesh: ()"):
        return (
            "JAX can map over slices only what lies on the mesh, got a value that is on none: a while_loop over slices "
            "that carries something else too (a counter, for example), or an array that jax.grad differentiates "
            "inside, in vmap: use a scan of a fixed length and where(...), or make the array an argument of the mapped "
            "function"
        )
    if "pvary is a invariant->variant" in text:  # as in JAX 0.10.2 to 0.12.0
        return (
            "in manual mode JAX can map a cond only if its branches read mapped arrays, got a branch that reads an "
            "array which is the same on all devices, in vmap: use where(...) instead of cond, or make the array an "
            "argument of the mapped function"
        )
    if (
        "partitions cannot overlap" in text
        or "has duplicate entries" in text
        or "refer to an axis marked as manual" in text
    ):  # without a layout; with one, it is whole
        seen = re.split("Got |but |, but:", text)[-1]
        fix = (
            "make it an argument of the function, or call vmap inside `with layout:`"
            if current_layout() is None
            else "make it an argument of the function, or take a gradient inside with tr.grad"
        )
        return (
            "a mapped function can only read arrays that are whole along the mesh axes it is mapped over, got one "
            f"sliced over them ({seen.strip().splitlines()[0]}), in vmap: {fix}"
        )
    if refuses_slices(error):
        return (
            "JAX can map an operation over slices only if it knows how they are sliced, got one where it does not "
            f"({text.splitlines()[0]}), in vmap: use named operations (`jax.tree.map` of parameters and their "
            "gradients goes by plain arrays: pass the parameters to the mapped function, which has them whole), use "
            "where(...) instead of cond, or for linear algebra let each device compute its own slices, with "
            "trellis.shard_map (tr.map gathers the name and goes through it one by one)"
        )
    return None


def _axes_of(tree, name: str) -> Axes:
    """The mesh axes that slice the name: those that `compute` gives it among all names, or that the arrays have."""
    having = [x for x in named_leaves(tree) if name in x.names]
    layout = current_layout()
    if layout is not None:
        names = (name, *dict.fromkeys(n for x in having for n in x.names if n != name))
        return layout.assign(names)[0]
    return next((a for x in having if (a := state_of(x.array).axes[x.index(name)])), ())


class _Map:
    """One call of a mapped function, outside of manual mode.

    Attributes:
        axes: the mesh axes that slice the name.
    """

    def __init__(self, fn: Callable, name: str, length: int, axes: Axes):
        self.fn, self.name, self.length, self.axes = fn, name, length, axes

    def run(self, tree):
        explicit = mode_of(jax.sharding.get_abstract_mesh()) == "explicit"
        if explicit:
            choose_among_slices()
        marked = front(self.sliced(tree) if explicit else tree, self.name)
        if not (explicit and self.axes):
            return restore(_plainly(self.fn, marked, self.length), self.name, "vmap")
        keep_mapped_axes_sharded()
        leaves, structure = jax.tree.flatten(marked, is_leaf=lambda x: is_mapped(x) or is_named(x))
        sizes = jax.sharding.get_abstract_mesh().shape
        self.parts = math.prod(sizes[a] for a in self.axes)
        check_divides(self.name, self.length, self.axes, sizes, f"'{'/'.join((self.name, *self.axes))}'")
        moving = [self.cut(x.x) if is_mapped(x) else None for x in leaves]
        copies = [self.copy(x) if not is_mapped(x) and self.has_gradient(x) else None for x in leaves]
        still = [None if m is not None or c is not None else x for m, c, x in zip(moving, copies, leaves, strict=True)]

        def part(moving, copies):
            """One device's share: mapped over what it has of the name."""
            slots = [
                Mapped(m) if m is not None else c if c is not None else x
                for m, c, x in zip(moving, copies, still, strict=True)
            ]
            made = _plainly(self.fn, jax.tree.unflatten(structure, slots), self.length // self.parts)
            return jax.tree.map(self.whole, made)

        counted = jax.reshard(jnp.zeros(self.parts, jnp.int8), spec_of([self.axes]))
        result = jax.vmap(lambda moving, copies, _: part(moving, copies), axis_name=mapped_name(self.axes))(
            moving, copies, counted
        )
        return restore(jax.tree.map(self.joined, result), self.name, "vmap")

    def sliced(self, tree):
        """Every array with the name sliced over the mesh axes, and nothing else over them."""

        def move(x):
            if not is_array(x) or not (is_named(x) or hasattr(x, "ndim")):
                return x
            array, names = (x.array, x.names) if is_named(x) else (x, (None,) * x.ndim)
            state = state_of(array)
            if state.mode != "explicit":
                return x
            free = lambda mine: tuple(a for a in mine if a not in self.axes)
            wanted = [self.axes if n == self.name else free(mine) for n, mine in zip(names, state.axes, strict=True)]
            mine = self.name in names
            copied = state.copied - set(self.axes)
            if not mine and self.has_gradient(x):
                copied |= set(self.axes)
            moved = place(array, wanted, state.pending, copied, names=tuple(n or f"_{i}" for i, n in enumerate(names)))
            return x.with_array(moved) if is_named(x) else moved

        return jax.tree.map(move, tree, is_leaf=is_named)

    def has_gradient(self, x) -> bool:
        """Whether a value that is not mapped is held as one copy for each device."""
        array = x.array if is_named(x) else x
        if not (is_array(array) and hasattr(array, "ndim") and jnp.issubdtype(array.dtype, jnp.inexact)):
            return False
        return bool(self.axes) and state_of(array).mode == "explicit"

    def cut(self, x):
        """Splits the leading dimension: devices, and what each has."""
        return _each(x, lambda a: self._reshaped(a, (self.parts, a.shape[0] // self.parts, *a.shape[1:]), [()]))

    def whole(self, a):
        """A result without slices over the mesh axes; one from outside of the function may have some."""
        state = state_of(a)
        if state.mode != "explicit" or not set(self.axes) & {*state.copied, *(a for mine in state.axes for a in mine)}:
            return a
        axes = [tuple(a for a in mine if a not in self.axes) for mine in state.axes]
        return place(a, axes, state.pending, state.copied - set(self.axes), names=tuple(f"_{i}" for i in range(a.ndim)))

    def joined(self, a):
        """Merges devices and what each has into one leading dimension."""
        return self._reshaped(a, (a.shape[0] * a.shape[1], *a.shape[2:]), [], skip=2)

    def _reshaped(self, a, shape, extra, skip: int = 1):
        state = state_of(a)
        if state.mode == "none":  # a value of the function's own, which is whole on every device
            return jax.lax.reshape(a, shape)
        spec = spec_of([self.axes, *extra, *state.axes[skip:]], state.pending, state.copied)
        return jax.lax.reshape(a, shape, out_sharding=sharding_on(a, spec))

    def copy(self, x):
        """A value that is held as copies along the mesh axes, as one array with a leading dimension of devices."""

        def spread(a):
            state = state_of(a)
            spec = spec_of([self.axes, *state.axes], state.pending, state.copied - set(self.axes))
            dims = tuple(range(1, a.ndim + 1))
            return jax.lax.broadcast_in_dim(a, (self.parts, *a.shape), dims, out_sharding=sharding_on(a, spec))

        return _each(x, spread)


def _each(x, fn: Callable):
    """Applies a function that changes a plain array's rank to a plain or named array."""
    return NamedArray.tree_unflatten((x.names, x.slices), (fn(x.array),)) if is_named(x) else fn(x)
