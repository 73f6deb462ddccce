"""GPT-2 (Radford et al., 2019), with the two changes that keep it stable in half precision (Mistral, Karamcheti 2021)."""

import dataclasses
from typing import Literal

from ..errors import UserError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """The shape of a GPT-2. Nothing here has a default: these numbers are the model."""

    family: Literal["gpt2"] = "gpt2"
    vocab: int
    """Tokens in the vocabulary."""
    positions: int
    """Learned positions: the longest sequence."""
    embed: int
    """Width of the residual stream."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads, each embed / heads wide."""
    mlp: int
    """Width of the feed-forward layer."""
    norm_eps: float
    """Added to the variance in LayerNorm."""
    dropout: float
    """Fraction of activations set to zero in training, after the embedding, the attention and the feed-forward layer."""
    scale_by_inverse_layer: bool
    """Whether a block's attention scores are divided by its number, counted from 1."""
    upcast_attention: bool
    """Whether attention scores are computed in float32."""

    def __post_init__(self):
        for name in ("vocab", "positions", "embed", "layers", "heads", "mlp"):
            if getattr(self, name) < 1:
                size = getattr(self, name)
                raise UserError("A size is positive.", seen=f"{name}={size}", where=name, fix=f"give {name} a size")
        if self.embed % self.heads:
            raise UserError(
                "Heads divide the width between them.",
                seen=f"embed={self.embed}, heads={self.heads}",
                where="heads",
                fix=f"use a divisor of {self.embed}",
            )
        if not 0 <= self.dropout < 1:
            raise UserError(
                "Dropout is a fraction below 1.", seen=f"dropout={self.dropout}", where="dropout", fix="use 0 for none"
            )
