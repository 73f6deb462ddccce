"""Tokens to rows sorted by expert, and back: gathers in both directions, forward and backward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# From rows sorted by expert, and how many each expert has, to what the experts make of them.
Compute = Callable[[jax.Array, jax.Array], jax.Array]


@jax.custom_vjp
def take_rows(x: jax.Array, index: jax.Array, copies: jax.Array) -> jax.Array:
    """Rows of `x` at `index`, and zeros where that is `len(x)`.

    The gradient is a gather too (and a sum over copies), where JAX's own would scatter.

    Args:
        x: `rows embed`.
        index: `i32["places"]`; no row more often than `copies` says.
        copies: `i32["rows count"]`, where each row is in the result; the number of places for nowhere.

    >>> import jax.numpy as jnp
    >>> x, order = jnp.array([[1.0], [2.0]]), jnp.array([1, 2, 0])
    >>> take_rows(x, order, jnp.array([[2], [0]])).ravel().tolist()
    [2.0, 0.0, 1.0]
    """
    return _rows(x, index)


def _forward(x, index, copies):
    return _rows(x, index), copies


def _backward(copies, d):
    taken = _rows(d, copies.reshape(-1)).reshape(*copies.shape, *d.shape[1:])
    return taken.sum(1, dtype=jnp.float32).astype(d.dtype) if copies.shape[1] > 1 else taken[:, 0], None, None


take_rows.defvjp(_forward, _backward)


def _rows(x, index):
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def sort_by_expert(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order that sorts by expert, each one's place in it, and how many every expert has.

    Args:
        experts: `i32["n"]`, each from 0 to `count - 1`; other numbers belong to nobody here and come last.
        count: how many experts there are.

    >>> import jax.numpy as jnp
    >>> [a.tolist() for a in sort_by_expert(jnp.array([2, 0, 5, 0]), 3)]
    [[1, 3, 0, 2], [2, 0, 3, 1], [2, 0, 1]]
    """
    experts = jnp.where((experts < 0) | (experts >= count), count, experts)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    sizes = (experts[:, None] == jnp.arange(count)[None]).sum(0, dtype=jnp.int32)
    return order, place, sizes


def local_experts(x: jax.Array, ids: jax.Array, weights: jax.Array, compute: Compute, *, count: int) -> jax.Array:
    """The weighted sum of what this device's experts make of each token; nothing moves.

    Args:
        x: `tokens embed`.
        ids: `i32["tokens choices"]`, experts counted from this device's first, all of a token different. Numbers
            outside of 0 to `count - 1` are somebody else's, and add nothing.
        weights: `f32["tokens choices"]`.
        compute: what the experts do to rows sorted by expert.
        count: how many experts are here.

    Returns:
        `tokens embed`.
    """
    tokens, choices = ids.shape
    room = tokens * min(choices, count)  # what the fullest device gets: a token's experts are all different
    order, place, sizes = sort_by_expert(ids.reshape(-1), count)
    here = place < sizes.sum()
    place = jnp.where(here, place, room)
    order = order[:room]
    rows = take_rows(x, order // choices, place.reshape(tokens, choices))
    made = compute(rows, sizes)
    # Which pair each row is of: beyond the last row with an expert, none.
    pair = jnp.where(jnp.arange(room) < sizes.sum(), order, tokens * choices)
    return combine(made, weights, place.reshape(tokens, choices), pair)


@jax.custom_vjp
def combine(made: jax.Array, weights: jax.Array, place: jax.Array, pair: jax.Array) -> jax.Array:
    """The weighted sum of the rows that each token's experts made.

    Neither this nor its gradient ever holds all choices of all tokens side by side: forward there is one gather for
    each choice, backward one for all.

    Args:
        made: `rows embed`.
        weights: `f32["tokens choices"]`.
        place: `i32["tokens choices"]`, where each choice's row is; the number of rows for nowhere.
        pair: `i32["rows"]`, of which token and choice each row is, `token * choices + choice`; the number of these for
            none.

    >>> import jax.numpy as jnp
    >>> made, weights = jnp.array([[1.0], [10.0]]), jnp.array([[0.25, 0.5]])
    >>> combine(made, weights, jnp.array([[1, 0]]), jnp.array([1, 0])).tolist()
    [[3.0]]
    """
    total = 0.0
    for j in range(weights.shape[1]):
        total = total + weights[:, j, None] * _rows(made, place[:, j]).astype(jnp.float32)
    return total.astype(made.dtype)


def _combine_forward(made, weights, place, pair):
    return combine(made, weights, place, pair), (made, weights, place, pair)


def _combine_backward(kept, d):
    made, weights, place, pair = kept
    pulled = _rows(d, pair // weights.shape[1]).astype(jnp.float32)
    d_made = (pulled * _rows(weights.reshape(-1), pair)[:, None]).astype(made.dtype)
    d_weights = _rows((pulled * made.astype(jnp.float32)).sum(1), place)
    return d_made, d_weights.astype(weights.dtype), None, None


combine.defvjp(_combine_forward, _combine_backward)
