"""Indexing and lookups by name."""

import math

import jax
import jax.numpy as jnp

from trellis._compat import refuses_copies
from trellis.mesh.layout import current_layout
from trellis.mesh.manual.take import take_plain
from trellis.mesh.reshard import place
from trellis.named.arguments import has_keys
from trellis.named.array import NamedArray
from trellis.named.axis import Name
from trellis.named.lookup import has_zero, lookup, refuse_shared, row
from trellis.named.operand import no_copies, operand, refuse_cut
from trellis.named.placing import whole
from trellis.named.selection import on_mesh, selection, selector
from trellis.notation.state import state_of


def index(x: NamedArray, key) -> NamedArray:
    """`x["pos", 3]`, `x["pos", 2:5]`, `x["pos", ids, "batch", 0]`: selects by name.

    An integer removes the name; a slice, a list, or a plain array of positions with one dimension keeps it. A named
    array of positions puts its own names in the place of the name; several are looked up together, and broadcast by
    name. A mask (outside of `jit`) keeps the name, with the positions where it is true. If positions share a name with
    the array, each of its places is looked up on its own (see `take_along`).

    Positions count from 0, negative ones from the end. Numbers, lists and NumPy arrays that are out of range are
    refused; positions that are values of the program read zeros there, on every layout.

    A dimension that is sliced over devices is gathered first for a slice; for an integer, and where positions are
    looked up, it stays where it is (see `take`).

    Names: those of `x` in order; an integer's goes, positions put theirs in the place of the name.
    Gradient: to the places that were read; as `take` for positions, else nothing moves.
    Moves: an all-gather along a sliced name for a slice; as `take` for an integer and for positions.

    Raises:
        NamesError: an absent name, a position outside, a mask inside `jit`.
        PendingSumError: `x` holds partial sums.
    """
    x = operand(x, "indexing")
    found = selection(x, key, "indexing")
    still = {n: v for n, v in found.items() if not isinstance(v, NamedArray) and v != slice(0, x.shape[n], 1)}
    for name, value in list(still.items()):
        if isinstance(value, int) and _in_slices(x, name):
            try:
                x = row(x, name, value)
            except (NotImplementedError, ValueError) as error:
                if not refuses_copies(error):  # JAX maps over nothing whose result is a pending sum
                    raise
            else:
                del still[name]
    x = _before_uneven_slices(whole(x, tuple(still), "indexing"), still)
    for name, value in still.items():
        x = _static(x, name, value)
    arrays = {n: v for n, v in found.items() if isinstance(v, NamedArray)}
    # Positions along their own dimension select there, one after the other; others are looked up together.
    for name in [n for n, ids in arrays.items() if ids.names == (n,)]:
        x = lookup(x, {name: on_mesh(arrays.pop(name), name, "indexing")}, "indexing")
    if arrays:
        x = lookup(x, {n: on_mesh(ids, n, "indexing") for n, ids in arrays.items()}, "indexing")
    return single(x)


def _in_slices(x: NamedArray, name: str) -> bool:
    """Whether devices hold slices of numbers along the name: the row of one and zeros of the others add up to it."""
    state, layout = state_of(x.array), current_layout()
    if state.mode != "explicit" or state.copied or (layout is not None and layout.mapped):
        return False
    return has_zero(x) and x.dtype != jnp.bool_ and bool(state.axes[x.index(name)])


def _before_uneven_slices(x: NamedArray, selected: dict[str, int | slice]) -> NamedArray:
    """In auto mode, the array whole along names of which slices are taken whose sizes mesh axes do not divide.

    XLA's partitioner takes two such slices of one array for equal if they are as large on a device, and refuses its own
    program (JAX 0.10.2).
    """
    layout = current_layout()
    if layout is None or state_of(x.array).mode != "auto":
        return x
    axes = dict(zip(x.names, layout.assign(x.names), strict=True))
    sizes = {n: len(range(v.start, v.stop, v.step)) for n, v in selected.items() if isinstance(v, slice)}
    uneven = [n for n, size in sizes.items() if size % math.prod(layout.mesh.shape[a] for a in axes[n])]
    if not uneven:
        return x
    return x.with_array(place(x.array, tuple(() if n in uneven else axes[n] for n in x.names), names=x.names))


