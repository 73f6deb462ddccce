"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): Llama's model, with a norm on each head's queries and keys."""

import dataclasses
from typing import Literal

from trellis.named import Axis
from trellis.nn.norm import RMSNorm
from trellis.nn.rope import Scaling

from .config import check_positive, check_whole_heads
from .llama import Block, Llama


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """What defines a Qwen3."""

    family: Literal["qwen3"] = "qwen3"
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
    """Width of the feed-forward block."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rope_scaling: Scaling | None = None
    """How rotary frequencies are changed for long contexts."""
    norm_eps: float = 1e-6
    """Added to the mean square before the root."""
    tie_embeddings: bool
    """Whether the unembedding is the embedding."""

    def __post_init__(self):
        check_positive(self, "vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp")
        check_whole_heads(self)

    def init(self, *, key, vocab_multiple: int = 1) -> Llama:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=block)


def block(config: Qwen3Config, *, key) -> Block:
    """Llama's block, whose attention norms queries and keys over `head_dim` before it turns them."""
    plain = Block.init(config, key=key)
    head_dim = Axis("head_dim", config.head_dim)
    q_norm, k_norm = (RMSNorm.init(head_dim, config.norm_eps) for _ in range(2))
    return dataclasses.replace(plain, attention=dataclasses.replace(plain.attention, q_norm=q_norm, k_norm=k_norm))
