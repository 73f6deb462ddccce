"""DeepSeek-V3 (DeepSeek-AI, 2024, arXiv:2412.19437): attention through latents, and mixtures of many experts.

Without multi-token prediction. Written for one device, in named tensors; a layout makes it parallel. Axes beside those
of `llama.py`:

    q_latent kv_latent    widths that queries, and keys with values, are made from
    latents               kv_latent, and the part of keys that all heads share
    value_dim             width of a head's values
    dense_layers          stacked blocks without experts, which come first
    layers                stacked blocks with experts
    experts               the experts' weights
    routes                the experts as the router sees them: each token's scores, whole on every device
    choices               the experts that a token goes to
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax

from trellis import (
    Axis,
    NamedArray,
    Stacked,
    UserError,
    arange,
    broadcast_to,
    concatenate,
    dot_each,
    einsum,
    ones,
    save,
    split,
    take,
)
from trellis.models import fields
from trellis.models.llama import GatedMlp, Llama
from trellis.models.mixtral import Block, Mixtral
from trellis.models.protocol import Output
from trellis.nn import (
    RMSNorm,
    Table,
    Weight,
    YarnScaling,
    attend,
    in_one_type,
    in_type_of,
    normal,
    rotary_tables,
    rotate,
    weight,
)
from trellis.nn.moe import Routing, check_count

# Added under the root in the norms of latents, whatever `norm_eps` is.
LATENT_EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config:
    """What defines a DeepSeek-V3."""

    family: Literal["deepseek_v3"] = "deepseek_v3"
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    dense_layers: int
    """How many of the first blocks have a feed-forward block instead of experts. Leave it at a few, or 0: the first
    blocks are the hardest to route evenly."""
    heads: fields.Heads
    q_latent: int | None
    """Width that a token's queries are made from; null makes them from the stream. Lower it for fewer parameters in
    attention."""
    kv_latent: int
    """Width that a token's keys and values are made from. Lower it for fewer parameters in attention."""
    nope_dim: int
    """Width of a head's queries and keys that position does not rotate. Leave it at 128, the width that kernels are
    made for."""
    rope_dim: int
    """Width of a head's queries and keys that position rotates; all heads share these keys. Leave it at 64, the width
    that kernels are made for."""
    value_dim: int
    """Width of a head's values. Leave it at 128, the width that kernels are made for."""
    dense_mlp: int
    """Width of the feed-forward block of the first blocks. Set it to the total width of a token's experts."""
    mlp: fields.ExpertMlp
    shared_mlp: int
    """Width of the shared expert, which all tokens go through. Set it to the width of an expert."""
    experts: fields.Experts
    experts_per_token: fields.ExpertsPerToken
    rope_theta: fields.RopeTheta
    rope_scaling: fields.RopeScaling = None
    norm_eps: fields.RMSNormEps = 1e-6
    tie_embeddings: fields.TieEmbeddings
    routing: fields.RoutingField = Routing(scores="sigmoid")
    positions = None  # sequences may have any length
    expert_biases = False

    def __post_init__(self):
        fields.check_sizes(self)
        check_count(self.experts_per_token, self.experts, "model.experts_per_token", self.routing)
        if self.rope_dim % 2:
            raise UserError(
                "`rope_dim` must be even, since rotary positions rotate pairs of elements.",
                seen=f"rope_dim={self.rope_dim}",
                where="model.rope_dim",
                fix=f"use an even size, {self.rope_dim + 1} for example",
            )
        if not 0 <= self.dense_layers < self.layers:
            raise UserError(
                "`dense_layers` must be 0 or more and less than `layers`, so that some blocks have experts.",
                seen=f"dense_layers={self.dense_layers}, layers={self.layers}",
                where="model.dense_layers",
                fix=f"use {self.layers - 1} at most",
            )

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def kv_heads(self) -> int:
        """Every head has keys of its own."""
        return self.heads

    @property
    def stacked(self) -> int:
        """Blocks with experts."""
        return self.layers - self.dense_layers

    def init(self, *, key, vocab_multiple: int = 1) -> "DeepseekV3":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        vocab = Axis("vocab", -(-self.vocab // vocab_multiple) * vocab_multiple)
        embed, deviation = Axis("embed", self.embed), self.embed**-0.5
        keys = jax.random.split(key, 4)
        first, rest = Axis("dense_layers", self.dense_layers), Axis("layers", self.stacked)
        dense = lambda key: DenseBlock.init(self, key=key)
        block = lambda key: Block.init(self, key=key, attention=Attention.init)
        return DeepseekV3(
            embedding=normal(keys[0], (vocab, embed), deviation=deviation if self.tie_embeddings else 1.0),
            first_layers=Stacked.init(dense, first, key=keys[1]) if self.dense_layers else None,
            layers=Stacked.init(block, rest, key=keys[2]),
            norm=RMSNorm.init(embed, self.norm_eps),
            head=None if self.tie_embeddings else normal(keys[3], (vocab, embed), deviation=deviation),
            config=self,
        )


class Attention(eqx.Module):
    """Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1).

    Queries are made from one latent (or from the stream, by `q_up` alone), keys and values from another. Positions
    rotate a part of queries and keys; all heads share that of keys.
    """

    q_down: Weight | None
    q_norm: RMSNorm | None
    q_up: Weight
    kv_down: Weight
    kv_norm: RMSNorm
    kv_up: Weight
    out: Weight
    scale: float = eqx.field(static=True)

    @staticmethod
    def init(config: DeepseekV3Config, *, key) -> "Attention":
        embed, kv_latent = Axis("embed", config.embed), Axis("kv_latent", config.kv_latent)
        q_latent = None if config.q_latent is None else Axis("q_latent", config.q_latent)
        source = q_latent or embed
        heads, kv_heads = Axis("heads", config.heads), Axis("kv_heads", config.heads)
        head_dim, value_dim = Axis("head_dim", config.head_dim), Axis("value_dim", config.value_dim)
        keys = jax.random.split(key, 5)
        latents = Axis("latents", config.kv_latent + config.rope_dim)
        both = Axis("head_dim", config.nope_dim + config.value_dim)
        grown = isinstance(config.rope_scaling, YarnScaling)
        growth = config.rope_scaling.growth(config.rope_scaling.mscale_all_dim) if grown else 1.0
        return Attention(
            q_down=weight(keys[0], (embed, q_latent), over="embed") if q_latent else None,
            q_norm=RMSNorm.init(q_latent, LATENT_EPS) if q_latent else None,
            q_up=weight(keys[1], (source, heads, head_dim), over=source.name),
            kv_down=weight(keys[2], (embed, latents), over="embed"),
            kv_norm=RMSNorm.init(kv_latent, LATENT_EPS),
            kv_up=weight(keys[3], (kv_latent, kv_heads, both), over="kv_latent"),
            out=weight(
                keys[4], (heads, value_dim, embed), over=("heads", "value_dim"), scale=(2 * config.layers) ** -0.5
            ),
            scale=config.head_dim**-0.5 * growth**2,
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        rope_dim = rope[0].shape["head_dim"]
        nope_dim, kv_latent = self.q_up.shape["head_dim"] - rope_dim, self.kv_norm.scale.shape["kv_latent"]
        q, kv = self._started(x)
        plain, turned = split(q, "head_dim", [nope_dim, rope_dim])
        q = save(concatenate([plain, rotate(turned, rope, pairs=True)], "head_dim"), "query")

        kv, shared = split(kv.rename(latents="kv_latent"), "kv_latent", [kv_latent, rope_dim])
        kv = einsum(
            "batch pos kv_latent, kv_latent kv_heads head_dim -> batch pos kv_heads head_dim",
            self.kv_norm(kv), self.kv_up,
        )  # fmt: skip
        plain, v = split(kv, "head_dim", [nope_dim, kv.shape["head_dim"] - nope_dim])
        plain, shared = in_one_type(plain, shared)
        shared = rotate(shared.rename(kv_latent="head_dim"), rope, pairs=True)
        of_heads = [axis.resize(rope_dim) if axis.name == "head_dim" else axis for axis in plain.axes]
        k = save(concatenate([plain, broadcast_to(shared, of_heads)], "head_dim"), "key")
        v = save(v.rename(head_dim="value_dim"), "value")

        q, k, v = in_one_type(q, k.rename(pos="key_pos"), v.rename(pos="key_pos"))
        out = attention(q, k, v, segment_ids=segment_ids, scale=self.scale, save_name="attention")
        out = einsum("batch pos heads value_dim, heads value_dim embed -> batch pos embed", out, self.out)
        return in_type_of(out, x)

    def _started(self, x: NamedArray) -> tuple[NamedArray, NamedArray]:
        """Queries, and the latent of keys and values."""
        if self.q_down is None or self.q_norm is None:
            # Two products: one leads to heads, which wants all positions of the heads' devices, the other does not.
            q = einsum("batch pos embed, embed heads head_dim -> batch pos heads head_dim", x, self.q_up)
            return q, save(einsum("batch pos embed, embed latents -> batch pos latents", x, self.kv_down), "latents")
        q, kv = dot_each(x, (self.q_down, self.kv_down), over="embed")
        q, kv = save(q, "latents"), save(kv, "latents")
        q = einsum("batch pos q_latent, q_latent heads head_dim -> batch pos heads head_dim", self.q_norm(q), self.q_up)
        return q, kv


class DenseBlock(eqx.Module):
    """One of the first layers: attention, then feed-forward, each on a norm and added to the stream."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMlp

    @staticmethod
    def init(config: DeepseekV3Config, *, key) -> "DenseBlock":
        embed = Axis("embed", config.embed)
        attention_key, mlp_key = jax.random.split(key)
        return DenseBlock(
            attention_norm=RMSNorm.init(embed, config.norm_eps),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=RMSNorm.init(embed, config.norm_eps),
            mlp=GatedMlp.init(config, key=mlp_key, width=config.dense_mlp),
        )

    __call__ = Block.__call__


class DeepseekV3(eqx.Module):
    """The model: tokens to hidden states, and what is measured of the routing; the loss multiplies by `unembedding`."""

    embedding: Table
    first_layers: Stacked | None
    layers: Stacked
    norm: RMSNorm
    head: Weight | None
    config: DeepseekV3Config = eqx.field(static=True)
    unembedding_bias = None
    unembedding = Llama.unembedding
    looks_ahead = Mixtral.looks_ahead
    routed = Mixtral.routed
    balanced = Mixtral.balanced

    def __call__(
        self, tokens: NamedArray, *, segment_ids=None, positions=None, policy=None, key=None, counted=None, ahead=None
    ) -> Output:
        """Tokens to hidden states: see `LanguageModel`."""
        x, _, shared = self.start(tokens, segment_ids, positions, key)
        if self.first_layers is not None:
            x = self.first_layers.fold(x, *shared, policy=policy)
        return self.routed(x, shared, ones(tokens.axes) if counted is None else counted, ahead, policy)

    def start(self, tokens: NamedArray, segment_ids=None, positions=None, key=None):
        """The stream before the first layer, what each layer gets of its own, and what all layers get."""
        x, config = take(self.embedding, "vocab", tokens), self.config
        positions = arange(tokens.axis("pos")) if positions is None else positions
        turned = Axis("head_dim", config.rope_dim)
        rope = rotary_tables(positions, turned, config.rope_theta, config.rope_scaling, pairs=config.rope_dim)
        return x, (), (rope, segment_ids)
