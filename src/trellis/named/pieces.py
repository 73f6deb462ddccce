"""Taking arrays apart along a name, and putting them together."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from trellis._compat import is_tracer
from trellis.named import backend
from trellis.named.arguments import count_of, dtypes_of_jax, keeps_dtype, mapping_of, names_of, numbers_of, refuse_keys
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, Name, NamesError, name_of
from trellis.named.index import positions, single
from trellis.named.operand import (
    check_contained,
    check_sizes,
    on_one_mesh,
    operand,
    refuse_cut,
    refuse_dealt,
    types_of,
    union,
)
from trellis.named.placing import assign, bring, settle_selected, spread, to_layout, whole
from trellis.named.reshape import rename
from trellis.notation import TypeMismatch, typeof
from trellis.notation.state import state_of


def unbind(x: NamedArray, name: Name) -> tuple[NamedArray, ...]:
    """One array for each position of a name, without it: `q, k, v = unbind(qkv, "qkv")`.

    Names: those of `x` but the given one.
    Gradient: put together again; nothing moves.
    Moves: an all-gather along the name where it is sliced.
    """
    x = operand(x, "unbind")
    name = x.names[x.index(name)]
    refuse_cut((name,), "unbind")
    x, i = whole(x, (name,), "unbind"), x.index(name)
    names, slices = (kept[:i] + kept[i + 1 :] for kept in (x.names, x.slices))
    return tuple(single(NamedArray(array, names, slices)) for array in positions(x.array, i))


def split(x: NamedArray, name: Name, sizes: int | Sequence[int]) -> tuple[NamedArray, ...]:
    """Pieces along a name: as many equal ones as an integer says, or of given sizes.

    Names: those of `x`.
    Gradient: put together again; nothing moves.
    Moves: an all-gather along the name where it is sliced.

    Raises:
        NamesError: the sizes do not add up to the dimension's.
    """
    x = operand(x, "split")
    name = x.names[x.index(name)]
    refuse_cut((name,), "split")
    size = x.shape[name]
    fix = f"write split(x, '{name}', 2) or split(x, '{name}', [1, {size - 1}])"
    several = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    count = None if several else count_of(sizes, "split", fix)
    equal = [size // count] * count if count else []
    pieces = [count_of(s, "split", fix) for s in sizes] if several else equal
    if sum(pieces) != size or any(piece < 0 for piece in pieces):
        shown = f"{count} equal pieces" if count is not None else pieces
        raise NamesError(
            f"the pieces of a dimension must add up to its size, got {shown} for {name}={size} in {typeof(x)}: pass "
            "sizes that do"
        )
    x = whole(x, (name,), "split")
    return tuple(x.with_array(part) for part in jax.lax.split(x.array, pieces, x.index(name)))


def _joined(name: str, arrays: list[NamedArray], what: str, sizes_differ: bool):
    renamed = [rename(x, {name: f"{name}_{i}"}) if sizes_differ else x for i, x in enumerate(arrays)]
    check_sizes(renamed, what)
    names = union(arrays)
    check_contained(arrays, names, what, "broadcast one of them to all names")
    if len({x.dtype for x in arrays}) > 1:
        raise TypeMismatch(
            f"arrays that are joined must have the same dtype, got {types_of(arrays)}, in {what}: cast with .astype"
        )
    arrays = on_one_mesh(arrays, what)
    where = assign(arrays, names)
    if where is not None and sizes_differ:
        arrays = [whole(x, (name,), what) for x in arrays]
        where = {**assign(arrays, names), name: ()}
    moved = [bring(x, where) for x in arrays]
    sizes = {n: s for x in moved for n, s in zip(x.names, x.array.shape, strict=True)}
    plain = [spread(x, names, where, {**sizes, name: x.shape.get(name, 1)}) for x in moved]
    slices = tuple(where[n] for n in names) if where and any(x.slices for x in arrays) else ()
    return plain, names, slices


def _several(arrays: Sequence[NamedArray], what: str) -> list[NamedArray]:
    if hasattr(arrays, "dtype") or not arrays:
        seen = typeof(arrays) if hasattr(arrays, "dtype") else "none"
        raise NamesError(f"{what} takes a list of named arrays, got {seen}: pass a list of one array or more")
    return [operand(x, what) for x in arrays]


def concatenate(arrays: Sequence[NamedArray], name: Name) -> NamedArray:
    """Joins arrays along a name that all of them have. A sliced name is gathered first, and the result is whole along
    it if its mesh axes do not divide the new length.

    Names: those of the arrays.
    Gradient: each array gets its piece; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    arrays = _several(arrays, "concatenate")
    name = [x.names[x.index(name.name if isinstance(name, Axis) else name)] for x in arrays][0]
    refuse_cut((name,), "concatenate")
    plain, names, slices = _joined(name, arrays, "concatenate", True)
    joined = NamedArray(jnp.concatenate(plain, axis=names.index(name)), names, slices)
    return settle_selected(joined, (name,))


