"""Indexing, slicing and updates by name."""

import jax
import jax.numpy as jnp

from trellis.named.array import NamedArray
from trellis.named.axis import Axis, NamesError
from trellis.named.placing import refuse_pending, settle, whole
from trellis.notation import spec_of, typeof
from trellis.notation.state import state_of


def _selection(x: NamedArray, key) -> dict:
    """Reads `x["pos", 3]`, `x["pos", 3, "batch", 1:2]` and `x[{"pos": 3}]`."""
    if isinstance(key, dict):
        pairs = dict(key)
    elif isinstance(key, tuple) and len(key) % 2 == 0:
        pairs = dict(zip(key[::2], key[1::2], strict=True))
    else:
        raise NamesError(
            f"indexing goes by name, got [{key!r}] for {typeof(x)}: "
            f'write x["pos", 3], x["pos", 2:5] or x[{{"pos": ids}}]'
        )
    pairs = {k.name if isinstance(k, Axis) else k: v for k, v in pairs.items()}
    for name, value in pairs.items():
        size = x.shape[x.names[x.index(name)]]
        if isinstance(value, int) and not -size <= value < size:
            raise NamesError(
                f"a position is inside its dimension, got {name}[{value}] for {typeof(x)}: use 0 to {size - 1}"
            )
    return pairs


def index(x: NamedArray, key) -> NamedArray:
    """Selects by name.

    An integer removes the name, a slice keeps it, a named array of positions
    puts its own names in the place of the first indexed one. A sliced (sharded)
    dimension is gathered first.

    Raises:
        NamesError: an absent name, or a position outside.
    """
    refuse_pending(x, "indexing")
    pairs = _selection(x, key)
    full = {n for n, v in pairs.items() if v == slice(None)} if not any(_is_array(v) for v in pairs.values()) else set()
    pairs = {n: v for n, v in pairs.items() if n not in full}
    x = whole(x, tuple(pairs), "indexing")
    for name, value in [(n, v) for n, v in pairs.items() if isinstance(v, int | slice)]:
        x = _static(x, name, value)
    arrays = {n: v for n, v in pairs.items() if _is_array(v)}
    if len(arrays) == 1:
        ((name, ids),) = arrays.items()
        return take(x, name, ids)
    if arrays:
        return settle(_gather(x, arrays))
    return x


def positions(array: jax.Array, axis: int) -> list[jax.Array]:
    """The positions along a dimension of a plain array, without it.

    Their gradient is one stack. Of one index after another it would be a sum of arrays padded with zeros.
    """
    parts = jax.lax.split(array, (1,) * array.shape[axis], axis)
    return [jax.lax.squeeze(part, (axis,)) for part in parts]


def _is_array(value) -> bool:
    return isinstance(value, NamedArray) or (hasattr(value, "ndim") and not isinstance(value, int))


def _static(x: NamedArray, name: str, value: int | slice) -> NamedArray:
    i = x.index(name)
    if isinstance(value, int):
        array = jax.lax.index_in_dim(x.array, value, i, keepdims=False)
        return NamedArray(array, x.names[:i] + x.names[i + 1 :], x.slices[:i] + x.slices[i + 1 :])
    start, stop, step = value.indices(x.shape[name])
    if step < 0:
        raise NamesError(f"slices go forward, got {name}[{value.start}:{value.stop}:{step}] for {typeof(x)}: use flip")
    return x.with_array(jax.lax.slice_in_dim(x.array, start, max(start, stop), step, axis=i))


def _as_named(ids) -> NamedArray:
    if isinstance(ids, NamedArray):
        return ids
    if getattr(ids, "ndim", 0):
        raise NamesError(
            f"positions are a named array or a scalar, got an array of shape {ids.shape}: name its dimensions"
        )
    return NamedArray(jnp.asarray(ids), ())


