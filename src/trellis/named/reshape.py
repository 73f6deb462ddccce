"""Operations that change names, order and sizes, but no values. They take partial sums, too: all of them are linear."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from trellis.mesh.layout import KEY_POSITIONS, POSITIONS, current_layout
from trellis.named.arguments import count_of, mapping_of, names_of
from trellis.named.array import NamedArray
from trellis.named.axis import Axes, Axis, Name, Names, NamesError, axes_of, name_of, once
from trellis.named.operand import operand, refuse_cut, refuse_dealt
from trellis.named.placing import assign, bring, spread, whole
from trellis.notation import spec_of, typeof
from trellis.notation.state import sharding_on, state_of


def rename(x: NamedArray, names: Mapping[Name, Name] | None = None, /, **more: Name) -> NamedArray:
    """The same array under other names: `rename(k, pos="key_pos")`. Nothing moves.

    Names: the new ones.
    Gradient: renamed back; nothing moves.
    Moves: nothing.

    Raises:
        NamesError: an old name is absent, an axis has another size, or two dimensions would have one name.
    """
    x = operand(x, "rename", pending=True)
    names = {} if names is None else mapping_of(names, "rename", "write rename(x, old='new') or {'old': 'new'}")
    new = {x.names[x.index(old)]: name for old, name in {**names, **more}.items()}
    refuse_cut(new, "rename")
    kept = (POSITIONS, KEY_POSITIONS)  # names under which positions stay dealt out, if they are
    refuse_dealt([n for old, name in new.items() for n in (old, str(name)) if {old, str(name)} != {*kept}], "rename", x)
    renamed = tuple(name_of(new[n], "rename") if n in new else n for n in x.names)
    if len(set(renamed)) < len(renamed):
        raise NamesError(
            f"a name must stand for one dimension only, got '{' '.join(renamed)}' after renaming {typeof(x)}: choose "
            "another name"
        )
    result = NamedArray(x.array, renamed, x.slices)
    for name in new.values():
        result.index(name)
    return result


def transpose(x: NamedArray, names: Names) -> NamedArray:
    """The same array with its dimensions in the given order (`"... embed"`: the others stay in theirs).

    Names: the given ones.
    Gradient: transposed back; nothing moves.
    Moves: nothing.

    Raises:
        NamesError: the names are not the array's own, each once.
    """
    x = operand(x, "transpose", pending=True)
    words = names_of(names, "transpose", "write transpose(x, '... embed') or a tuple of names")
    if "..." in words:
        named, at = {w.name if isinstance(w, Axis) else w for w in words}, words.index("...")
        words[at : at + 1] = [n for n in x.names if n not in named]
    order = [x.index(w) for w in words]
    if sorted(order) != list(range(len(x.names))):
        shown = " ".join(str(getattr(w, "name", w)) for w in words)
        raise NamesError(
            f"a transposition must list the array's own names, got '{shown}' for {typeof(x)}: name each once"
        )
    if order == sorted(order):
        return x
    names = tuple(x.names[i] for i in order)
    return NamedArray(jnp.transpose(x.array, order), names, tuple(x.slices[i] for i in order) if x.slices else ())


def split_axis(x: NamedArray, name: Name, into: Mapping[str, int] | Sequence[Axis]) -> NamedArray:
    """Splits one dimension into several, major to minor. One size may be -1.

    If the dimension is sliced, its first part takes the slices.

    Names: those of `x`, with the new ones in the place of the old.
    Gradient: merged again; nothing moves.
    Moves: nothing where the slices fall on whole pieces, else an all-gather of the name.

    Raises:
        NamesError: the sizes do not multiply to the dimension's, or a part has the name of another dimension.
    """
    x = operand(x, "split_axis", pending=True)
    i = x.index(name)
    name = x.names[i]
    refuse_cut((name,), "split_axis")
    size = x.shape[name]
    parts_of = dict(into) if isinstance(into, Mapping) else {a.name: a.size for a in axes_of(into, "split_axis")}
    fix = "write {'heads': 4, 'head_dim': -1}"
    into = {name_of(n, "split_axis"): count_of(s, "split_axis", fix) for n, s in parts_of.items()}
    refuse_dealt((name, *into), "split_axis", x)
    known = math.prod(s for s in into.values() if s != -1)
    negative = any(s < -1 for s in into.values())
    unknown = [n for n, s in into.items() if s == -1]
    divides = size % known == 0 if known else size == 0
    if not into or negative or len(unknown) > 1 or (not divides if unknown else size != known):
        shown = " ".join(n if s == -1 else f"{n}={s}" for n, s in into.items())
        raise NamesError(
            f"the parts of a dimension must multiply to its size, got '{shown}' for {name}={size} in {typeof(x)}: "
            "pass sizes that do"
        )
    sizes = {n: (size // known if known else 0) if s == -1 else s for n, s in into.items()}
    names = x.names[:i] + tuple(sizes) + x.names[i + 1 :]
    once(names, f"splitting '{name}' of {typeof(x)}")
    axes = [dim.axes for dim in x.dims]
    state = state_of(x.array)
    first = next(iter(sizes))
    mesh = _mesh_sizes(x)
    if axes[i] and sizes[first] % math.prod(mesh[a] for a in axes[i]):
        x, axes[i] = whole(x, (name,), f"splitting '{name}' into '{' '.join(sizes)}'"), ()
    split = [axes[i]] + [()] * (len(sizes) - 1)
    parts = math.prod(mesh[a] for a in x.slices[i]) if x.slices else 1
    local = [s // parts if n == first else s for n, s in sizes.items()]
    return _reshaped(
        x,
        state,
        names,
        [*axes[:i], *split, *axes[i + 1 :]],
        (*x.array.shape[:i], *local, *x.array.shape[i + 1 :]),
    )


def merge_axes(x: NamedArray, names: Sequence[Name], into: Name) -> NamedArray:
    """Merges dimensions into one, major to minor.

    They are brought side by side, where the first one stands. If an inner one is sliced, it is gathered first.

    Names: those of `x`, with `into` in the place of the first.
    Gradient: split again; nothing moves.
    Moves: nothing where the first name alone is sliced, else an all-gather of the others.

    Raises:
        NamesError: a name is absent, or `into` is the name of another dimension or an axis of another size.
    """
    x = operand(x, "merge_axes", pending=True)
    names = (names,) if isinstance(names, str) else names_of(names, "merge_axes", "write ('heads', 'head_dim')")
    words = [x.names[x.index(n)] for n in names]
    if not words:
        raise NamesError(f"merging needs at least one dimension, got none for {typeof(x)}, in merge_axes: name them")
    once(tuple(words), "merge_axes")
    refuse_cut(words, "merge_axes")
    refuse_dealt((*words, into), "merge_axes", x)
    x = transpose(x, _side_by_side(x, words))
    x = whole(x, tuple(words[1:]), f"merging '{' '.join(words)}'")
    i = x.index(words[0])
    end = i + len(words)
    new = (*x.names[:i], name_of(into, "merge_axes"), *x.names[end:])
    once(new, f"merging '{' '.join(words)}' of {typeof(x)}")
    axes = [dim.axes for dim in x.dims]
    shape = (*x.array.shape[:i], math.prod(x.array.shape[i:end]), *x.array.shape[end:])
    merged = _reshaped(x, state_of(x.array), new, [*axes[: i + 1], *axes[end:]], shape)
    merged.index(into)
    return merged


def _side_by_side(x: NamedArray, names) -> tuple[str, ...]:
    order = []
    for n in x.names:
        order += list(names) if n == names[0] else [] if n in names else [n]
    return tuple(order)


def _mesh_sizes(x: NamedArray) -> Mapping[str, int]:
    mesh = jax.typeof(x.array).sharding.mesh
    return (jax.sharding.get_abstract_mesh() if mesh.empty else mesh).shape


def _reshaped(x: NamedArray, state, names, axes, shape) -> NamedArray:
    if state.mode == "explicit" and (any(axes) or state.pending or state.copied):
        sharding = sharding_on(x.array, spec_of(axes, state.pending, state.copied))
        array = jax.lax.reshape(x.array, shape, out_sharding=sharding)
    else:
        array = jnp.reshape(x.array, shape)
    return NamedArray(array, tuple(names), tuple(axes) if x.slices else ())


def broadcast_to(x: NamedArray, axes: Axes) -> NamedArray:
    """The same values along all given axes, in their order.

    Names: the given ones.
    Gradient: summed over what is new; a reduce-scatter for an array that was gathered, an all-reduce for one that was
        whole.
    Moves: the array to where the layout has the result's names: an all-gather of one that rests in slices.

    Raises:
        NamesError: a dimension of `x` is not among them, or has another size.
    """
    x = operand(x, "broadcast_to", pending=True)
    axes = axes_of(axes, "broadcast_to")
    names = tuple(a.name for a in axes)
    sizes = {a.name: a.size for a in axes}
    if lost := [n for n in x.names if n not in names]:
        raise NamesError(
            f"broadcasting must keep every dimension, got none of '{lost[0]}' in '{' '.join(names)}' for {typeof(x)}: "
            "add it"
        )
    for axis in axes:
        if axis.name in x.names:
            x.index(axis)
    state = state_of(x.array)
    layout = current_layout()
    if layout is not None and state.mode == "explicit":
        where = dict(zip(names, layout.assign(names), strict=True))
        layout.check(names, [sizes[n] for n in names])
    else:
        where = assign([x], names)
    moved = x if state.pending else bring(x, where)
    if state.pending:
        where = {**dict.fromkeys(names, ()), **dict(zip(x.names, state.axes, strict=True))} if where else where
    local = {**sizes, **dict(zip(moved.names, moved.array.shape, strict=True))}
    slices = tuple(where[n] for n in names) if x.slices and where else ()
    return NamedArray(spread(moved, names, where, local), names, slices)
