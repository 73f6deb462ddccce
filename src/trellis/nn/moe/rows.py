"""Moves tokens to rows sorted by expert and back, by gathers in both directions, forward and backward."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import vary, varying_axes
from trellis.named.backend import fences_gradients, fences_sums

# From rows sorted by expert, how many each expert has, and how much each row counts, to the experts' results.
# Rows after the last expert's are meaningless and may be NaN, and so may their results.
# One that gathers its rows gets the array that holds them, and which they are (`Taken`) as a fourth argument; its
# results are for that array's rows, summed if a row was taken several times.
Compute = Callable[..., jax.Array]


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, copies: jax.Array) -> jax.Array:
    """Rows of `x` at `index`; any row where that is out of range.

    The gradient consists of gathers too, and a sum over copies, where JAX's own would scatter. It never holds all
    copies of all rows side by side.

    Args:
        x: `rows ...`.
        index: `i32["places"]`; no row more often than `copies` says.
        copies: `i32["rows count"]`, where each row is in the result; the number of places for nowhere.

    >>> import jax.numpy as jnp
    >>> x, order = jnp.array([[1.0], [2.0]]), jnp.array([1, 0])
    >>> take_rows(x, order, jnp.array([[1], [0]])).ravel().tolist()
    [2.0, 1.0]
    """
    return _rows(x, index)


def _take_rows_backward(copies, d):
    summed = _summed(d, copies)
    return lax.optimization_barrier(summed) if fences_gradients(d) else summed, None, None


take_rows.defvjp(lambda x, index, copies: (_rows(x, index), copies), _take_rows_backward)


@jax.custom_vjp
def sum_rows(made: jax.Array, copies: jax.Array, index: jax.Array) -> jax.Array:
    """Sums of rows, in float32: the backward pass of `take_rows`, and the other way round.

    Args:
        made: `places ...`.
        copies: `i32["rows count"]`, which of them are summed; the number of places for none.
        index: `i32["places"]`, to which sum each goes; any number where it goes to none.

    >>> import jax.numpy as jnp
    >>> sum_rows(jnp.array([[1.0], [10.0]]), jnp.array([[0, 1], [2, 2]]), jnp.array([0, 0])).ravel().tolist()
    [11.0, 0.0]
    """
    return _sum_by_itself(made, copies)


def _sum_by_itself(made, copies):
    summed = _summed(made, copies)
    return lax.optimization_barrier(summed) if fences_sums(made) else summed


sum_rows.defvjp(
    lambda made, copies, index: (_sum_by_itself(made, copies), index),
    lambda index, d: (_rows(d, index), None, None),
)


@jax.custom_vjp
def reorder(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """All rows of `x` in another order, `x[order]`; in reverse `x[place]`."""
    return _rows(x, order)


reorder.defvjp(lambda x, order, place: (_rows(x, order), place), lambda place, d: (_rows(d, place), None, None))


def _rows(x, index):
    return x.at[index].get(mode="clip", wrap_negative_indices=False)


def _summed(made, copies):
    total = 0.0
    for j in range(copies.shape[1]):
        taken = _rows(made, copies[:, j]).astype(jnp.float32)
        there = lax.broadcast_in_dim(copies[:, j] < made.shape[0], taken.shape, (0,))
        # Where there is none, what is taken may be NaN.
        total = total + lax.select(there, taken, jnp.zeros_like(taken))
    return total.astype(made.dtype)


class Taken(NamedTuple):
    """Which rows of an array were taken, and where each of its rows is among these.

    Attributes:
        index: `i32["rows"]`, which row each is; any number for rows of no expert, which come last.
        copies: `i32["n count"]`, where each row of the array is among them; the number of rows for nowhere. None if
            no row is taken twice.
    """

    index: jax.Array
    copies: jax.Array | None

    def of(self, x: jax.Array) -> jax.Array:
        """The taken rows, `rows ...`, of an array `n ...`."""
        assert self.copies is not None
        return take_rows(x, self.index, self.copies)

    def summed(self, made: jax.Array) -> jax.Array:
        """For each row of the array, `n ...`, the sum of the results made from it, `rows ...`."""
        assert self.copies is not None
        return sum_rows(made, self.copies, self.index)


def sort_by_expert(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order that sorts by expert, each one's place in it, and how many every expert has.

    Args:
        experts: `i32["n"]`, each from 0 to `count - 1`; other numbers mean no expert here and come last.
        count: how many experts there are.

    >>> import jax.numpy as jnp
    >>> [a.tolist() for a in sort_by_expert(jnp.array([2, 0, 5, 0]), 3)]
    [[1, 3, 0, 2], [2, 0, 3, 1], [2, 0, 1]]
    """
    experts = jnp.where((experts < 0) | (experts >= count), count, experts)
    order = _order(experts)
    place = _order(order)
    sizes = (experts[:, None] == jnp.arange(count)[None]).sum(0, dtype=jnp.int32)
    return order, place, sizes


def _order(keys):
    """`jnp.argsort`, stable. By JAX's type its result would be the same on all devices; a backward pass that begins
    where a manual region has ended would then read one device's order for all."""
    number = vary(lax.iota(jnp.int32, keys.shape[0]), varying_axes(keys))
    return lax.sort((keys, number), num_keys=1, is_stable=True)[1]


def local_experts(
    x: jax.Array, ids: jax.Array, weights: jax.Array, compute: Compute, *, count: int, gathers: bool = False
) -> jax.Array:
    """The weighted sum of what this device's experts make of each token; nothing moves.

    Args:
        x: `tokens embed`.
        ids: `i32["tokens choices"]`, experts numbered from this device's first, all of a token different. Numbers
            outside of 0 to `count - 1` are other devices' experts, and add nothing.
        weights: `f32["tokens choices"]`.
        compute: what the experts do to rows sorted by expert, `compute(rows, sizes, weights)`.
        count: how many experts are here.
        gathers: whether `compute(x, sizes, weights, taken)` takes its rows itself, and sums what it makes of a token.

    Returns:
        `tokens embed`.
    """
    tokens, choices = ids.shape
    room = tokens * min(choices, count)  # what the fullest device gets: a token's experts are all different
    order, place, sizes = sort_by_expert(ids.reshape(-1), count)
    place = jnp.where(place < sizes.sum(), place, room)
    order, taken = order[:room], Taken(order[:room] // choices, place.reshape(tokens, choices))
    rows = x if gathers else taken.of(x)
    counted = take_rows(weights.reshape(-1), order, place[:, None])
    return compute(rows, sizes, counted, taken) if gathers else taken.summed(compute(rows, sizes, counted))
