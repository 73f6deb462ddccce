"""Qwen2 and 2.5 (Yang et al., 2024, arXiv:2407.10671 and 2412.15115): Llama's model, with biases of queries, keys and
values."""

import dataclasses
from typing import Literal

from trellis.models import fields
from trellis.models.llama import Block, Llama, LlamaLike


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(LlamaLike):
    """What defines a Qwen2."""

    family: Literal["qwen2"] = "qwen2"
    norm_eps: fields.RMSNormEps = 1e-6

    def init(self, *, key, vocab_multiple: int = 1) -> Llama:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=block)


def block(config: Qwen2Config, *, key) -> Block:
    """Llama's block, whose attention adds biases to queries, keys and values."""
    plain = Block.init(config, key=key)
    return dataclasses.replace(plain, attention=plain.attention.with_biases(out=False))
