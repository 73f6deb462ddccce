"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Llama's model, whose feed-forward blocks are mixtures of experts.

Written for one device, in named tensors; a layout makes it parallel. Axes beside those of `llama.py`:

    experts    the experts' weights
    routes     the experts as the router sees them: each token's scores, whole on every device
    choices    the experts that a token goes to
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis.errors import UserError
from trellis.named import Axis, Keep, NamedArray, ones
from trellis.nn.attention import attend
from trellis.nn.initializers import constant, weight
from trellis.nn.moe import Routed, Way, check_count, choose, limit, measure, mix, score, shift
from trellis.nn.norm import RMSNorm
from trellis.nn.parameters import Bias, Weight
from trellis.nn.rope import Scaling

from .config import check_positive, check_whole_heads
from .llama import Attention, Llama


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens are kept evenly over experts, and how they get there."""

    balance: float = 0.0
    """Weight of the load-balancing loss."""
    balance_over: Literal["batch", "sequence"] = "batch"
    """What experts' shares are counted over. With microbatches, counting over the batch costs another forward pass."""
    z_loss: float = 0.0
    """Weight of the squared log of the denominator of the router's softmax."""
    bias_rate: float | None = None
    """How much each expert's bias, which only picks experts, moves a step towards an even load; null has no biases."""
    capacity: float | None = None
    """Room of each expert in each sequence, in tokens of an even load; later tokens are dropped. null drops none."""
    way: Way = "auto"
    """How tokens get to their experts: gather, ragged or slots over the mesh axes of the experts; grouped brings the
    experts' weights to the tokens; dense computes all experts for all tokens."""
    slack: float = 1.5
    """Room of an exchange's buffers, in tokens of an even load. What does not fit goes in further rounds."""

    def __post_init__(self):
        rules = {
            "balance": self.balance >= 0,
            "z_loss": self.z_loss >= 0,
            "bias_rate": self.bias_rate is None or self.bias_rate > 0,
            "capacity": self.capacity is None or self.capacity > 0,
            "slack": self.slack > 0,
        }
        if wrong := [name for name, holds in rules.items() if not holds]:
            least = "0 or more" if wrong[0] in ("balance", "z_loss") else "more than 0"
            more = "use 1.25 for a quarter more than an even load, or leave it out"
            raise UserError(
                f"`{wrong[0]}` is {least}.",
                seen=f"{wrong[0]}={getattr(self, wrong[0])}",
                where=f"model.routing.{wrong[0]}",
                fix="use 0 to leave it out" if least == "0 or more" else more,
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """What defines a Mixtral."""

    family: Literal["mixtral"] = "mixtral"
    vocab: int
    """Tokens in the vocabulary."""
    embed: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; divides heads."""
    head_dim: int
    """Width of one head."""
    mlp: int
    """Width of one expert."""
    experts: int
    """Experts of each block."""
    experts_per_token: int
    """How many of them each token goes to."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rope_scaling: Scaling | None = None
    """How rotary frequencies are changed for long contexts."""
    norm_eps: float = 1e-5
    """Added to the mean square before the root."""
    tie_embeddings: bool
    """Whether the unembedding is the embedding."""
    routing: Routing = Routing()
    """How tokens are kept evenly over experts, and how they get there."""

    def __post_init__(self):
        check_positive(self, "vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "experts")
        check_whole_heads(self)
        check_count(self.experts_per_token, self.experts, "model.experts_per_token")

    def init(self, *, key, vocab_multiple: int = 1) -> "Mixtral":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        plain = Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=Block.init)
        return Mixtral(plain.embedding, plain.layers, plain.norm, plain.head, self)


class Experts(eqx.Module):
    """A mixture of SwiGLU blocks: each token goes to the few that its router picks, and gets their weighted sum."""

    router: Weight
    bias: Bias | None
    gate: Weight
    up: Weight
    down: Weight
    config: MixtralConfig = eqx.field(static=True)

    @staticmethod
    def init(config: MixtralConfig, *, key) -> "Experts":
        embed, mlp, experts = Axis("embed", config.embed), Axis("mlp", config.mlp), Axis("experts", config.experts)
        routes = Axis("routes", config.experts)
        keys = jax.random.split(key, 4)
        return Experts(
            router=weight(keys[0], (embed, routes), over="embed"),
            bias=None if config.routing.bias_rate is None else constant(routes, 0.0),
            gate=weight(keys[1], (experts, embed, mlp), over="embed"),
            up=weight(keys[2], (experts, embed, mlp), over="embed"),
            down=weight(keys[3], (experts, mlp, embed), over="mlp", scale=(2 * config.layers) ** -0.5),
            config=config,
        )

    def __call__(self, x: NamedArray, counted: NamedArray, shares: NamedArray | None = None):
        """The result, and what is measured of the routing."""
        config, routing = self.config, self.config.routing
        scores = score(x, self.router)
        choices = choose(scores, config.experts_per_token, bias=self.bias)
        measured = measure(scores, choices, counted, shares=shares, over=routing.balance_over)
        if routing.capacity is not None:
            choices = limit(choices, config.experts, routing.capacity)
        out = mix(x, choices, self.gate, self.up, self.down, way=routing.way, slack=routing.slack)
        return out, measured


class Block(eqx.Module):
    """One layer: attention, then experts, each on a norm and added to the stream."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: Experts

    @staticmethod
    def init(config: MixtralConfig, *, key) -> "Block":
        embed = Axis("embed", config.embed)
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            attention_norm=RMSNorm.init(embed, config.norm_eps),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=RMSNorm.init(embed, config.norm_eps),
            mlp=Experts.init(config, key=mlp_key),
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, counted: NamedArray, attention=attend):
        return self.routed(x, None, rope, segment_ids, counted, attention)[0]

    def routed(self, x: NamedArray, shares: NamedArray | None, rope, segment_ids, counted, attention=attend):
        """The stream after this layer, and what is measured of its routing."""
        x = x + self.attention(self.attention_norm(x), rope, segment_ids, attention)
        out, measured = self.mlp(self.mlp_norm(x), counted, shares)
        return x + out, measured


class Mixtral(Llama):
    """The model: tokens to hidden states, as Llama, and what is measured of its routing."""

    def start(self, tokens: NamedArray, segment_ids=None, positions=None, key=None):
        x, each, shared = super().start(tokens, segment_ids, positions, key)
        return x, each, (*shared, ones(tokens.axes))

    def routed(
        self,
        tokens: NamedArray,
        counted: NamedArray,
        *,
        segment_ids: NamedArray | None = None,
        positions: NamedArray | None = None,
        policy: Keep | None = None,
        shares: NamedArray | None = None,
        key=None,
    ) -> tuple[NamedArray, Routed]:
        """Hidden states before the unembedding, and the routing's measures: load of each layer, the rest their mean.

        Args:
            tokens: `i32["batch pos"]`.
            counted: `f32["batch pos"]`, what each token counts in the measures.
            segment_ids, positions, policy, key: as in a call of the model.
            shares: `f32["layers routes"]`, experts' shares of the whole batch, where `tokens` are a part of it.
        """
        x, _, (rope, segment_ids, _) = self.start(tokens, segment_ids, positions, key)
        call = lambda layer, x, *rest: layer.routed(x, *(rest if shares is not None else (None, *rest)))
        each = () if shares is None else (shares,)
        x, measured = self.layers.scan(x, rope, segment_ids, counted, each=each, call=call, policy=policy)
        return self.norm(x), Routed(measured.load, jnp.mean(measured.balance), jnp.mean(measured.z))

    @property
    def shares_wanted(self) -> bool:
        """Whether the load-balancing loss needs experts' shares of the whole batch, where it sees a part of it."""
        return self.config.routing.balance > 0 and self.config.routing.balance_over == "batch"

    def penalty(self, routed: Routed) -> jax.Array:
        """What the routers' losses add to the loss, summed over tokens."""
        return self.config.routing.balance * routed.balance + self.config.routing.z_loss * routed.z

    def balanced(self, load: NamedArray) -> "Mixtral":
        """The model after a step with this load, `f32["layers routes"]`: its biases moved, where it has some."""
        rate, experts = self.config.routing.bias_rate, self.layers.block.mlp
        if rate is None:
            return self
        return eqx.tree_at(lambda m: m.layers.block.mlp.bias, self, shift(experts.bias, load, rate))
