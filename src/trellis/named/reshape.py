"""Operations that change names, order and sizes, and no values."""

import math
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from trellis.mesh.layout import current_layout
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, NamesError
from trellis.named.placing import assign, bring, check_sizes, refuse_pending, settle, spread, union, whole
from trellis.notation import NotationError, spec_of, typeof
from trellis.notation.state import state_of


def rename(x: NamedArray, names: Mapping[str, str] | None = None, **more: str) -> NamedArray:
    """The same array under other names: `rename(k, pos="key_pos")`. Nothing moves.

    Raises:
        NamesError: an old name is absent, or two dimensions would have one name.
    """
    names = {**(names or {}), **more}
    for old in names:
        x.index(old)
    renamed = tuple(names.get(n, n) for n in x.names)
    if len(set(renamed)) < len(renamed):
        raise NamesError(
            f"a name stands for one dimension, got '{' '.join(renamed)}' after renaming {typeof(x)}: "
            f"choose another name"
        )
    return NamedArray(x.array, renamed, x.slices)


def transpose(x: NamedArray, names: Sequence[str] | str) -> NamedArray:
    """The same array with its dimensions in the given order (`"... embed"` keeps the others' order in front)."""
    names = tuple(names.split()) if isinstance(names, str) else tuple(names)
    if names and names[0] == "...":
        names = tuple(n for n in x.names if n not in names[1:]) + names[1:]
    if sorted(names) != sorted(x.names):
        raise NamesError(
            f"a transposition has the array's own names, got '{' '.join(names)}' for {typeof(x)}: name each once"
        )
    if names == x.names:
        return x
    order = [x.index(n) for n in names]
    return NamedArray(jnp.transpose(x.array, order), names, tuple(x.slices[i] for i in order) if x.slices else ())


def rearrange(x: NamedArray, pattern: str, **sizes: int) -> NamedArray:
    """Reorders, splits and merges: `rearrange(x, "batch (heads head_dim) -> batch heads head_dim", heads=8)`.

    On the left a group `(a b)` stands for one dimension that is split; which
    one follows from the position among the array's names, or is written
    `name=(a b)`. On the right a group becomes one dimension, named
    `new=(a b)`, or `a_b` if not named. `...` stands for the names not written.

    Raises:
        NamesError: sizes that do not multiply to the dimension's, or absent names.
    """
    left, arrow, right = pattern.partition("->")
    if not arrow:
        raise NotationError(f"a rearrangement has one '->', got none, in '{pattern}': write 'before -> after'")
    refuse_if = [n for n in _flat(right) if n != "..." and n not in _flat(left) and n not in x.names]
    if refuse_if:
        raise NamesError(
            f"the names on the right come from the left, got '{refuse_if[0]}' in '{pattern}' for {typeof(x)}: "
            f"correct it"
        )
    x = _split_groups(x, left, sizes, pattern)
    return _merge_groups(x, right, pattern)


def _flat(side: str) -> list[str]:
    return [name for _, group in _named_groups(side) for name in group]


def _named_groups(side: str) -> list[tuple[str | None, tuple[str, ...]]]:
    """`a name=(b c) (d e)` as [(None, (a,)), (name, (b, c)), ("", (d, e))]: "" marks a group without a name."""
    found = []
    for m in re.finditer(r"(?:(\w+)=)?\(([^()]*)\)|(\S+)", side):
        found.append((None, (m[3],)) if m[3] else (m[1] or "", tuple(m[2].split())))
    return found


def _split_groups(x: NamedArray, side: str, sizes, pattern: str) -> NamedArray:
    groups = _named_groups(side)
    has_rest = any(group == ("...",) for _, group in groups)
    if not has_rest and len(groups) != len(x.names):
        raise NamesError(
            f"a rearrangement writes every dimension, or '...', got {len(groups)} in '{pattern}' for {typeof(x)}: "
            f"add the others"
        )
    plain = {group[0] for name, group in groups if name is None}
    free = [n for n in x.names if n not in plain]
    for position, (name, group) in enumerate(groups):
        if name is None:
            if group[0] != "...":
                x.index(group[0])
            continue
        if not name:
            if has_rest and len(free) != 1:
                raise NamesError(
                    f"a group beside '...' says what it splits, got '({' '.join(group)})' in '{pattern}': "
                    f"write name=({' '.join(group)})"
                )
            name = free[0] if has_rest else x.names[position] if x.names[position] in free else free[0]
        free.remove(name)
        x = split_axis(x, name, {g: sizes.get(g, -1) for g in group})
    return x


