"""Qwen3's mixtures of experts (Yang et al., 2025, arXiv:2505.09388): Mixtral's model with many small experts, and with
Qwen3's norm on each head's queries and keys."""

import dataclasses
from typing import Literal

from trellis.models import fields
from trellis.models.llama import Llama
from trellis.models.mixtral import Block, Mixtral
from trellis.models.qwen3.qwen3 import with_head_norms
from trellis.nn.moe import Routing, check_count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig:
    """What defines a mixture of experts of Qwen3's."""

    family: Literal["qwen3_moe"] = "qwen3_moe"
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.Heads
    kv_heads: fields.KVHeads
    head_dim: fields.HeadDim
    mlp: fields.ExpertMlp
    experts: fields.Experts
    experts_per_token: fields.ExpertsPerToken
    rope_theta: fields.RopeTheta
    rope_scaling: fields.RopeScaling = None
    norm_eps: fields.RMSNormEps = 1e-6
    tie_embeddings: fields.TieEmbeddings
    routing: fields.RoutingField = Routing()
    positions = shared_mlp = None  # sequences may have any length; no block is shared
    expert_biases = False

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_key_heads(self)
        check_count(self.experts_per_token, self.experts, "model.experts_per_token", self.routing)

    def init(self, *, key, vocab_multiple: int = 1) -> Mixtral:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        plain = Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=block)
        return Mixtral(plain.embedding, plain.layers, plain.norm, plain.head, self)


def block(config: Qwen3MoeConfig, *, key) -> Block:
    """Mixtral's block, whose attention norms queries and keys over `head_dim` before it rotates them."""
    return with_head_norms(Block.init(config, key=key), config)
