"""The shape language: `batch/data pos embed/data/model +model ~data`.

    shape  :=  dim { " " dim } { " " state }      "" is a scalar
    dim    :=  name { "/" mesh_axis }  |  integer { "/" mesh_axis }  |  "..."
    state  :=  "+" mesh_axis  |  "~" mesh_axis

This file parses and prints; it knows no mesh and no array.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

from jax.sharding import PartitionSpec

from trellis.errors import TrellisError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_INTEGER = re.compile(r"[0-9]+\Z")


def is_name(text: str) -> bool:
    """Whether a text can stand for a dimension or a mesh axis: letters, digits and underscores, no digit first."""
    return _NAME.match(text) is not None


class NotationError(TrellisError, ValueError):
    """A text that is not in the notation. The message says the rule, the text, the place and the fix."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: a name or a literal size, and the mesh axes that slice it, major to minor."""

    name: str | int
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join((str(self.name), *self.axes))


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A parsed shape.

    Attributes:
        dims: the dimensions, in order.
        pending: mesh axes along which devices hold partial sums (`+x`), sorted.
        copied: mesh axes along which each device holds a full copy whose
            gradient arrives as a pending sum (`~x`), sorted.
        ellipsis: whether any leading dimensions may stand before `dims`.
    """

    dims: tuple[Dim, ...] = ()
    pending: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    ellipsis: bool = False

    def __str__(self) -> str:
        parts = ["..."] if self.ellipsis else []
        parts += [str(dim) for dim in self.dims]
        parts += [f"+{axis}" for axis in self.pending] + [f"~{axis}" for axis in self.copied]
        return " ".join(parts)

    @property
    def names(self) -> tuple[str | int, ...]:
        """The dimensions' names (integers for literal sizes)."""
        return tuple(dim.name for dim in self.dims)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that slice some dimension, in the order they are written."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def spec(self) -> PartitionSpec:
        """The same sharding as JAX writes it (an ellipsis has no counterpart there)."""
        if self.ellipsis:
            raise NotationError(f"a shape with '...' has no PartitionSpec, got '{self}': name its leading dimensions")
        return spec_of([dim.axes for dim in self.dims], self.pending, self.copied)

    def bare(self) -> "Shape":
        """The same dimensions without mesh axes or states."""
        return Shape(tuple(Dim(dim.name) for dim in self.dims), ellipsis=self.ellipsis)


def spec_of(axes: "list[tuple[str, ...]]", pending=(), copied=()) -> PartitionSpec:
    """A `PartitionSpec` from the mesh axes of each dimension and the two states."""
    partitions = [None if not a else a[0] if len(a) == 1 else tuple(a) for a in axes]
    return PartitionSpec(*partitions, unreduced=frozenset(pending), reduced=frozenset(copied))


def _fail(text: str, what: str, fix: str) -> NotationError:
    return NotationError(f"{what}, in '{text}': {fix}")


def _read_once(read: Callable) -> Callable:
    """Makes a reader that remembers what it has read and refuses what is not a text."""
    known = functools.lru_cache(maxsize=4096)(read)

    @functools.wraps(read)
    def reading(text: str):
        if not isinstance(text, str):
            raise NotationError(
                f"the notation must be a string, got a {type(text).__name__} in its place: pass the string first, as "
                "in parse('batch/data embed') and reshard('embed/data -> embed', x)"
            )
        return known(text)

    return reading


@_read_once
def parse(text: str) -> Shape:
    """Reads a shape.

    >>> parse("batch/data pos embed/data/model").dims[2].axes
    Traceback (most recent call last):
        ...
    trellis.notation.shape.NotationError: mesh axis 'data' is used twice,
    in 'batch/data pos embed/data/model': use each mesh axis once, to slice, sum or copy the array
    >>> str(parse("batch/data  embed +model"))
    'batch/data embed +model'

    Raises:
        NotationError: the text is not in the notation.
    """
    dims: list[Dim] = []
    pending: list[str] = []
    copied: list[str] = []
    ellipsis = False
    for index, word in enumerate(text.split()):
        if word[0] in "+~":
            axis = word[1:]
            if not _NAME.match(axis):
                raise _fail(
                    text, f"'{word}' is not a state", f"write '{word[0]}' and a mesh axis, as in '{word[0]}model'"
                )
            (pending if word[0] == "+" else copied).append(axis)
            continue
        if pending or copied:
            raise _fail(
                text, f"dimension '{word}' comes after a state", "write all dimensions first, then '+axis' and '~axis'"
            )
        if word == "...":
            if index:
                raise _fail(
                    text, "'...' is not at the start", "it stands for any leading dimensions, so write it first"
                )
            ellipsis = True
            continue
        name, *axes = word.split("/")
        if not (_NAME.match(name) or _INTEGER.match(name)) or not all(_NAME.match(a) for a in axes):
            raise _fail(
                text,
                f"'{word}' is not a dimension",
                "write a name or an integer, then '/mesh_axis' for each axis that slices it"
                + ("" if word.isascii() else "; names are of the letters a to z and A to Z, digits and '_'"),
            )
        dims.append(Dim(int(name) if name.isdigit() else name, tuple(axes)))
    shape = Shape(tuple(dims), tuple(sorted(pending)), tuple(sorted(copied)), ellipsis)
    named = [dim.name for dim in dims if isinstance(dim.name, str)]
    for name in named:
        if named.count(name) > 1:
            raise _fail(
                text,
                f"dimension '{name}' is written twice",
                "give the second one another name (keys and queries: 'pos' and 'key_pos')",
            )
    used = [*shape.mesh_axes, *pending, *copied]
    for axis in used:
        if used.count(axis) > 1:
            raise _fail(
                text, f"mesh axis '{axis}' is used twice", "use each mesh axis once, to slice, sum or copy the array"
            )
    return shape


@_read_once
def parse_transition(text: str) -> tuple[Shape, Shape]:
    """Reads `before -> after`: the same dimensions in the same order, elsewhere on the mesh.

    Raises:
        NotationError: there is not one arrow, or the two sides differ in more than sharding.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise _fail(
            text,
            f"a transition must have exactly one '->', got {len(sides) - 1}",
            "write 'before -> after', as in 'embed/data -> embed'",
        )
    before, after = parse(sides[0].strip()), parse(sides[1].strip())
    if before.names != after.names or before.ellipsis != after.ellipsis:
        raise _fail(
            text,
            f"the two sides name different dimensions, '{before.bare()}' and '{after.bare()}'",
            "a transition moves data between devices and keeps names and order; use rearrange to reorder",
        )
    return before, after
