"""The ragged all-to-all, with a gradient that knows the way back."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.nn.moe.tiles import LANES

# Where rows for each device begin here, how many there are, where they land there, and how many come from each.
Way = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(1, 4))
def ragged_all_to_all(x: jax.Array, room: int, there: Way, back: Way, axes: tuple[str, ...]) -> jax.Array:
    """Sends rows to other devices, as many to each as there are; places where none arrives hold anything.

    Args:
        x: `rows ...`, as `in_tiles` makes them.
        room: rows of the result.
        there: where rows for each device begin here, how many, where they land there, and how many come from each.
        back: the same for the way back, which the gradient takes.
        axes: the mesh axes that the devices are along.
    """
    return _send(x, room, there, axes)


def in_tiles(x: jax.Array) -> jax.Array:
    """Rows in tiles of their own if they fill these, `rows embed` to `rows 16 ...`, or 8, 4 or 2 instead of 16.

    A TPU moves whole tiles: such a row is neither padded nor taken apart. A row that does not fill two rows of a tile
    stays one row of a tile, which takes three times as long on its way in and out.
    """
    rows, embed = x.shape
    deep = next((deep for deep in (16, 8, 4, 2) if embed % (deep * LANES) == 0), 1)
    return x.reshape(rows, deep, embed // deep)


def _send(x, room: int, way: Way, axes):
    empty = vary(lax.empty((room, *x.shape[1:]), x.dtype), varying_axes(x))
    return lax.ragged_all_to_all(x, empty, *way, axis_name=axes)


def _forward(x, room: int, there: Way, back: Way, axes):
    return _send(x, room, there, axes), (jnp.zeros((x.shape[0], 0), x.dtype), back)


def _backward(room: int, axes, kept, d):
    like, back = kept
    return _send(d, like.shape[0], back, axes), None, None


ragged_all_to_all.defvjp(_forward, _backward)
