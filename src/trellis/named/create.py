"""New arrays: constants, ranges, masks. Under a layout they are made where they are used."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trellis._compat import is_tracer
from trellis.mesh.dealing import deal, places_dealt
from trellis.mesh.landing import put
from trellis.mesh.layout import Layout, current_layout
from trellis.named import backend
from trellis.named.arguments import dtypes_of_jax, numbers_of, refuse_keys, shown
from trellis.named.array import NamedArray, named
from trellis.named.axis import Axes, Axis, Name, Names, NamesError, axes_of
from trellis.named.binary import equal, greater_equal, less_equal
from trellis.named.elementwise import outer, subtract, where
from trellis.named.operand import operand, refuse_cut, slices_dealt
from trellis.named.reshape import transpose
from trellis.notation import spec_of, typeof
from trellis.notation.state import mode_of


def layout_spec(names: tuple[str, ...], sizes: tuple[int, ...], which: str = "compute"):
    """The spec that the layout in force gives new arrays of these names, or None."""
    layout: Layout | None = current_layout()
    if layout is None or mode_of(jax.sharding.get_abstract_mesh()) != "explicit":
        return None
    axes = layout.assign(names, which)
    if not any(axes):
        return None
    layout.check(names, sizes, which)
    return spec_of(axes)


def _make(fn: Callable, axes: Axes, what: str) -> NamedArray:
    axes = axes_of(axes, what)
    names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
    return NamedArray(fn(sizes, layout_spec(names, sizes)), names)


_FOR_EACH = "take one of them, or map over a name with vmap"


def full(axes: Axes, value, dtype=None) -> NamedArray:
    """An array of one value: `full({"batch": 4, "embed": 8}, 1.0)`.

    Names: the given ones.
    Gradient: that of `value` is the sum of the elements'; an all-reduce where the array is sliced.
    Moves: nothing; each device makes its own slice.

    Raises:
        NamesError: `value` is not a single number.
    """
    (value,) = numbers_of("full", "use broadcast_to", value=value)

    def make(shape, spec):
        with dtypes_of_jax((value,), "full"):
            x = jnp.asarray(value, dtype)
        if is_tracer(value):
            return backend.broadcast(x, shape, spec)
        return jax.lax.broadcast_in_dim(x, shape, (), out_sharding=spec)

    return _make(make, axes, "full")


def zeros(axes: Axes, dtype=jnp.float32) -> NamedArray:
    """An array of zeros: `zeros({"batch": 4, "embed": 8})`, or of axes.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device makes its own slice.
    """
    return _make(lambda shape, spec: _constant(0, dtype, shape, spec), axes, "zeros")


def ones(axes: Axes, dtype=jnp.float32) -> NamedArray:
    """An array of ones: `ones({"batch": 4, "embed": 8})`, or of axes.

    Names: the given ones.
    Gradient: none.
    Moves: nothing; each device makes its own slice.
    """
    return _make(lambda shape, spec: _constant(1, dtype, shape, spec), axes, "ones")


def _constant(value, dtype, shape, spec):
    return jax.lax.broadcast_in_dim(jnp.asarray(value, dtype), shape, (), out_sharding=spec)


def _one_axis(axis, what: str) -> Axis:
    axes = axes_of(axis, what)
    if len(axes) != 1:
        raise NamesError(f"{what} takes exactly one axis, got {', '.join(map(str, axes)) or 'none'}: pass one")
    return axes[0]


def arange(axis: Axis, *, start=0, step=1, dtype=jnp.int32) -> NamedArray:
    """`start, start + step, ...` along an axis.

    Names: that of `axis`.
    Gradient: those of `start` and `step` are sums over the elements'; an all-reduce of each where the axis is sliced.
    Moves: nothing; each device makes its own slice.

    Raises:
        NamesError: `start` or `step` is not a single number, or is a float while `dtype` is one of whole numbers.
    """
    axis = _one_axis(axis, "arange")
    start, step = numbers_of("arange", _FOR_EACH, start=start, step=step)
    refuse_cut((axis.name,), "arange")
    slices = slices_dealt(axis.name, axis.size, "arange")

    def iota(shape, spec):
        places = jax.lax.broadcasted_iota(jnp.int32 if slices else dtype, shape, 0, out_sharding=spec)
        return places_dealt(places, slices, axis.size).astype(dtype) if slices else places

    with dtypes_of_jax((dtype,), "arange", "pass dtype=jnp.int32, and cast the result with .astype"):
        values = _make(iota, axis, "arange")
    if isinstance(start, int) and isinstance(step, int) and (start, step) == (0, 1):
        return values
    if jnp.issubdtype(dtype, jnp.integer) and not jnp.issubdtype(jnp.result_type(start, step), jnp.integer):
        raise NamesError(
            f"a range of whole numbers needs a whole start and step, got start={shown(start)} and step={shown(step)} "
            f"for {jnp.dtype(dtype)}, in arange: pass dtype=jnp.float32"
        )
    with dtypes_of_jax((start, step), "arange"):
        return values.with_array(values.array * jnp.asarray(step, dtype) + jnp.asarray(start, dtype))


def linspace(axis: Axis, *, start=0.0, stop=1.0, dtype=jnp.float32) -> NamedArray:
    """Evenly spaced numbers along an axis, both ends included.

    Names: that of `axis`.
    Gradient: those of `start` and `stop` are sums over the elements'; an all-gather where the axis is sliced.
    Moves: nothing; each device makes its own slice.

    Raises:
        NamesError: `start` or `stop` is not a single number.
    """
    axis = _one_axis(axis, "linspace")
    refuse_cut((axis.name,), "linspace")
    start, stop = numbers_of("linspace", _FOR_EACH, start=start, stop=stop)
    spec = layout_spec((axis.name,), (axis.size,))
    values = jnp.linspace(start, stop, axis.size, dtype=dtype)
    if slices := slices_dealt(axis.name, axis.size, "linspace"):
        values = deal(values, slices, 0)
    made = NamedArray(values if spec is None else jax.reshard(values, spec), (axis.name,))
    return operand(made, "linspace")


def one_hot(ids: NamedArray, axis: Axis, dtype=jnp.float32) -> NamedArray:
    """1 where the position along `axis` is the id, 0 elsewhere; `axis` is the last dimension.

    Made by comparison with a range, so that `axis` may be sliced. Ids outside of it have no 1.

    Names: those of `ids`, then that of `axis`.
    Gradient: none; whole numbers have none.
    Moves: nothing.

    Raises:
        NamesError: the ids are not whole numbers, or have the name of `axis`.
    """
    ids, axis = operand(ids, "one_hot"), _one_axis(axis, "one_hot")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise NamesError(f"ids must be whole numbers, got {typeof(ids)}, in one_hot: use .astype('int32')")
    if axis.name in ids.names:
        raise NamesError(
            f"one_hot must add a new dimension, got '{axis.name}' in {typeof(ids)}, in one_hot: rename one of them"
        )
    ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids  # a range in their own type may begin again
    return outer(equal, ids, arange(axis, dtype=ids.dtype)).astype(dtype)


def tril(x: NamedArray, row: Name, column: Name, k: int = 0) -> NamedArray:
    """Keeps elements with `column <= row + k`, zeros the others (of ones, a causal mask).

    Names: those of `x`.
    Gradient: of what is kept; nothing moves.
    Moves: nothing.
    """
    x = operand(x, "tril")
    return where(_ordered(greater_equal(_difference(x, row, column), -k), x), x, jnp.zeros((), x.dtype))


def triu(x: NamedArray, row: Name, column: Name, k: int = 0) -> NamedArray:
    """Keeps elements with `column >= row + k`, zeros the others.

    Names: those of `x`.
    Gradient: of what is kept; nothing moves.
    Moves: nothing.
    """
    x = operand(x, "triu")
    return where(_ordered(less_equal(_difference(x, row, column), -k), x), x, jnp.zeros((), x.dtype))


def _ordered(mask: NamedArray, x: NamedArray) -> NamedArray:
    """A mask with its names in the order in which `x` has them."""
    return transpose(mask, tuple(n for n in x.names if n in mask.names))


def _difference(x: NamedArray, row: Name, column: Name) -> NamedArray:
    """`row - column` for each element."""
    return outer(subtract, *(_range_like(x, name) for name in (row, column)))


def _range_like(x: NamedArray, name: Name) -> NamedArray:
    """The positions along a name of `x`: in manual mode those of this device's slice."""
    i = x.index(name)
    axes = x.slices[i] if x.slices else ()
    if not axes:
        return arange(x.axis(name))
    size = x.array.shape[i]
    return NamedArray(jax.lax.axis_index(axes) * size + jax.lax.iota(jnp.int32, size), (x.names[i],), (axes,))


def from_numpy(array: np.ndarray, names: Names) -> NamedArray:
    """A host array put where the layout in force says, each device receiving only its part.

    Its positions are in natural order, and are dealt out if the layout deals them out. Of several processes each gives
    the whole array, which is compared.

    Names: the given ones.
    Gradient: none.
    Moves: nothing between devices; each is sent its slice.

    Raises:
        MeshError: the array is not the same in all processes.
    """
    refuse_keys((array,), "from_numpy", "name them with named(keys, '...'), and place them with shard")
    x = named(np.asarray(array), names)
    layout = current_layout()
    if layout is None:
        return NamedArray(jnp.asarray(x.array), x.names)
    layout.check(x.names, x.array.shape)
    values = x.array
    for dim, (name, size) in enumerate(zip(x.names, values.shape)):
        if slices := slices_dealt(name, size, "from_numpy"):
            with jax.ensure_compile_time_eval():
                order = np.asarray(deal(jnp.arange(size), slices, 0))
            values = np.take(values, order, dim)
    return NamedArray(put(values, layout.sharding(x.names), "from_numpy"), x.names)
