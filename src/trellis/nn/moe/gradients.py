"""Weights whose gradients go to arrays of their own: narrow ones, and those of which collectives want more rows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.platform import device_kind_of, scattered_tiles
from trellis.named import NamedArray
from trellis.named.placing import move
from trellis.nn.moe.tiles import ROWS
from trellis.notation import spec_of
from trellis.notation.state import state_of
from trellis.program.sizes import tiles_filled

# The largest share of rows that is worth summing in vain.
MORE = 0.1


class Apart(eqx.Module):
    """A device's part of a weight, and of what gets its gradient.

    Attributes:
        weight: `groups in out`, which gets none.
        room: `groups rows out`; nothing reads it, and it gets the gradient, with any numbers after the weight's rows.
        rows: how many there are.
    """

    weight: Any  # an array; None in a gradient
    room: Any  # likewise; None where it is not needed
    rows: int = eqx.field(static=True)


def read(weight: jax.Array | Apart) -> jax.Array:
    """What is multiplied."""
    return weight.weight if isinstance(weight, Apart) else weight


def kept(weight: jax.Array | Apart) -> jax.Array | Apart:
    """What `gradient_of` and `read` need of a weight."""
    return Apart(weight.weight, None, weight.rows) if isinstance(weight, Apart) else weight


def gradient_of(weight: jax.Array | Apart, kernel: Callable[..., jax.Array], *given, **how):
    """A weight's gradient by a platform's kernel, which writes as many rows as there is room for."""
    if isinstance(weight, Apart):
        return Apart(None, kernel(*given, weight.weight.dtype, down_to=weight.rows, **how), weight.rows)
    return kernel(*given, weight.dtype, **how)


def rows_to_fill(weight: jax.Array, axes: tuple) -> int:
    """How many rows of a weight's gradient devices are best given to sum: those of the weight, or a few more, if their
    shares are then summed beside other work.

    Args:
        weight: `groups in out` where it is at rest.
        axes: those that slice it where it is multiplied.
    """
    held, mesh = state_of(weight).axes[0], jax.typeof(weight).sharding.mesh
    (count, rows, columns), ways = weight.shape, math.prod(mesh.shape[a] for a in held if a not in axes[0])
    fills = scattered_tiles(device_kind_of(weight))
    if fills == 1 or not 1 < ways < mesh.size or any(axes):
        return rows
    high = rows
    while tiles_filled((count // ways, high, columns)) % fills:
        high = (high // ROWS + 1) * ROWS
    return high if high - rows <= MORE * rows else rows


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gradient_only(weight: jax.Array, names: tuple[str, ...], axes: tuple, copied: frozenset[str], rows: int):
    """Zeros in place of a weight that is moved, `groups rows out`. Their gradient comes back as the weight's own would,
    and nothing else moves."""
    shape = (weight.shape[0], rows, weight.shape[2])
    zeros = lax.broadcast_in_dim(jnp.zeros((), weight.dtype), shape, (), out_sharding=spec_of(axes))
    return move(NamedArray(zeros, names), axes, copied).array


def _forward(weight, names, axes, copied, rows):
    return gradient_only(weight, names, axes, copied, rows), weight


def _backward(names, axes, copied, rows, weight, d):
    def moved(w):
        if rows > w.shape[1]:
            held = state_of(w).axes[0]
            w = move(NamedArray(w, names), (held, *axes[1:]), copied.difference(held)).array
            # libtpu 0.0.42 refuses a program where a slice stands right behind a sum.
            w = lax.optimization_barrier(jnp.pad(w, ((0, 0), (0, rows - w.shape[1]), (0, 0))))
        return move(NamedArray(w, names), axes, copied).array

    _, pull = jax.vjp(moved, weight)  # nothing reads what is moved
    return pull(d)


gradient_only.defvjp(_forward, _backward)
