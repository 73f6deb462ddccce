"""Qwen3 (Yang et al., 2025, arXiv:2505.09388): Llama's model, with a norm on each head's queries and keys."""

import dataclasses
from typing import Literal

from trellis import Axis
from trellis.models import fields
from trellis.models.llama import Block, Llama, LlamaLike
from trellis.nn import RMSNorm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LlamaLike):
    """What defines a Qwen3."""

    family: Literal["qwen3"] = "qwen3"
    norm_eps: fields.RMSNormEps = 1e-6

    def init(self, *, key, vocab_multiple: int = 1) -> Llama:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=block)


def block(config: Qwen3Config, *, key) -> Block:
    """Llama's block, whose attention norms queries and keys over `head_dim` before it rotates them."""
    return with_head_norms(Block.init(config, key=key), config)


def with_head_norms(plain, config):
    """A block with these norms in its attention."""
    head_dim = Axis("head_dim", config.head_dim)
    q_norm, k_norm = (RMSNorm.init(head_dim, config.norm_eps) for _ in range(2))
    return dataclasses.replace(plain, attention=dataclasses.replace(plain.attention, q_norm=q_norm, k_norm=k_norm))