def _static(x: NamedArray, name: str, value: int | slice) -> NamedArray:
    i = x.index(name)
    if isinstance(value, int):
        array = jax.lax.index_in_dim(x.array, value, i, keepdims=False)
        return NamedArray(array, x.names[:i] + x.names[i + 1 :], x.slices[:i] + x.slices[i + 1 :])
    if value.step > 0:
        return x.with_array(jax.lax.slice_in_dim(x.array, value.start, value.stop, value.step, axis=i))
    last = value.stop + 1  # the position of the last value, the first one in the array's own order
    x = operand(x, "indexing", copies=False)  # JAX cannot reverse them
    forward = jax.lax.slice_in_dim(x.array, last, value.start + 1, -value.step, axis=i)
    return x.with_array(jax.lax.rev(forward, (i,)))


def positions(array: jax.Array, axis: int) -> list[jax.Array]:
    """The array at each position along a dimension, without it.

    The gradient is one stack; that of one index after another would be a sum of arrays padded with zeros.
    """
    parts = jax.lax.split(array, (1,) * array.shape[axis], axis)
    return [jax.lax.squeeze(part, (axis,)) for part in parts]


def single(x: NamedArray):
    """A key without names as a plain key, for `jax.random`, and one number not as copies (see `operand`); any other
    array as it is."""
    if x.names:
        return x
    return x.array if has_keys(x) else x.with_array(no_copies(x.array))


def take(x: NamedArray, name: Name, ids) -> NamedArray:
    """Rows of `x` along a name at given positions: `take(table, "vocab", tokens)` is an embedding lookup.

    The names of `ids` stand in the place of `name`. If `name` is sliced, each device looks up the rows that it holds,
    and the partial sums are settled; the gradient stays where the rows are.

    Plain arrays in manual mode carry no names: there a text is the type, as in `einsum`, and each device looks up what
    it has, `take("vocab/m embed, batch/d -> batch/d embed +m", table, ids)`. Names that both texts have are aligned:
    `take("batch/d vocab/m, batch/d -> batch/d +m", logits, targets)` is one value of each row.

    Names: those of `x`, with those of `ids` in the place of the name.
    Gradient: rows are added where they were read; a reduce-scatter for an array that was gathered, an all-gather of the
        gradient of rows that were scattered.
    Moves: an all-gather of an array that rests in slices; an all-reduce or a reduce-scatter of the rows where the
        layout slices the name in use.

    Args:
        x: the table, `"... name ..."`.
        name: the dimension looked up.
        ids: positions as in indexing: a number, a list, an array, a named array. Negative ones count from the end;
            outside, values of the program read zeros.

    Raises:
        NamesError: `ids` share a name with the rest of the table, or are not whole numbers.
    """
    if isinstance(x, str):
        return take_plain(x, name, ids)
    x = operand(x, "take")
    name = x.names[x.index(name)]
    refuse_cut((name,), "take")
    ids = selector(x, name, ids, "take")
    if not isinstance(ids, NamedArray):
        return index(x, {name: ids})
    refuse_shared(x, name, ids)
    return single(lookup(x, {name: on_mesh(ids, name, "take")}, "take"))


def take_along(x: NamedArray, name: Name, ids) -> NamedArray:
    """For each place of `ids`, the value of `x` at that position along a name.

    Names that both have are aligned, as in `jnp.take_along_axis`: with `x` of `"batch vocab"` and `ids` of `"batch k"`,
    `take_along(x, "vocab", ids)` is `"batch k"`, from each batch's own row.

    Names: those of `x` in order, with those that only `ids` have in the place of the name.
    Gradient: values are added where they were read; an all-gather where the name is sliced.
    Moves: where the name is sliced, an all-gather of positions, and a reduce-scatter of values.

    Args:
        x: any named array.
        name: the dimension looked up.
        ids: named positions, which count as in indexing.

    Raises:
        NamesError: a name has two sizes, or the positions are not whole numbers.
    """
    x = operand(x, "take_along")
    name = x.names[x.index(name)]
    refuse_cut((name,), "take_along")
    ids = selector(x, name, ids, "take_along")
    if not isinstance(ids, NamedArray):
        return index(x, {name: ids})
    return single(lookup(x, {name: on_mesh(ids, name, "take_along")}, "take_along"))
