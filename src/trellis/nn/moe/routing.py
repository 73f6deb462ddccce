"""Which experts a token goes to, and what each counts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trellis.named import Axis, NamedArray, cumsum, einsum, one_hot, softmax, top_k, where
from trellis.nn.moe.exchange import ExpertsError


class Choices(NamedTuple):
    """Each token's experts, all different, the likeliest first.

    Attributes:
        ids: `i32["batch pos choices"]`, from 0; the number of experts where a choice was dropped.
        weights: `f32["batch pos choices"]`, what each counts; 0 where a choice was dropped.
    """

    ids: NamedArray
    weights: NamedArray


def score(x: NamedArray, router: NamedArray) -> NamedArray:
    """How much each token is for each expert, before the softmax, in float32.

    `routes` are the experts as the router sees them: all of them for every token, whatever slices `experts`.

    Args:
        x: `"batch pos embed"`.
        router: `"embed routes"`; the product is computed in its type.

    Returns:
        `f32["batch pos routes"]`.
    """
    text = "batch pos embed, embed routes -> batch pos routes"
    return einsum(text, x.astype(router.dtype), router, preferred_element_type=jnp.float32)


def choose(scores: NamedArray, count: int, *, bias: NamedArray | None = None) -> Choices:
    """The `count` likeliest experts of each token, weighted by their probabilities, which are made to add up to 1.

    Args:
        scores: `f32["batch pos routes"]`, before the softmax.
        count: how many experts each token goes to.
        bias: `f32["routes"]`, added to the probabilities where experts are picked, and nowhere else (balancing without
            an auxiliary loss, Wang et al., 2024, arXiv:2408.15664). It gets no gradient.

    Raises:
        ExpertsError: fewer than two experts, whose weight would be 1 whatever the router says, or more than there are.
    """
    check_count(count, scores.shape["routes"], "choose")
    chances = softmax(scores, "routes")
    picked = _constant(chances)
    if bias is not None:
        picked = picked + _constant(bias).astype(picked.dtype)
    ids = top_k(picked, "routes", count, new_name="choices")[1]
    # A product with ones and zeros: its gradient is one too, on any sharding.
    weights = einsum("... choices routes, ... routes -> ... choices", _hot(ids, scores.shape["routes"]), chances)
    return Choices(ids, weights / weights.sum("choices"))


def check_count(count: int, experts: int, where: str) -> None:
    """A token goes to two experts or more, and to no more than there are.

    Raises:
        ExpertsError: with both numbers.
    """
    if count > experts:
        raise ExpertsError(
            "A token goes to different experts.",
            seen=f"{count} of {experts} experts",
            where=where,
            fix=f"use {experts} at most",
        )
    if count < 2:
        raise ExpertsError(
            "The weights of a token's experts add up to 1: of a single one it is always 1, and its router learns "
            "nothing from the loss.",
            seen=f"{count} of {experts} experts",
            where=where,
            fix="use 2 or more",
        )


def limit(choices: Choices, experts: int, capacity: float) -> Choices:
    """Drops what is over an expert's capacity; the rest of a dropped token's weights stays as it is.

    In each sequence an expert takes the first `ceil(capacity * choices * pos / experts)` tokens that chose it, in the
    order of positions. So what is dropped depends on the sequence alone, not on the mesh or the number of
    microbatches, and on no later token.

    Args:
        choices: of all tokens.
        experts: how many there are.
        capacity: 1 has room for an even load, 1.25 for a quarter more.
    """
    count, length = choices.ids.shape["choices"], choices.ids.shape["pos"]
    room = math.ceil(capacity * count * length / experts)
    hot = _hot(choices.ids, experts)
    taken = hot.sum("choices")
    before = cumsum(taken, "pos") - taken
    rank = (hot * before).sum("routes")
    kept = rank < room
    return Choices(
        where(kept, choices.ids, jnp.int32(experts)),
        where(kept, choices.weights, jnp.zeros((), choices.weights.dtype)),
    )


def _hot(ids: NamedArray, experts: int) -> NamedArray:
    return one_hot(ids, Axis("routes", experts))


def _constant(x: NamedArray) -> NamedArray:
    return x.with_array(jax.lax.stop_gradient(x.array))
