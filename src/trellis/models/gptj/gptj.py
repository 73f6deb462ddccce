"""GPT-J (Wang and Komatsuzaki, 2021): attention and feed-forward side by side on one norm, rotary positions in pairs.

Written for one device, in named tensors; a layout makes it parallel. The two halves of a block end in partial sums that
are added before they are summed, so tensor parallelism costs one all-reduce a block instead of two. Axes:

    batch pos key_pos    sequences, positions of queries, positions of keys
    embed mlp vocab      widths
    heads head_dim
    layers               stacked blocks
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax

from trellis import Axis, NamedArray, Stacked, UserError, arange, dot_each, einsum, gelu, save, settle, take
from trellis.models import fields
from trellis.models.protocol import Output
from trellis.nn import (
    Bias,
    LayerNorm,
    Table,
    Weight,
    attend,
    constant,
    in_one_type,
    in_type_of,
    normal,
    rotary_tables,
    rotate,
    weight,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTJConfig:
    """What defines a GPT-J."""

    family: Literal["gptj"] = "gptj"
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.WholeHeads
    rotary_dim: int
    """Elements of a head that position rotates; the rest are not rotated. Raise it up to the whole head for models of
    your own."""
    mlp: fields.Mlp
    rope_theta: fields.RopeTheta = 10000.0
    norm_eps: fields.LayerNormEps = 1e-5
    head_bias: bool = False
    """Whether logits have a bias, as those of the released model do. Set false for models of your own."""
    tie_embeddings = False
    positions = None  # sequences may have any length
    experts = experts_per_token = 1

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_heads_divide(self)
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise UserError(
                "`rotary_dim` must be even and at most the width of a head.",
                seen=f"rotary_dim={self.rotary_dim}, embed / heads = {self.head_dim}",
                where="model.rotary_dim",
                fix=f"use an even size up to {self.head_dim}",
            )

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    def init(self, *, key, vocab_multiple: int = 1) -> "GPTJ":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return GPTJ.init(self, key=key, vocab_multiple=vocab_multiple)


class Attention(eqx.Module):
    """Multi-head attention without biases; part of each head is rotated by its position. Leaves partial sums."""

    q: Weight
    k: Weight
    v: Weight
    out: Weight

    @staticmethod
    def init(config: GPTJConfig, *, key) -> "Attention":
        embed, head_dim = Axis("embed", config.embed), Axis("head_dim", config.head_dim)
        heads = Axis("heads", config.heads)
        keys = jax.random.split(key, 4)
        return Attention(
            q=weight(keys[0], (embed, heads, head_dim), over="embed"),
            k=weight(keys[1], (embed, heads, head_dim), over="embed"),
            v=weight(keys[2], (embed, heads, head_dim), over="embed"),
            out=weight(
                keys[3], (heads, head_dim, embed), over=("heads", "head_dim"), scale=(2 * config.layers) ** -0.5
            ),
        )

    def __call__(self, q: NamedArray, k, v, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        """`q`, `k` and `v`: `"batch pos heads head_dim"`, the products of the stream with these weights."""
        q, k, v = in_one_type(q, k, v)
        q, k = save(rotate(q, rope, pairs=True), "query"), save(rotate(k, rope, pairs=True), "key")
        k, v = (y.rename(pos="key_pos", heads="kv_heads") for y in (k, save(v, "value")))
        out = attention(q, k, v, segment_ids=segment_ids, save_name="attention")
        return einsum("batch pos heads head_dim, heads head_dim embed -> batch pos embed", out, self.out, settle=False)


class Mlp(eqx.Module):
    """Feed-forward half with a GELU in its tanh form. Leaves partial sums; the block adds the second bias."""

    up: Weight
    up_bias: Bias
    down: Weight

    @staticmethod
    def init(config: GPTJConfig, *, key) -> "Mlp":
        embed, mlp = Axis("embed", config.embed), Axis("mlp", config.mlp)
        up_key, down_key = jax.random.split(key)
        return Mlp(
            up=weight(up_key, (embed, mlp), over="embed"),
            up_bias=constant(mlp, 0.0),
            down=weight(down_key, (mlp, embed), over="mlp", scale=(2 * config.layers) ** -0.5),
        )

    def __call__(self, up: NamedArray) -> NamedArray:
        """`up`: `"batch pos mlp"`, the product of the stream with that weight."""
        up = save(up + self.up_bias, "mlp_up")
        return einsum("batch pos mlp, mlp embed -> batch pos embed", gelu(up), self.down, settle=False)


class Block(eqx.Module):
    """One layer: both halves read one norm, and their results are added to the stream together."""

    norm: LayerNorm
    attention: Attention
    mlp: Mlp
    down_bias: Bias

    @staticmethod
    def init(config: GPTJConfig, *, key) -> "Block":
        embed = Axis("embed", config.embed)
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            norm=LayerNorm.init(embed, config.norm_eps),
            attention=Attention.init(config, key=attention_key),
            mlp=Mlp.init(config, key=mlp_key),
            down_bias=constant(embed, 0.0),
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        heads = self.attention
        q, k, v, up = dot_each(self.norm(x), (heads.q, heads.k, heads.v, self.mlp.up), over="embed")
        attended = heads(q, k, v, rope, segment_ids, attention)
        return x + in_type_of(_sum(*in_one_type(attended, self.mlp(up))), x) + in_type_of(self.down_bias, x)


def _sum(a: NamedArray, b: NamedArray) -> NamedArray:
    """The sum of both, settled once; a layout that slices only heads or only mlp settles each."""
    if a.type != b.type:
        a, b = settle(a), settle(b)
    return settle(a + b)


class GPTJ(eqx.Module):
    """The model: tokens to hidden states; the loss multiplies by `unembedding` and adds `unembedding_bias`."""

    embedding: Table
    layers: Stacked
    norm: LayerNorm
    unembedding: Weight
    unembedding_bias: Bias | None
    config: GPTJConfig = eqx.field(static=True)
    first_layers = None
    looks_ahead = False

    @staticmethod
    def init(config: GPTJConfig, *, key, vocab_multiple: int = 1) -> "GPTJ":
        vocab = Axis("vocab", -(-config.vocab // vocab_multiple) * vocab_multiple)
        embed, layers = Axis("embed", config.embed), Axis("layers", config.layers)
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        return GPTJ(
            embedding=normal(embedding_key, (vocab, embed), deviation=1.0),
            layers=Stacked.init(lambda key: Block.init(config, key=key), layers, key=layers_key),
            norm=LayerNorm.init(embed, config.norm_eps),
            unembedding=normal(head_key, (vocab, embed), deviation=config.embed**-0.5),
            unembedding_bias=constant(vocab, 0.0) if config.head_bias else None,
            config=config,
        )

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
        head_dim = Axis("head_dim", self.config.head_dim)
        rope = rotary_tables(positions, head_dim, self.config.rope_theta, pairs=self.config.rotary_dim)
        return x, (), (rope, segment_ids)
