"""Taking a name off a tree of arrays and putting it back: what `vmap` and `scan` have in common."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from trellis.named.arguments import shown
from trellis.named.array import NamedArray, is_named
from trellis.named.axis import Axis, Name, NamesError, name_of
from trellis.named.index import single
from trellis.named.operand import on_mesh, operand, types_of
from trellis.named.reshape import transpose
from trellis.notation import TypeMismatch
from trellis.notation.typeof import is_array


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """Marks a value whose leading, unnamed dimension is the one mapped.

    Attributes:
        x: the array, or a named array without the name.
    """

    x: Any

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])


def is_mapped(x) -> bool:
    """The `is_leaf` for trees of `Mapped`."""
    return isinstance(x, Mapped)


def named_leaves(tree) -> list[NamedArray]:
    """The named arrays of a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_named) if is_named(x)]


def length_of(tree, axis: Name, what: str) -> int:
    """The length of a loop or map over a name: from the arrays that have it, or the axis.

    Raises:
        NamesError: arrays of two sizes, an axis of another size, or neither an array with the name nor an axis.
    """
    name = name_of(axis, what)
    having = [x for x in named_leaves(tree) if name in x.names]
    sizes = {operand(x, what, pending=True).shape[name] for x in having}
    if isinstance(axis, Axis) and sizes | {axis.size} == {axis.size}:
        return axis.size
    if isinstance(axis, Axis):
        raise NamesError(
            f"{what} needs one size for its dimension, got {axis} and {types_of(having)}: pass the name, or an axis "
            "of its size"
        )
    if len(sizes) != 1:
        seen = f"sizes {sorted(sizes)}" if sizes else "no array with it"
        raise NamesError(
            f"{what} needs one size for its dimension, got {seen} for '{name}': pass arrays that have '{name}', of "
            f"one size, or an Axis('{name}', ...)"
        )
    return sizes.pop()


def front(tree, name: str):
    """Moves `name` to the front of every array that has it, takes it off, and marks the array."""

    def lead(x):
        if not (is_named(x) and name in x.names):
            return x
        x = transpose(x, (name, *(n for n in x.names if n != name)))
        # The rank fits the names again once JAX has taken the first dimension.
        return Mapped(NamedArray.tree_unflatten((x.names[1:], x.slices[1:]), (x.array,)))

    return jax.tree.map(lead, tree, is_leaf=is_named)


def inside(tree):
    """The marked tree as the function sees it: marks taken off, keys without names as plain keys."""
    bare = jax.tree.map(lambda x: x.x if is_mapped(x) else x, tree, is_leaf=is_mapped)
    return jax.tree.map(lambda x: single(x) if is_named(x) else x, bare, is_leaf=is_named)


def restore(tree, name: str, what: str, axes: tuple[str, ...] = ()):
    """Puts the name in front of every named array of a result, which has an unnamed leading dimension.

    Args:
        axes: in manual mode, the mesh axes that slice the name.

    Raises:
        NamesError: a result has the name already.
    """

    def back(x):
        if not is_named(x):
            return x
        if name in x.names:
            raise NamesError(
                f"a name must stand for one dimension only, got '{' '.join((name, *x.names))}' as a result of {what} "
                f"over '{name}': rename the function's result, as in .rename({name}='other')"
            )
        slices = (axes, *(x.slices or ((),) * len(x.names))) if axes or x.slices else ()
        return NamedArray(x.array, (name, *x.names), slices)

    return jax.tree.map(back, tree, is_leaf=is_named)


def only_arrays(tree, what: str):
    """The tree, if JAX can carry, map or choose all that is in it.

    Raises:
        TypeMismatch: something is neither an array nor a number.
    """
    for x in jax.tree.leaves(tree, is_leaf=is_named):
        if not (is_array(x) or isinstance(x, int | float | complex) or hasattr(x, "__jax_array__")):
            raise TypeMismatch(
                f"{what} can only take and return arrays and numbers, got {shown(x)}, in {what}: let the function read "
                "it from around it instead"
            )
    return tree


def entered(tree, what: str, *, pending: bool = True, copies: bool = True, numbers: bool = False):
    """A tree of arrays on the mesh in force.

    Args:
        pending: whether partial sums may be among them.
        copies: whether copies (`~`) may; else they are no longer held as copies.
        numbers: whether numbers become arrays, too: JAX maps loops and choices over slices only if all that they
            carry lies on the mesh.
    """

    def enter(x):
        if is_named(x):
            return operand(x, what, pending=pending, copies=copies)
        if numbers and isinstance(x, int | float | complex):
            x = jnp.asarray(x)
        return on_mesh(x, tuple(f"_{i}" for i in range(x.ndim)), what) if is_array(x) and hasattr(x, "ndim") else x

    return jax.tree.map(enter, tree, is_leaf=is_named)
