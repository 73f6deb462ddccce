"""Llama 2 and 3 (Touvron et al., 2023, arXiv:2307.09288; Llama Team, 2024, arXiv:2407.21783).

Written for one device, in named tensors; a layout makes it parallel. Axes:

    batch pos key_pos    sequences, positions of queries, positions of keys
    embed mlp vocab      widths
    heads kv_heads head_dim
    layers               stacked blocks
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax

from trellis import Axis, NamedArray, Stacked, arange, dot_each, einsum, save, take
from trellis.models import fields
from trellis.models.protocol import Output
from trellis.nn import (
    Bias,
    RMSNorm,
    Table,
    Weight,
    attend,
    constant,
    in_one_type,
    in_type_of,
    normal,
    rotary_tables,
    rotate,
    swiglu,
    weight,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLike:
    """What Llama and the families whose blocks are made of its parts have in common."""

    family: str
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.Heads
    kv_heads: fields.KVHeads
    head_dim: fields.HeadDim
    mlp: fields.Mlp
    rope_theta: fields.RopeTheta
    rope_scaling: fields.RopeScaling = None
    norm_eps: fields.RMSNormEps
    tie_embeddings: fields.TieEmbeddings
    positions = None  # sequences may have any length
    experts = experts_per_token = 1

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_key_heads(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(LlamaLike):
    """What defines a Llama."""

    family: Literal["llama"] = "llama"
    norm_eps: fields.RMSNormEps = 1e-5

    def init(self, *, key, vocab_multiple: int = 1) -> "Llama":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple)


class Attention(eqx.Module):
    """Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) with rotary positions.

    Llama has the four weights alone. Its descendants add biases, norms of queries and keys (of each head, or of all
    heads together), a sink for each head, which is a score without a key, a window of keys that a query sees, itself
    included, or another factor of scores than one over the root of `head_dim`.
    """

    q: Weight
    k: Weight
    v: Weight
    out: Weight
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    q_bias: Bias | None = None
    k_bias: Bias | None = None
    v_bias: Bias | None = None
    out_bias: Bias | None = None
    sinks: Bias | None = None
    window: int | None = eqx.field(static=True, default=None)
    scale: float | None = eqx.field(static=True, default=None)

    @staticmethod
    def init(config, *, key) -> "Attention":
        embed, head_dim = Axis("embed", config.embed), Axis("head_dim", config.head_dim)
        heads, kv_heads = Axis("heads", config.heads), Axis("kv_heads", config.kv_heads)
        keys = jax.random.split(key, 4)
        return Attention(
            q=weight(keys[0], (embed, heads, head_dim), over="embed"),
            k=weight(keys[1], (embed, kv_heads, head_dim), over="embed"),
            v=weight(keys[2], (embed, kv_heads, head_dim), over="embed"),
            out=weight(
                keys[3], (heads, head_dim, embed), over=("heads", "head_dim"), scale=(2 * config.layers) ** -0.5
            ),
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        q, k, v = dot_each(x, (self.q, self.k, self.v), over="embed")  # "batch pos heads head_dim", or kv_heads
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            q, k, v = q + self.q_bias, k + self.k_bias, v + self.v_bias
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = in_one_type(q, k, v)
        q, k, v = save(rotate(q, rope), "query"), save(rotate(k, rope), "key"), save(v, "value")
        k, v = k.rename(pos="key_pos"), v.rename(pos="key_pos")
        seen = {"window": self.window, "sinks": self.sinks, "scale": self.scale}
        out = attention(q, k, v, segment_ids=segment_ids, save_name="attention", **seen)
        out = einsum("batch pos heads head_dim, heads head_dim embed -> batch pos embed", out, self.out)
        out = out if self.out_bias is None else out + self.out_bias
        return in_type_of(out, x)

    def with_biases(self, *, out: bool) -> "Attention":
        """The attention with biases of queries, keys and values, and of what it gives the stream if `out`."""
        q, k, v = (constant(weight.axes[1:], 0.0) for weight in (self.q, self.k, self.v))
        own = constant(self.out.axis("embed"), 0.0) if out else None
        return dataclasses.replace(self, q_bias=q, k_bias=k, v_bias=v, out_bias=own)


class GatedMlp(eqx.Module):
    """Gated feed-forward block (Shazeer, 2020, arXiv:2002.05202), with SwiGLU unless it is given another gate."""

    gate: Weight
    up: Weight
    down: Weight
    gated: Callable[[NamedArray, NamedArray], NamedArray] = eqx.field(static=True, default=swiglu)

    @staticmethod
    def init(config, *, key, width: int | None = None) -> "GatedMlp":
        """The block, as wide as the configuration says unless another width is given."""
        embed, mlp = Axis("embed", config.embed), Axis("mlp", width or config.mlp)
        keys = jax.random.split(key, 3)
        return GatedMlp(
            gate=weight(keys[0], (embed, mlp), over="embed"),
            up=weight(keys[1], (embed, mlp), over="embed"),
            down=weight(keys[2], (mlp, embed), over="mlp", scale=(2 * config.layers) ** -0.5),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        gate, up = dot_each(x, (self.gate, self.up), over="embed")  # "batch pos mlp"
        gate, up = in_one_type(save(gate, "mlp_gate"), save(up, "mlp_up"))
        return in_type_of(einsum("batch pos mlp, mlp embed -> batch pos embed", self.gated(gate, up), self.down), x)


class Block(eqx.Module):
    """One layer: attention, then feed-forward, each on a norm and added to the stream."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMlp

    @staticmethod
    def init(config: LlamaConfig, *, key) -> "Block":
        embed = Axis("embed", config.embed)
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            attention_norm=RMSNorm.init(embed, config.norm_eps),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=RMSNorm.init(embed, config.norm_eps),
            mlp=GatedMlp.init(config, key=mlp_key),
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        x = x + self.attention(self.attention_norm(x), rope, segment_ids, attention)
        return x + self.mlp(self.mlp_norm(x))