def stack(arrays: Sequence[NamedArray], name: Name) -> NamedArray:
    """Puts arrays side by side under a new leading name.

    Names: the new one, then those of the arrays.
    Gradient: each array gets its part; a reduce-scatter for one that was gathered, an all-reduce for one that was
        whole.
    Moves: arrays to where the layout has their names: an all-gather of one that rests in slices.

    Raises:
        NamesError: the arrays differ in names or sizes, one already has the name, or the size of an `Axis` is not the
            number of arrays.
    """
    arrays = _several(arrays, "stack")
    if isinstance(name, Axis) and name.size != len(arrays):
        raise NamesError(
            f"the new axis of stack must have the size of the list, got {name} for {len(arrays)} arrays: correct the "
            "size"
        )
    name = name_of(name, "stack")
    if any(name in x.names for x in arrays):
        raise NamesError(
            f"stack must make a new dimension, got '{name}' in {typeof(arrays[0])}: choose another name, or concatenate"
        )
    refuse_dealt((name,), "stack", arrays[0])
    plain, names, slices = _joined(name, arrays, "stack", False)
    # JAX 0.10.2 to 0.12.0 map `jnp.stack` of what is mapped over slices and what is not as if all were whole.
    stacked = jnp.concatenate([jnp.expand_dims(x, 0) for x in plain])
    return to_layout(NamedArray(stacked, (name, *names), ((), *slices) if slices else ()))


def pad(x: NamedArray, widths: Mapping[Name, tuple[int, int]], *, value=0) -> NamedArray:
    """Adds `(before, after)` elements of `value` along names: `pad(x, {"pos": (1, 0)})`. Sliced names are gathered; the
    result is whole along a name whose new length its mesh axes do not divide.

    Names: those of `x`.
    Gradient: of what was there; an all-gather where the name is sliced; that of a `value` of the program is a sum.
    Moves: an all-gather along the name where it is sliced.

    Raises:
        NamesError: a name is absent, or a width is negative.
        PendingSumError: `x` holds partial sums and `value` is not 0.
        TypeMismatch: `value` is a fraction for whole numbers.
    """
    (value,) = numbers_of("pad", "pass one, or join what differs with concatenate", value=value)
    zero = isinstance(value, int | float) and value == 0
    x = operand(x, "pad with another value than 0", pending=zero)
    refuse_keys((x,), "pad")
    fix = "write pad(x, {'pos': (1, 0)})"
    asked = mapping_of(widths, "pad", fix).items()
    along = {x.names[x.index(n)]: [count_of(s, "pad", fix) for s in names_of(width, "pad", fix)] for n, width in asked}
    refuse_cut(along, "pad")
    if wrong := [n for n, w in along.items() if len(w) != 2 or min(w) < 0]:
        raise NamesError(
            f"padding needs two widths of 0 or more, before and after, got {wrong[0]}: {tuple(along[wrong[0]])} for "
            f"{typeof(x)}, in pad: write {{'{wrong[0]}': (1, 0)}}"
        )
    x = whole(x, tuple(along), "pad")
    width = [(*along.get(n, (0, 0)), 0) for n in x.names]
    if x.dtype != jnp.bool_:  # of which 0 and 1 are values
        keeps_dtype(value, x, "padding", "pad")
    with dtypes_of_jax((x, value), "pad"):
        fill = jnp.asarray(value, x.dtype)
    # JAX (0.10.2) makes the gradient of a fill from that of `x`, and fails if there is none; ours is a sum of its own.
    learned = is_tracer(value)
    out = jax.lax.pad(x.array, jnp.zeros((), x.dtype) if learned else fill, width)
    if learned:
        there = jax.lax.pad(jnp.ones_like(x.array, dtype=bool), np.False_, width)
        placed = jax.typeof(out).sharding if state_of(out).mode == "explicit" else None
        out = jnp.where(there, out, backend.broadcast(fill, out.shape, placed))
    padded = x.with_array(out)
    return padded if state_of(out).pending else settle_selected(padded, tuple(along))


def roll(x: NamedArray, shift: int, name: Name) -> NamedArray:
    """Shifts elements along a name, around the end. A sliced name is gathered first.

    Names: those of `x`.
    Gradient: rolled back; an all-gather where the name is sliced.
    Moves: an all-gather along the name where it is sliced.
    """
    x = operand(x, "roll")
    shift = getattr(shift, "array", shift)
    if not isinstance(shift, jax.Array) or shift.ndim or not jnp.issubdtype(shift.dtype, jnp.integer):
        shift = count_of(shift, "roll", "write roll(x, 1, 'pos')")
    name = x.names[x.index(name)]
    refuse_cut((name,), "roll")
    x = whole(x, (name,), "roll")
    return to_layout(x.with_array(jnp.roll(x.array, shift, axis=x.index(name))))
