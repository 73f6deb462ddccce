"""GPT-2 (Radford et al., 2019), with the two changes that keep it stable in half precision (Mistral, Karamcheti 2021).

Written for one device, in named tensors; a layout makes it parallel. Axes:

    batch pos key_pos    sequences, positions of queries, positions of keys
    positions            rows of the table of learned positions
    embed mlp vocab      widths
    heads head_dim
    qkv                  query, key and value in one weight
    layers               stacked blocks
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis import Axis, NamedArray, Stacked, UserError, arange, einsum, gelu, random, save, take, unbind
from trellis.models import fields
from trellis.models.protocol import Output
from trellis.nn import Bias, Dropout, LayerNorm, Table, Weight, attend, constant, in_type_of, normal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """The shape of a GPT-2. Nothing here has a default: these numbers are the model."""

    family: Literal["gpt2"] = "gpt2"
    vocab: fields.Vocab
    positions: int
    """Number of learned positions: the longest sequence. Raise it for longer sequences."""
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.WholeHeads
    mlp: fields.Mlp
    norm_eps: fields.LayerNormEps
    dropout: float
    """Fraction of activations set to zero in training: after the embedding, the attention and the feed-forward layer.
    Raise it if text is repeated many times."""
    scale_by_inverse_layer: bool
    """Whether a block's attention scores are divided by its number, counted from 1. Set true if deep models are
    unstable in bfloat16 or float16."""
    upcast_attention: bool
    """Whether attention scores are computed in float32. Set true if scores overflow in float16."""
    tie_embeddings = True
    experts = experts_per_token = 1

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_heads_divide(self)
        if not 0 <= self.dropout < 1:
            raise UserError(
                "`dropout` must be at least 0 and below 1.",
                seen=f"dropout={self.dropout}",
                where="model.dropout",
                fix="use 0 for none",
            )

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    def init(self, *, key, vocab_multiple: int = 1) -> "GPT2":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return GPT2.init(self, key=key, vocab_multiple=vocab_multiple)


# Of all weights at the start; divided by the root of their number for those that write to the residual stream.
DEVIATION = 0.02


class Attention(eqx.Module):
    """Multi-head attention with biases; query, key and value come from one product."""

    qkv: Weight
    qkv_bias: Bias
    out: Weight
    out_bias: Bias
    upcast: bool = eqx.field(static=True)

    @staticmethod
    def init(config: GPT2Config, *, key) -> "Attention":
        embed, qkv = Axis("embed", config.embed), Axis("qkv", 3)
        heads, head_dim = Axis("heads", config.heads), Axis("head_dim", config.head_dim)
        qkv_key, out_key = jax.random.split(key)
        return Attention(
            qkv=normal(qkv_key, (embed, qkv, heads, head_dim), deviation=DEVIATION),
            qkv_bias=constant((qkv, heads, head_dim), 0.0),
            out=normal(out_key, (heads, head_dim, embed), deviation=DEVIATION * (2 * config.layers) ** -0.5),
            out_bias=constant(embed, 0.0),
            upcast=config.upcast_attention,
        )

    def __call__(self, x: NamedArray, number: NamedArray | None, segment_ids, attention=attend) -> NamedArray:
        qkv = einsum("batch pos embed, embed qkv heads head_dim -> batch pos qkv heads head_dim", x, self.qkv)
        q, k, v = unbind(qkv + self.qkv_bias, "qkv")
        q, k, v = save(q, "query"), save(k, "key"), save(v, "value")
        k, v = (y.rename(pos="key_pos", heads="kv_heads") for y in (k, v))
        if number is not None:
            q = q / number.astype(q.dtype)
        out = attention(q, k, v, segment_ids=segment_ids, upcast=self.upcast, save_name="attention")
        out = einsum("batch pos heads head_dim, heads head_dim embed -> batch pos embed", out, self.out) + self.out_bias
        return in_type_of(out, x)


class Mlp(eqx.Module):
    """Feed-forward block with a GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415) in its tanh form."""

    up: Weight
    up_bias: Bias
    down: Weight
    down_bias: Bias

    @staticmethod
    def init(config: GPT2Config, *, key) -> "Mlp":
        embed, mlp = Axis("embed", config.embed), Axis("mlp", config.mlp)
        up_key, down_key = jax.random.split(key)
        return Mlp(
            up=normal(up_key, (embed, mlp), deviation=DEVIATION),
            up_bias=constant(mlp, 0.0),
            down=normal(down_key, (mlp, embed), deviation=DEVIATION * (2 * config.layers) ** -0.5),
            down_bias=constant(embed, 0.0),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        up = save(einsum("batch pos embed, embed mlp -> batch pos mlp", x, self.up) + self.up_bias, "mlp_up")
        out = einsum("batch pos mlp, mlp embed -> batch pos embed", gelu(up), self.down) + self.down_bias
        return in_type_of(out, x)


class Block(eqx.Module):
    """One layer: attention, then feed-forward, each on a norm and added to the stream."""

    attention_norm: LayerNorm
    attention: Attention
    mlp_norm: LayerNorm
    mlp: Mlp
    dropout: Dropout

    @staticmethod
    def init(config: GPT2Config, *, key) -> "Block":
        embed = Axis("embed", config.embed)
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            attention_norm=LayerNorm.init(embed, config.norm_eps),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=LayerNorm.init(embed, config.norm_eps),
            mlp=Mlp.init(config, key=mlp_key),
            dropout=Dropout(config.dropout),
        )

    def __call__(self, x: NamedArray, number, key, segment_ids, attention=attend) -> NamedArray:
        attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        out = self.attention(self.attention_norm(x), number, segment_ids, attention)
        x = x + self.dropout(out, attention_key)
        return x + self.dropout(self.mlp(self.mlp_norm(x)), mlp_key)


class GPT2(eqx.Module):
    """The model: tokens to hidden states; the loss multiplies by `unembedding`, which is the embedding."""

    embedding: Table
    positions: Table
    layers: Stacked
    norm: LayerNorm
    config: GPT2Config = eqx.field(static=True)
    unembedding_bias = first_layers = None
    looks_ahead = False

    @staticmethod
    def init(config: GPT2Config, *, key, vocab_multiple: int = 1) -> "GPT2":
        vocab = Axis("vocab", -(-config.vocab // vocab_multiple) * vocab_multiple)
        embed, layers = Axis("embed", config.embed), Axis("layers", config.layers)
        embedding_key, positions_key, layers_key = jax.random.split(key, 3)
        return GPT2(
            embedding=normal(embedding_key, (vocab, embed), deviation=DEVIATION),
            positions=normal(positions_key, (Axis("positions", config.positions), embed), deviation=DEVIATION),
            layers=Stacked.init(lambda key: Block.init(config, key=key), layers, key=layers_key),
            norm=LayerNorm.init(embed, config.norm_eps),
            config=config,
        )

    @property
    def unembedding(self) -> NamedArray:
        """`"vocab embed"`; rows from `config.vocab` on are padding."""
        return self.embedding

    def __call__(
        self, tokens: NamedArray, *, segment_ids=None, positions=None, policy=None, key=None, counted=None, ahead=None
    ) -> Output:
        """Tokens to hidden states: see `LanguageModel`."""
        x, each, shared = self.start(tokens, segment_ids, positions, key)
        return Output(self.norm(self.layers.fold(x, *shared, each=each, policy=policy)))

    def start(self, tokens: NamedArray, segment_ids=None, positions=None, key=None):
        """The stream before the first layer, what each layer gets of its own, and what all layers get.

        Raises:
            UserError: the sequence is longer than the model's learned positions.
        """
        if tokens.shape["pos"] > self.config.positions:
            raise UserError(
                "A sequence cannot be longer than the model's learned positions.",
                seen=f"pos={tokens.shape['pos']}, positions={self.config.positions}",
                where="tokens",
                fix=f"cut the sequence to {self.config.positions}, or train a model with more positions",
            )
        positions = arange(tokens.axis("pos")) if positions is None else positions
        x = take(self.embedding, "vocab", tokens) + take(self.positions, "positions", positions)
        numbers = keys = None
        if self.config.scale_by_inverse_layer:
            numbers = arange(self.layers.axis, start=1, dtype=jnp.float32)
        if key is not None and self.config.dropout:
            first, rest = jax.random.split(key)
            x, keys = Dropout(self.config.dropout)(x, first), random.split(rest, "layers", self.config.layers)
        return x, (numbers, keys), (segment_ids,)