def _merge_groups(x: NamedArray, side: str, pattern: str) -> NamedArray:
    groups = _named_groups(side)
    written = [n for _, group in groups for n in group if n != "..."]
    rest = tuple(n for n in x.names if n not in written)
    if rest and ("...",) not in [g for _, g in groups]:
        raise NamesError(
            f"a rearrangement keeps every dimension, got none of '{rest[0]}' on the right of '{pattern}' "
            f"for {typeof(x)}: add it"
        )
    spelled = [(None, (name,)) for name in rest]
    groups = [pair for given in groups for pair in (spelled if given[1] == ("...",) else [given])]
    x = transpose(x, tuple(n for _, group in groups for n in group))
    for name, group in groups:
        if name is not None:
            x = merge_axes(x, group, name or "_".join(group))
    return x


def split_axis(x: NamedArray, name: str, into: Mapping[str, int]) -> NamedArray:
    """Splits one dimension into several, major to minor. One size may be -1.

    Where the dimension is sliced, its first part takes the slices.

    Raises:
        NamesError: the sizes do not multiply to the dimension's.
    """
    i, size = x.index(name), x.shape[name]
    known = math.prod(s for s in into.values() if s != -1)
    unknown = [n for n, s in into.items() if s == -1]
    if len(unknown) > 1 or (size % known if unknown else size != known):
        shown = " ".join(n if s == -1 else f"{n}={s}" for n, s in into.items())
        raise NamesError(
            f"the parts of a dimension multiply to its size, got '{shown}' for {name}={size} in {typeof(x)}: "
            f"give sizes that do"
        )
    sizes = {n: size // known if s == -1 else s for n, s in into.items()}
    axes = [dim.axes for dim in x.dims]
    state = state_of(x.array)
    first = next(iter(sizes))
    mesh = jax.sharding.get_abstract_mesh().shape
    if axes[i] and sizes[first] % math.prod(mesh[a] for a in axes[i]):
        x, axes[i] = whole(x, (name,), f"splitting '{name}' into '{' '.join(sizes)}'"), ()
    split = [axes[i]] + [()] * (len(sizes) - 1)
    parts = math.prod(mesh[a] for a in x.slices[i]) if x.slices else 1
    local = [s // parts if n == first else s for n, s in sizes.items()]
    return _reshaped(
        x,
        state,
        x.names[:i] + tuple(sizes) + x.names[i + 1 :],
        [*axes[:i], *split, *axes[i + 1 :]],
        (*x.array.shape[:i], *local, *x.array.shape[i + 1 :]),
    )


def merge_axes(x: NamedArray, names: Sequence[str], into: str) -> NamedArray:
    """Merges neighbouring dimensions into one, major to minor.

    Where an inner one is sliced, it is gathered first.
    """
    x = transpose(x, _side_by_side(x, names))
    x = whole(x, tuple(names[1:]), f"merging '{' '.join(names)}'")
    i = x.index(names[0])
    end = i + len(names)
    axes = [dim.axes for dim in x.dims]
    shape = (*x.array.shape[:i], math.prod(x.array.shape[i:end]), *x.array.shape[end:])
    return _reshaped(x, state_of(x.array), (*x.names[:i], into, *x.names[end:]), [*axes[: i + 1], *axes[end:]], shape)


def _side_by_side(x: NamedArray, names) -> tuple[str, ...]:
    order = []
    for n in x.names:
        order += list(names) if n == names[0] else [] if n in names else [n]
    return tuple(order)


def _reshaped(x: NamedArray, state, names, axes, shape) -> NamedArray:
    if state.mode == "explicit" and any(axes):
        array = jax.lax.reshape(x.array, shape, out_sharding=spec_of(axes, state.pending, state.copied))
    else:
        array = jnp.reshape(x.array, shape)
    return NamedArray(array, tuple(names), tuple(axes) if x.slices else ())


def unbind(x: NamedArray, name: str | Axis) -> tuple[NamedArray, ...]:
    """One array for each position of a name, without it: `q, k, v = unbind(qkv, "qkv")`."""
    from trellis.named.index import positions

    name = name.name if isinstance(name, Axis) else name
    refuse_pending(x, "indexing")
    x, i = whole(x, (name,), "indexing"), x.index(name)
    names, slices = (kept[:i] + kept[i + 1 :] for kept in (x.names, x.slices))
    return tuple(NamedArray(array, names, slices) for array in positions(x.array, i))


def split(x: NamedArray, name: str, sizes: int | Sequence[int]) -> tuple[NamedArray, ...]:
    """Pieces along a name: equal ones for an integer, or of the given sizes.

    Raises:
        NamesError: the sizes do not add up to the dimension's.
    """
    size = x.shape[x.names[x.index(name)]]
    pieces = [size // sizes] * sizes if isinstance(sizes, int) else list(sizes)
    if builtin_sum(pieces) != size:
        raise NamesError(
            f"the pieces of a dimension add up to it, got {pieces} for {name}={size} in {typeof(x)}: give sizes that do"
        )
    refuse_pending(x, "indexing")
    x = whole(x, (name,), "indexing")
    return tuple(x.with_array(part) for part in jax.lax.split(x.array, pieces, x.index(name)))


builtin_sum = sum


def _joined(name: str, arrays: Sequence[NamedArray], what: str, sizes_differ: bool):
    for x in arrays:
        refuse_pending(x, what)
    renamed = [rename(x, {name: f"_{i}"}) if sizes_differ else x for i, x in enumerate(arrays)]
    check_sizes(renamed, what)
    names = union(list(arrays))
    where = assign(list(arrays), names)
    if where is not None and sizes_differ:
        where[name] = ()
    moved = [bring(x, where) for x in arrays]
    sizes = {n: s for x in moved for n, s in zip(x.names, x.array.shape, strict=True)}
    plain = [spread(x, names, where, {**sizes, name: x.shape.get(name, 1)}) for x in moved]
    slices = tuple(where[n] for n in names) if any(x.slices for x in arrays) else ()
    return plain, names, slices


def concatenate(arrays: Sequence[NamedArray], name: str) -> NamedArray:
    """Joins arrays along a name that all of them have."""
    for x in arrays:
        x.index(name)
    plain, names, slices = _joined(name, arrays, "concatenate", True)
    return settle(NamedArray(jnp.concatenate(plain, axis=names.index(name)), names, slices))


def stack(arrays: Sequence[NamedArray], name: str) -> NamedArray:
    """Puts arrays side by side under a new leading name."""
    if any(name in x.names for x in arrays):
        raise NamesError(
            f"stack makes a new dimension, got '{name}' in {typeof(arrays[0])}: choose another name, or concatenate"
        )
    plain, names, slices = _joined(name, arrays, "stack", False)
    return settle(NamedArray(jnp.stack(plain), (name, *names), ((), *slices) if slices else ()))


def pad(x: NamedArray, widths: Mapping[str, tuple[int, int]], *, value=0) -> NamedArray:
    """Adds `(before, after)` elements of `value` along names: `pad(x, {"pos": (1, 0)})`."""
    x = whole(x, tuple(widths), "pad")
    for name in widths:
        x.index(name)
    out = jnp.pad(x.array, [widths.get(n, (0, 0)) for n in x.names], constant_values=jnp.asarray(value, x.dtype))
    return settle(x.with_array(out))


def roll(x: NamedArray, shift: int, name: str) -> NamedArray:
    """Shifts elements along a name, around the end."""
    x = whole(x, (name,), "roll")
    return settle(x.with_array(jnp.roll(x.array, shift, axis=x.index(name))))


def broadcast_to(x: NamedArray, axes) -> NamedArray:
    """The same values along all given axes, in their order."""
    from trellis.named.axis import axes_of

    axes = axes_of(axes)
    names = tuple(a.name for a in axes)
    if lost := [n for n in x.names if n not in names]:
        raise NamesError(
            f"broadcasting keeps every dimension, got none of '{lost[0]}' in '{' '.join(names)}' for {typeof(x)}: "
            f"add it"
        )
    layout = current_layout()
    mode = state_of(x.array).mode
    where = dict(zip(names, layout.assign(names), strict=True)) if layout and mode == "explicit" else assign([x], names)
    moved = bring(x, where)
    sizes = {a.name: a.size for a in axes}
    return transpose(
        NamedArray(
            spread(moved, names, where, sizes), names, tuple(where[n] for n in names) if x.slices and where else ()
        ),
        names,
    )
