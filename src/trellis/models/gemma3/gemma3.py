"""Gemma 3 (Gemma Team, 2025, arXiv:2503.19786): layers that see a window, and among them some that see everything.

Written for one device, in named tensors; a layout makes it parallel. A kernel's mask is fixed when it is compiled, so
layers are stacked in groups of one period of the pattern. What is left of the layers comes first, in a stack of its
own; none of these sees everything. Axes beside those of `llama.py`:

    first_layers   the layers before the groups
    layers         groups of blocks
"""

import dataclasses
import math
from typing import Literal

import equinox as eqx
import jax

from trellis import Axis, NamedArray, Stacked, UserError, arange, checkpoint, take
from trellis.models import fields
from trellis.models.llama import Attention, GatedMlp, Llama, LlamaLike
from trellis.models.protocol import Output
from trellis.nn import RMSNorm, Table, Weight, attend, geglu, rotary_tables


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(LlamaLike):
    """What defines a Gemma 3."""

    family: Literal["gemma3"] = "gemma3"
    window: int
    """Keys that a query of most blocks sees, itself included. Raise it for more local attention; cost grows with it."""
    global_every: int | None = 6
    """Every so many blocks, one attends to everything; null for none. Lower it for more of those, whose cost grows with
    the length."""
    query_scale: int
    """Scores are divided by the root of this. Leave it at head_dim, or set it to the value of an imported model."""
    local_rope_theta: float = 10_000.0
    """`rope_theta` of the blocks that see a window. Leave it: their keys are near."""
    norm_eps: fields.RMSNormEps = 1e-6
    tie_embeddings: fields.TieEmbeddings = True

    def __post_init__(self):
        LlamaLike.__post_init__(self)
        if self.layers < self.period:
            raise UserError(
                "`layers` must be at least `global_every`, so that one of them attends to everything.",
                seen=f"layers={self.layers}, global_every={self.global_every}",
                where="model.layers",
                fix=f"use {self.global_every} layers or more, or a smaller global_every, or null",
            )

    @property
    def period(self) -> int:
        """Blocks in a group."""
        return self.global_every or 1

    @property
    def first(self) -> int:
        """Blocks before the groups."""
        return self.layers % self.period

    @property
    def stacked(self) -> int:
        """Groups of blocks."""
        return self.layers // self.period

    @property
    def windows(self) -> tuple[int | None, ...]:
        """What each block's queries see."""
        last = self.global_every or self.layers + 1
        return tuple(None if (i + 1) % last == 0 else self.window for i in range(self.layers))

    def init(self, *, key, vocab_multiple: int = 1) -> "Gemma3":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        first_key, rest_key = jax.random.split(key)
        plain = Llama.init(self, key=rest_key, vocab_multiple=vocab_multiple, block=Group.init, each=self.period)
        block = lambda key: Block.init(self, self.window, key=key)
        return Gemma3(
            embedding=plain.embedding,
            first_layers=Stacked.init(block, Axis("first_layers", self.first), key=first_key) if self.first else None,
            layers=plain.layers,
            norm=_norm(Axis("embed", self.embed), self),
            head=plain.head,
            config=self,
        )


def _norm(axis: Axis, config: Gemma3Config) -> RMSNorm:
    return RMSNorm.init(axis, config.norm_eps, center=1.0)


class Block(eqx.Module):
    """One layer: attention, then feed-forward, each between two norms and added to the stream."""

    before_attention: RMSNorm
    attention: Attention
    after_attention: RMSNorm
    before_mlp: RMSNorm
    mlp: GatedMlp
    after_mlp: RMSNorm

    @staticmethod
    def init(config: Gemma3Config, window: int | None, *, key) -> "Block":
        embed, head_dim = Axis("embed", config.embed), Axis("head_dim", config.head_dim)
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            before_attention=_norm(embed, config),
            attention=dataclasses.replace(
                Attention.init(config, key=attention_key),
                q_norm=_norm(head_dim, config),
                k_norm=_norm(head_dim, config),
                window=window,
                scale=config.query_scale**-0.5,
            ),
            after_attention=_norm(embed, config),
            before_mlp=_norm(embed, config),
            mlp=dataclasses.replace(GatedMlp.init(config, key=mlp_key), gated=geglu),
            after_mlp=_norm(embed, config),
        )

    def __call__(self, x: NamedArray, near, far, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        """`near` and `far` are the rotary tables of blocks that see a window, and of those that see everything."""
        rope = far if self.attention.window is None else near
        x = x + self.after_attention(self.attention(self.before_attention(x), rope, segment_ids, attention))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Group(eqx.Module):
    """One period of the pattern, as it is after the layers that come first."""

    blocks: tuple[Block, ...]

    @staticmethod
    def init(config: Gemma3Config, *, key) -> "Group":
        windows = config.windows[config.first : config.first + config.period]
        keys = jax.random.split(key, len(windows))
        return Group(tuple(Block.init(config, window, key=own) for window, own in zip(windows, keys, strict=True)))

    def __call__(
        self, x: NamedArray, near, far, segment_ids: NamedArray | None, attention=attend, policy=None
    ) -> NamedArray:
        """`policy` says what each block keeps for the backward pass, which makes again one block at a time."""
        one = checkpoint(lambda x, block, *about: block(x, *about, attention), policy)
        for block in self.blocks:
            x = one(x, block, near, far, segment_ids)
        return x


class Gemma3(eqx.Module):
    """The model: tokens to hidden states; the loss multiplies by `unembedding`."""

    embedding: Table
    first_layers: Stacked | None
    layers: Stacked
    norm: RMSNorm
    head: Weight | None
    config: Gemma3Config = eqx.field(static=True)
    unembedding_bias = None
    unembedding = Llama.unembedding
    looks_ahead = False

    def __call__(
        self, tokens: NamedArray, *, segment_ids=None, positions=None, policy=None, key=None, counted=None, ahead=None
    ) -> Output:
        """Tokens to hidden states: see `LanguageModel`."""
        x, each, shared = self.start(tokens, segment_ids, positions, key)
        if self.first_layers is not None:
            x = self.first_layers.fold(x, *shared, policy=policy)
        call = lambda group, x, *about: group(x, *about, policy=policy)
        return Output(self.norm(self.layers.fold(x, *shared, each=each, call=call)))

    def start(self, tokens: NamedArray, segment_ids=None, positions=None, key=None):
        """The stream before the first layer, what each layer gets of its own, and what all layers get."""
        config, head_dim = self.config, Axis("head_dim", self.config.head_dim)
        x = take(self.embedding, "vocab", tokens) * math.sqrt(config.embed)
        positions = arange(tokens.axis("pos")) if positions is None else positions
        near = rotary_tables(positions, head_dim, config.local_rope_theta)
        far = rotary_tables(positions, head_dim, config.rope_theta, config.rope_scaling)
        return x, (), (near, far, segment_ids)
