"""What a router's choices come to over a batch: its load, and the losses that keep it even."""

import functools
import operator
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis.named import Axis, NamedArray, exp, logsumexp, maximum, one_hot, sigmoid, sign
from trellis.nn.moe.config import Routing
from trellis.nn.moe.routing import PLAIN, Choices, shares_of


class Routed(eqx.Module):
    """Sums over the tokens of a batch that count, for a layer or a model.

    The sums of a batch's parts add up to those of the batch.

    Attributes:
        load: `f32["... routes"]`, how many tokens chose each expert; no gradient.
        balance: the load-balancing loss of each token, summed; for a model, the mean over its layers.
        z: the squared log-normalizer of each token's scores, likewise.
        routing: the weights of these losses, and what follows from the load.
    """

    load: NamedArray
    balance: jax.Array
    z: jax.Array
    routing: Routing = eqx.field(static=True, default=Routing())

    @property
    def penalty(self) -> jax.Array:
        """What the router's losses add to the loss, summed over tokens."""
        return self.routing.balance * self.balance + self.routing.z_loss * self.z

    @property
    def ahead(self) -> NamedArray:
        """The load: the load-balancing loss of a batch's parts depends on its shares in the whole batch."""
        return self.load

    def metrics(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """What is reported of a step's routing: float32 scalars.

        `router_balance` (the load-balancing loss, 1 for an even load) and `router_z`, means over tokens and
        layers; `router_load_max` and `router_load_min`, the loads of the fullest and the emptiest expert of any layer,
        in mean loads. A load-balancing loss of weight 0 is left out if its shares are the whole batch's: with
        microbatches and stages these are counted ahead only for a loss, and from shares of parts it is another number.

        Args:
            tokens: how many tokens were counted.
        """
        load = self.load / self.load.mean("routes")
        known = self.routing.balance > 0 or self.routing.balance_over == "sequence"
        return {
            **({"router_balance": self.balance / tokens} if known else {}),
            "router_z": self.z / tokens,
            "router_load_max": load.max().array,
            "router_load_min": load.min().array,
        }

    def update(self, model):
        """The model after a step: `model.balanced(load)`, if its experts have biases."""
        return model if self.routing.bias_rate is None else model.balanced(self.load)


def measure(
    scores: NamedArray,
    choices: Choices,
    counted: NamedArray,
    routing: Routing = PLAIN,
    *,
    shares: NamedArray | None = None,
) -> Routed:
    """Load, load-balancing loss and router z-loss.

    The load-balancing loss (Fedus et al., 2021, arXiv:2101.03961) is `experts * sum_e share_e * chance_e`: the share of
    all choices that went to an expert, times the mean of its probability. A product of two means is not a mean of
    products: taken over parts of a batch it is another number on every mesh and for every number of microbatches. So
    shares are those of the whole batch, over all devices, and over microbatches if the caller knows them (`shares`);
    given them the loss is a sum over tokens. `balance_over="sequence"` takes each sequence's own shares (DeepSeek-AI,
    2024, arXiv:2412.19437, section 2.1.2), which depend on no mesh and no microbatch. Shares are those of the experts
    that were picked, with biases and groups if there are any; that paper counts the largest scores by themselves.

    Sigmoids are made to add up to 1 first. The z-loss is the squared log of the softmax's denominator (Zoph et al.,
    2022, arXiv:2202.08906).

    Args:
        scores: `f32["batch pos routes"]`, as the router makes them.
        choices: before any is dropped.
        counted: `f32["batch pos"]`, how much each token counts, as in the language model's loss. Without one of these
            names, the same for all along it.
        routing: how scores become chances, and what shares are counted over.
        shares: `f32["routes"]`, which add up to 1, if this is a part of a batch; otherwise they are counted here.
    """
    return measure_each([(scores, choices, counted)], routing, shares)


def measure_each(
    parts: Sequence[tuple[NamedArray, Choices, NamedArray]], routing: Routing, shares: NamedArray | None = None
) -> Routed:
    """`measure` of a batch in several parts of the same size.

    Args:
        parts: scores, choices and how much tokens count, of each.
        routing, shares: as there.
    """
    added = lambda each: functools.reduce(operator.add, each)
    parts = [(scores, choices, _of_each_token(counted, choices)) for scores, choices, counted in parts]
    axis = Axis("routes", parts[0][0].shape["routes"])
    picks = [one_hot(choices.ids, axis).sum("choices") * counted for _, choices, counted in parts]
    load = added(picks).sum(("batch", "pos"))  # added up first, so they are summed over devices once
    if routing.balance_over == "batch" and shares is None:
        count = parts[0][1].ids.shape["choices"]
        shares = load / jnp.maximum(added([counted for *_, counted in parts]).sum().array * count, 1e-6)
    losses = [_losses(*part, mine, routing, shares) for part, mine in zip(parts, picks, strict=True)]
    return Routed(load, *map(added, zip(*losses, strict=True)))


def _of_each_token(counted: NamedArray, choices: Choices) -> NamedArray:
    """How much each token counts, also where it is given once for all sequences, or for all positions of one."""
    tokens = tuple(axis for axis in choices.ids.axes if axis.name != "choices")
    return counted if {*counted.names} == {axis.name for axis in tokens} else counted.broadcast_to(tokens)


def _losses(scores, choices: Choices, counted, picks, routing: Routing, shares) -> tuple[jax.Array, jax.Array]:
    """The load-balancing loss and the z-loss of each token, summed."""
    if routing.balance_over == "sequence":
        total = maximum(counted.sum("pos"), jnp.float32(1e-6))
        shares = picks.sum("pos") / (total * float(choices.ids.shape["choices"]))
    softened = logsumexp(scores, "routes")
    if routing.scores == "softmax":
        chances = exp(scores - softened)
    else:
        chances = sigmoid(scores)
        chances = shares_of(chances, chances.sum("routes"))
    balance = (chances * shares).sum("routes") * counted * float(scores.shape["routes"])
    return balance.sum().array, (softened * softened * counted).sum().array


def shift(bias: NamedArray, load: NamedArray, rate: float) -> NamedArray:
    """The bias after a step: more for an expert with less than the mean load, less for one with more, by the rate.

    Wang et al., 2024, arXiv:2408.15664, algorithm 1.

    Args:
        bias: `f32["... routes"]`.
        load: `f32["... routes"]`, of the whole batch.
        rate: how much it moves.
    """
    less = sign(load.mean("routes") - load)
    return bias + less.transpose(bias.names).astype(bias.dtype) * rate
