"""Mixtral (Jiang et al., 2024, arXiv:2401.04088): Llama's model, whose feed-forward blocks are mixtures of experts.

Written for one device, in named tensors; a layout makes it parallel. Axes beside those of `llama.py`:

    experts    the experts' weights
    routes     the experts as the router sees them: each token's scores, whole on every device
    choices    the experts that a token goes to
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis import Axis, NamedArray, Stacked, maximum, ones
from trellis.models import fields
from trellis.models.llama import Attention, Llama
from trellis.models.protocol import Output
from trellis.nn import RMSNorm, Table, Weight, attend
from trellis.nn.moe import (
    Experts,
    Routed,
    Routing,
    begun_after,
    check_count,
    cut,
    for_each_part,
    held_once,
    joined,
    parts_of,
    shift,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """What defines a Mixtral."""

    family: Literal["mixtral"] = "mixtral"
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.Heads
    kv_heads: fields.KVHeads
    head_dim: fields.HeadDim
    mlp: fields.ExpertMlp
    experts: fields.Experts
    experts_per_token: fields.ExpertsPerToken
    shared_mlp: int | None = None
    """Width of the shared expert, which all tokens go through; null for none. Set it, to an expert's width for example,
    if experts learn the same things."""
    expert_biases: bool = False
    """Whether experts' products have biases. Set it to the value of an imported model."""
    rope_theta: fields.RopeTheta
    rope_scaling: fields.RopeScaling = None
    norm_eps: fields.RMSNormEps = 1e-5
    tie_embeddings: fields.TieEmbeddings
    routing: fields.RoutingField = Routing()
    positions = None  # sequences may have any length

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_key_heads(self)
        check_count(self.experts_per_token, self.experts, "model.experts_per_token", self.routing)

    def init(self, *, key, vocab_multiple: int = 1) -> "Mixtral":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        plain = Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=Block.init)
        return Mixtral(plain.embedding, plain.layers, plain.norm, plain.head, self)


class Block(eqx.Module):
    """One layer: attention, then experts, each on a norm and added to the stream.

    Attributes:
        several: whether a block is several layers, each of which keeps what a policy says; then `measured` takes that.
    """

    several: ClassVar[bool] = False
    attention_norm: RMSNorm
    attention: Callable[..., NamedArray]
    mlp_norm: RMSNorm
    mlp: Experts

    @staticmethod
    def init(config, *, key, attention=Attention.init, **rest) -> "Block":
        """The block with a family's attention; `rest` goes to `Experts.init`."""
        embed, mlp, experts = Axis("embed", config.embed), Axis("mlp", config.mlp), Axis("experts", config.experts)
        attention_key, mlp_key = jax.random.split(key)
        shared = None if config.shared_mlp is None else Axis("mlp", config.shared_mlp)
        return Block(
            attention_norm=RMSNorm.init(embed, config.norm_eps),
            attention=attention(config, key=attention_key),
            mlp_norm=RMSNorm.init(embed, config.norm_eps),
            mlp=Experts.init(
                embed, mlp, experts, config.experts_per_token, config.routing,
                key=mlp_key, out_scale=(2 * config.layers) ** -0.5, shared=shared, biases=config.expert_biases,
                **rest,
            ),
        )  # fmt: skip

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        x = x + self.attention(self.attention_norm(x), rope, segment_ids, attention)
        return x + self.mlp(self.mlp_norm(x))

    def measured(self, parts, shares: NamedArray | None, ropes, segment_ids, counted):
        """The stream after this layer, and what is measured of its routing, for several parts of a batch that run side
        by side.

        Args:
            parts: the stream, `"batch pos embed"` each.
            shares: as in `trellis.nn.moe.measure`.
            ropes, segment_ids, counted: of each part.
        """
        stream, normed = [], []
        attentions = for_each_part(self.attention, len(parts))
        for attention, x, *about in zip(attentions, parts, ropes, segment_ids, strict=True):
            if normed:
                x = begun_after(normed[-1], x)
            x = x + attention(self.attention_norm(x), *about)
            stream.append(x)
            normed.append((y := self.mlp_norm(x), *self.mlp.routed(y)))
        made, routed = self.mlp.measured_each(normed, counted, shares)
        return tuple(x + out for x, out in zip(stream, made, strict=True)), routed

    @property
    def picking(self) -> list[NamedArray | None]:
        """Biases that only pick experts, and have no gradient."""
        return [self.mlp.bias]

    def balanced(self, load: NamedArray, rate: float) -> "Block":
        """The block with its experts' biases moved towards an even load."""
        return eqx.tree_at(lambda block: block.mlp.bias, self, shift(self.mlp.bias, load, rate))


class Mixtral(eqx.Module):
    """The model: tokens to hidden states, like Llama, and what is measured of its routing."""

    embedding: Table
    layers: Stacked
    norm: RMSNorm
    head: Weight | None
    config: MixtralConfig = eqx.field(static=True)
    unembedding_bias = first_layers = None
    unembedding = Llama.unembedding
    start = Llama.start

    @property
    def looks_ahead(self) -> bool:
        """Whether the load-balancing loss counts experts' shares over the whole batch."""
        return self.config.routing.balance > 0 and self.config.routing.balance_over == "batch"

    def __call__(
        self, tokens: NamedArray, *, segment_ids=None, positions=None, policy=None, key=None, counted=None, ahead=None
    ) -> Output:
        """Tokens to hidden states: see `LanguageModel`."""
        x, _, shared = self.start(tokens, segment_ids, positions, key)
        return self.routed(x, shared, ones(tokens.axes) if counted is None else counted, ahead, policy)

    def routed(self, x: NamedArray, shared, counted: NamedArray, ahead, policy) -> Output:
        """The stream before the layers to hidden states, and what is measured of the routing: each layer's load, and
        the mean of the rest."""
        # Of a batch in which no token counts the load is 0.
        each = () if ahead is None else (ahead / maximum(ahead.sum("routes"), jnp.float32(1e-6)),)
        count = parts_of(x, self.config.routing.interleave)
        about = zip(*cut((*shared, counted), count), strict=True)  # all parts of each kind

        def layer(block, parts, *rest):
            block = block if count == 1 else held_once(block, parts[0], block.picking)
            own = {"policy": policy} if block.several else {}
            return block.measured(parts, *(rest if each else (None, *rest)), **own)

        stack: Any = self.layers.block
        several = (stack[0] if isinstance(stack, tuple) else stack).several
        whole = None if several else policy
        parts, routed = self.layers.scan(tuple(cut(x, count)), *about, each=each, call=layer, policy=whole)
        x = joined(parts)
        hidden, routing = self.norm(x), self.config.routing
        return Output(hidden, Routed(routed.load, jnp.mean(routed.balance), jnp.mean(routed.z), routing))

    def balanced(self, load: NamedArray) -> "Mixtral":
        """The model with each expert's bias moved towards an even load, by a step's load, `f32["layers routes"]`."""
        block: Any = self.layers.block
        moved = block.balanced(load, self.config.routing.bias_rate)
        return eqx.tree_at(lambda model: model.layers.block, self, moved)