class Llama(eqx.Module):
    """The model: tokens to hidden states; the loss multiplies by `unembedding`."""

    embedding: Table
    layers: Stacked
    norm: RMSNorm
    head: Weight | None
    config: LlamaConfig = eqx.field(static=True)
    unembedding_bias = first_layers = None
    looks_ahead = False

    @staticmethod
    def init(config, *, key, vocab_multiple: int = 1, block=Block.init, each: int = 1) -> "Llama":
        """The model, with blocks from `block`, each of which is `each` layers."""
        vocab = Axis("vocab", -(-config.vocab // vocab_multiple) * vocab_multiple)
        embed, layers = Axis("embed", config.embed), Axis("layers", config.layers // each)
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        deviation = config.embed**-0.5
        return Llama(
            embedding=normal(embedding_key, (vocab, embed), deviation=deviation if config.tie_embeddings else 1.0),
            layers=Stacked.init(lambda key: block(config, key=key), layers, key=layers_key),
            norm=RMSNorm.init(embed, config.norm_eps),
            head=None if config.tie_embeddings else normal(head_key, (vocab, embed), deviation=deviation),
            config=config,
        )

    @property
    def unembedding(self) -> NamedArray:
        """`"vocab embed"`; rows from `config.vocab` on are padding."""
        return self.embedding if self.head is None else self.head

    def __call__(
        self, tokens: NamedArray, *, segment_ids=None, positions=None, policy=None, key=None, counted=None, ahead=None
    ) -> Output:
        """Tokens to hidden states: see `LanguageModel`."""
        x, each, shared = self.start(tokens, segment_ids, positions, key)
        return Output(self.norm(self.layers.fold(x, *shared, each=each, policy=policy)))

    def start(self, tokens: NamedArray, segment_ids=None, positions=None, key=None):
        """The stream before the first layer, what each layer gets of its own, and what all layers get."""
        x = take(self.embedding, "vocab", tokens)
        positions = arange(tokens.axis("pos")) if positions is None else positions
        rope = rotary_tables(
            positions, Axis("head_dim", self.config.head_dim), self.config.rope_theta, self.config.rope_scaling
        )
        return x, (), (rope, segment_ids)
