"""Which experts a token goes to, and how much each counts."""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trellis.named import Axis, NamedArray, cumsum, einsum, one_hot, sigmoid, softmax, top_k, where
from trellis.named.dealing import in_order
from trellis.nn.moe.config import Routing
from trellis.nn.moe.exchange import ExpertsError

PLAIN = Routing()


class Choices(NamedTuple):
    """Each token's experts, all different, the most likely first.

    Attributes:
        ids: `i32["batch pos choices"]`, from 0; the number of experts if a choice was dropped.
        weights: `f32["batch pos choices"]`, how much each counts; 0 if a choice was dropped.
    """

    ids: NamedArray
    weights: NamedArray


def score(x: NamedArray, router: NamedArray) -> NamedArray:
    """Each token's score for each expert, before the softmax or the sigmoid, in float32.

    `routes` are the experts as the router sees them: all of them for every token, whatever slices `experts`.

    Args:
        x: `"batch pos embed"`.
        router: `"embed routes"`; the product is computed in its type.

    Returns:
        `f32["batch pos routes"]`.
    """
    text = "batch pos embed, embed routes -> batch pos routes"
    return einsum(text, x.astype(router.dtype), router, preferred_element_type=jnp.float32)


def chances_of(scores: NamedArray, routing: Routing = PLAIN) -> NamedArray:
    """How likely each expert is for each token: between 0 and 1, with softmax adding up to 1.

    Args:
        scores: `f32["batch pos routes"]`, as the router makes them.
        routing: says which function.
    """
    return softmax(scores, "routes") if routing.scores == "softmax" else sigmoid(scores)


def choose(scores: NamedArray, count: int, routing: Routing = PLAIN, *, bias: NamedArray | None = None) -> Choices:
    """The `count` most likely experts of each token, weighted by their chances.

    With `groups`, a token's experts come from the `groups_per_token` groups whose two most likely experts have the
    largest sum (DeepSeek-AI, 2024, arXiv:2412.19437, section 2.1.2).

    Args:
        scores: `f32["batch pos routes"]`, as the router makes them.
        count: how many experts each token goes to.
        routing: how scores become chances, from which groups experts are picked, and whether weights add up to 1.
        bias: `f32["routes"]`, added to the chances when groups and experts are picked, and only then (balancing
            without an auxiliary loss, Wang et al., 2024, arXiv:2408.15664). It gets no gradient.

    Raises:
        ExpertsError: more experts than there are, or than the groups of a token have; or a single one, whose weight
            would be 1 whatever the router says.
    """
    check_count(count, scores.shape["routes"], "choose", routing)
    chances = chances_of(scores, routing)
    picked = _constant(chances)
    if bias is not None:
        picked = picked + _constant(bias).astype(picked.dtype)
    if routing.groups_per_token < routing.groups:
        picked = _within_groups(picked, routing)
    ids = top_k(picked, "routes", count, new_name="choices")[1]
    # A product with ones and zeros: its gradient is one too, on any sharding.
    weights = einsum("... choices routes, ... routes -> ... choices", _hot(ids, scores.shape["routes"]), chances)
    if routing.normalize:
        total = weights.sum("choices")
        largest = routing.scores == "softmax" and bias is None  # one of them is; else all may be 0
        weights = weights / total if largest else shares_of(weights, total)
    return Choices(ids, weights if routing.scale == 1 else weights * routing.scale)


def shares_of(part: NamedArray, total: NamedArray) -> NamedArray:
    """`part / (total + 1e-20)`: 0 where the total is 0, with a gradient that is finite.

    JAX's of a quotient has the square of what it is divided by, which a float32 does not hold here.
    """
    total = total + 1e-20
    size = _constant(total)
    return (part / size) / (total / size)  # the last is 1


def _within_groups(picked: NamedArray, routing: Routing) -> NamedArray:
    """The chances inside a token's groups, and less than any chance elsewhere."""
    grouped = picked.split_axis("routes", {"groups": routing.groups, "members": -1})
    best = min(2, grouped.shape["members"])
    of_groups = top_k(grouped, "members", best, new_name="best")[0].sum("best")
    taken = top_k(of_groups, "groups", routing.groups_per_token, new_name="taken")[1]
    inside = one_hot(taken, Axis("groups", routing.groups)).sum("taken")
    return where(inside > 0, grouped, jnp.float32(-jnp.inf)).merge_axes(("groups", "members"), "routes")


def check_count(count: int, experts: int, place: str, routing: Routing = PLAIN) -> None:
    """A token goes to two experts or more, and to no more than there are, or than its groups have.

    Raises:
        ExpertsError: with both numbers.
    """
    if experts % routing.groups:
        raise ExpertsError(
            "All groups must have the same number of experts.",
            seen=f"{experts} experts in {routing.groups} groups",
            where=place,
            fix="use a number of groups that divides the number of experts",
        )
    reached = experts // routing.groups * routing.groups_per_token
    if count > reached:
        some = f", those of {routing.groups_per_token} of {routing.groups} groups" if reached < experts else ""
        raise ExpertsError(
            "A token cannot go to more experts than it can reach.",
            seen=f"{count} of {reached} experts{some}",
            where=place,
            fix=f"use {reached} at most",
        )
    if count < 2 and routing.normalize:
        raise ExpertsError(
            "Normalized weights need two experts per token or more: a single weight is always 1, and the router "
            "learns nothing from the loss.",
            seen=f"{count} of {experts} experts",
            where=place,
            fix="use 2 or more, or --model.routing.normalize false",
        )
    if count < 1:
        raise ExpertsError(
            "A token must go to at least one expert.", seen=f"{count} experts", where=place, fix="use 1 or more"
        )


def limit(choices: Choices, experts: int, capacity: float) -> Choices:
    """Drops choices over an expert's capacity; the other weights of such a token stay as they are.

    In each sequence an expert takes the first `ceil(capacity * choices * pos / experts)` tokens that chose it, in the
    order of positions. So what is dropped depends on the sequence alone, not on the mesh or the number of
    microbatches, and on no later token.

    Args:
        choices: of all tokens.
        experts: how many there are.
        capacity: 1 has room for an even load, 1.25 for a quarter more.
    """
    count, length = choices.ids.shape["choices"], choices.ids.shape["pos"]
    room = math.ceil(Fraction(str(capacity)) * count * length / experts)  # of 1.1 a float's product may be a bit more
    hot = _hot(choices.ids, experts)
    taken = hot.sum("choices")
    before = in_order(lambda taken: cumsum(taken, "pos"), taken) - taken
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
