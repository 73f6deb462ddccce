"""Mistral (Jiang et al., 2023, arXiv:2310.06825): Llama's model, whose queries may see a window of keys."""

import dataclasses
from typing import Literal

from trellis.models import fields
from trellis.models.llama import Block, Llama, LlamaLike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(LlamaLike):
    """What defines a Mistral."""

    family: Literal["mistral"] = "mistral"
    norm_eps: fields.RMSNormEps = 1e-5
    window: int | None = None
    """Keys that a query sees, itself included; null for all before it. Set it for long sequences, whose cost then grows
    with their length alone."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """What each block's queries see."""
        return (self.window,) * self.layers

    def init(self, *, key, vocab_multiple: int = 1) -> Llama:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=block)


def block(config: MistralConfig, *, key) -> Block:
    """Llama's block, whose attention sees a window."""
    plain = Block.init(config, key=key)
    return dataclasses.replace(plain, attention=dataclasses.replace(plain.attention, window=config.window))
