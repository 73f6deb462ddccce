"""Qwen2 and 2.5 (Yang et al., 2024, arXiv:2407.10671 and 2412.15115): Llama's model, with biases of queries, keys and
values."""

import dataclasses
from typing import Literal

from trellis.models import fields
from trellis.models.llama import Block, Llama


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config:
    """What defines a Qwen2."""

    family: Literal["qwen2"] = "qwen2"
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.Heads
    kv_heads: fields.KVHeads
    head_dim: fields.HeadDim
    mlp: fields.Mlp
    rope_theta: fields.RopeTheta
    rope_scaling: fields.RopeScaling = None
    norm_eps: fields.RMSNormEps = 1e-6
    tie_embeddings: fields.TieEmbeddings
    positions = None  # sequences may have any length
    experts = experts_per_token = 1

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_key_heads(self)

    def init(self, *, key, vocab_multiple: int = 1) -> Llama:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=block)


def block(config: Qwen2Config, *, key) -> Block:
    """Llama's block, whose attention adds biases to queries, keys and values."""
    plain = Block.init(config, key=key)
    return dataclasses.replace(plain, attention=plain.attention.with_biases(out=False))
