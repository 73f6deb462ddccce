"""New arrays: constants, ranges, masks. Under a layout they are made where they are used."""

import jax
import jax.numpy as jnp
import numpy as np

from trellis.mesh.layout import Layout, current_layout
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, axes_of
from trellis.named.elementwise import ELEMENTWISE
from trellis.notation import spec_of
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


def _make(fn, axes) -> NamedArray:
    axes = axes_of(axes)
    names, sizes = tuple(a.name for a in axes), tuple(a.size for a in axes)
    return NamedArray(fn(sizes, layout_spec(names, sizes)), names)


def full(axes, value, dtype=None) -> NamedArray:
    """An array of one value: `full({"batch": 4, "embed": 8}, 1.0)`."""

    def make(shape, spec):
        x = jnp.asarray(value, dtype)
        return jax.lax.broadcast_in_dim(x, shape, (), out_sharding=spec)

    return _make(make, axes)


def zeros(axes, dtype=jnp.float32) -> NamedArray:
    """An array of zeros."""
    return full(axes, 0, dtype)


def ones(axes, dtype=jnp.float32) -> NamedArray:
    """An array of ones."""
    return full(axes, 1, dtype)


def arange(axis: Axis, *, start=0, step=1, dtype=jnp.int32) -> NamedArray:
    """`start, start + step, ...` along an axis."""
    values = _make(lambda shape, spec: jax.lax.broadcasted_iota(dtype, shape, 0, out_sharding=spec), axis)
    if isinstance(start, int) and start == 0 and step == 1:
        return values
    return values.with_array(values.array * jnp.asarray(step, dtype) + jnp.asarray(start, dtype))


def linspace(axis: Axis, *, start=0.0, stop=1.0, dtype=jnp.float32) -> NamedArray:
    """Evenly spaced numbers along an axis, both ends included."""
    return NamedArray(jnp.linspace(start, stop, axis.size, dtype=dtype), (axis.name,))


def one_hot(ids: NamedArray, axis: Axis, dtype=jnp.float32) -> NamedArray:
    """1 where the position along `axis` is the id, 0 elsewhere; `axis` is the last dimension.

    Made by comparison with a range, so that `axis` may be sliced.
    """
    positions = arange(axis, dtype=ids.dtype)
    hot = ELEMENTWISE["equal"](ids, positions).astype(dtype)
    return hot.transpose(f"... {axis.name}")


def tril(x: NamedArray, row: str, column: str, k: int = 0) -> NamedArray:
    """Keeps elements with `column <= row + k`, zeros the others (a causal mask, from ones)."""
    keep = _difference(x, row, column) >= -k
    return ELEMENTWISE["where"](keep, x, jnp.zeros((), x.dtype))


def triu(x: NamedArray, row: str, column: str, k: int = 0) -> NamedArray:
    """Keeps elements with `column >= row + k`, zeros the others."""
    keep = _difference(x, row, column) <= -k
    return ELEMENTWISE["where"](keep, x, jnp.zeros((), x.dtype))


def _difference(x: NamedArray, row: str, column: str) -> NamedArray:
    """`row - column` for each element."""
    return arange(x.axis(row)) - arange(x.axis(column))


def from_numpy(array: np.ndarray, names: str) -> NamedArray:
    """A host array put where the layout in force says, each device receiving only its part."""
    from trellis.named.array import named

    x = named(np.asarray(array), names)
    layout = current_layout()
    if layout is None:
        return NamedArray(jnp.asarray(x.array), x.names)
    layout.check(x.names, x.array.shape)
    return NamedArray(jax.device_put(x.array, layout.sharding(x.names)), x.names)