def take(x: NamedArray, name: str | Axis, ids) -> NamedArray:
    """Rows of `x` along a name at named positions: `take(table, "vocab", tokens)` is an embedding lookup.

    The names of `ids` stand in the place of `name`. Where `name` is sliced,
    each device looks up the rows that it holds, and the partial sums are
    settled; the gradient stays where the rows are.

    Args:
        x: the table, `"... name ..."`.
        name: the dimension looked up.
        ids: `i32` positions, counted from 0; out of range gives zeros.

    Raises:
        NamesError: `ids` share a name with the rest of the table.
    """
    from trellis.named.lookup import lookup

    refuse_pending(x, "take")
    name = name.name if isinstance(name, Axis) else name
    ids = _as_named(ids)
    if clash := [n for n in ids.names if n in x.names and n != name]:
        raise NamesError(
            f"positions have names that the table has not, got '{clash[0]}' in {typeof(ids)} and {typeof(x)}: rename it"
        )
    return settle(lookup(x, name, ids))


def _gather(x: NamedArray, arrays: dict) -> NamedArray:
    """Several names at once: their positions are broadcast together by name."""
    from trellis.named.elementwise import together

    ids = {n: _as_named(v) for n, v in arrays.items()}
    for value in ids.values():
        if clash := [n for n in value.names if n in x.names and n not in ids]:
            raise NamesError(f"positions have names that the array has not, got '{clash[0]}' in {typeof(x)}: rename it")
    plain, names, _ = together(tuple(ids.values()), "indexing")
    plain = [jnp.broadcast_to(a, jnp.broadcast_shapes(*(b.shape for b in plain))) for a in plain]
    kept = tuple(n for n in x.names if n not in ids)
    moved = jnp.transpose(x.array, [x.index(n) for n in (*ids, *kept)])
    axes = dict(zip(x.names, state_of(x.array).axes, strict=True))
    out = _out_spec(plain[0], [axes[n] for n in kept], state_of(x.array).mode)
    array = moved.at[tuple(plain)].get(out_sharding=out) if out is not None else moved[tuple(plain)]
    return NamedArray(array, (*names, *kept))


def _out_spec(ids, kept_axes, mode: str):
    if mode != "explicit":
        return None
    return spec_of([*state_of(ids).axes, *kept_axes])


class _At:
    """`x.at[...]`: updates by name, as `jax.numpy`'s `.at` does by position."""

    def __init__(self, x: NamedArray, key=None):
        self.x, self.key = x, key

    def __getitem__(self, key) -> "_At":
        return _At(self.x, key)

    def _update(self, method: str, value) -> NamedArray:
        from trellis.named.reshape import transpose

        x = self.x
        refuse_pending(x, f"at[...].{method}")
        pairs = _selection(x, self.key)
        x = whole(x, tuple(pairs), "an update")
        ids = {n: v for n, v in pairs.items() if isinstance(v, NamedArray)}
        if len(ids) > 1:
            raise NamesError(
                f"an update takes one array of positions, got {len(ids)} for {typeof(x)}: update one name at a time"
            )
        key = tuple(_raw(pairs.get(n, slice(None))) for n in x.names)
        if isinstance(value, NamedArray):
            names = _result_names(x, pairs)
            if set(value.names) - set(names):
                raise NamesError(
                    f"an update has names of its place, got {typeof(value)} for '{' '.join(names)}': rename or select"
                )
            kept = tuple(n for n in names if n in value.names)
            value = transpose(value, kept).array.reshape([1 if n not in kept else value.shape[n] for n in names])
            state = state_of(x.array)
            if state.mode == "explicit":
                axes = dict(zip(x.names, state.axes, strict=True))
                value = jax.reshard(value, spec_of([axes.get(n, ()) if n in kept else () for n in names]))
        return x.with_array(getattr(x.array.at[key], method)(value))


def _raw(value):
    return value.array if isinstance(value, NamedArray) else value


def _result_names(x: NamedArray, pairs) -> tuple[str, ...]:
    names: list[str] = []
    for n in x.names:
        value = pairs.get(n, slice(None))
        if isinstance(value, NamedArray):
            names += value.names
        elif isinstance(value, slice):
            names.append(n)
    return tuple(names)


for _method in ("set", "add", "multiply", "divide", "min", "max", "power"):

    def _make(method=_method):
        def update(self, value) -> NamedArray:
            return self._update(method, value)

        update.__name__ = method
        update.__doc__ = f"The array with `{method}` applied at the selected place."
        return update

    setattr(_At, _method, _make())
_At.mul = _At.multiply


def at(x: NamedArray) -> _At:
    """`at(x)["pos", 3].set(value)`, also `x.at["pos", 3].set(value)`."""
    return _At(x)
