"""Mixtures have one derivative: a second one is refused."""

import functools

import jax

from trellis.nn.moe.exchange import ExpertsError


def once(way: str, weights: jax.Array, *others: jax.Array) -> jax.Array:
    """The weights of choices, of a mixture that refuses to be differentiated twice.

    Products of groups and exchanges have backward rules that cannot be differentiated. JAX says so of a loop or of a
    rule somewhere inside.

    Args:
        way: of the mixture, for the message.
        weights: those of the choices.
        others: what else has a gradient.

    Raises:
        ExpertsError: a second derivative.
    """
    return _first(way, weights, *others)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first(way: str, weights, *others):
    return weights


@_first.defjvp
def _derivative(way: str, primals, tangents):
    return _again(way, *primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _again(way: str, weights, *others):
    return weights


@_again.defjvp
def _refused(way: str, primals, tangents):
    raise ExpertsError(
        "A mixture of experts can be differentiated once, by jax.grad or another of reverse mode.",
        seen=f"a second derivative, the way {way}",
        where="model.routing.way",
        fix="use the dense way, which computes every expert for every token",
    )
