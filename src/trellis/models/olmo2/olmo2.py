"""OLMo 2 (Team OLMo, 2025, arXiv:2501.00656): Llama's attention and feed-forward layers, with norms after them instead
of before, and a norm over all heads' queries and keys."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax

from trellis import Axis, NamedArray
from trellis.models import fields
from trellis.models.llama import Attention, GatedMlp, Llama, LlamaLike
from trellis.nn import RMSNorm, attend


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(LlamaLike):
    """What defines an OLMo 2."""

    family: Literal["olmo2"] = "olmo2"
    norm_eps: fields.RMSNormEps = 1e-6

    def init(self, *, key, vocab_multiple: int = 1) -> Llama:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        return Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=Block.init)


class Block(eqx.Module):
    """One layer: attention, then feed-forward, each followed by a norm and added to the stream."""

    attention: Attention
    attention_norm: RMSNorm
    mlp: GatedMlp
    mlp_norm: RMSNorm

    @staticmethod
    def init(config: Olmo2Config, *, key) -> "Block":
        embed = Axis("embed", config.embed)
        attention_key, mlp_key = jax.random.split(key)
        plain = Attention.init(config, key=attention_key)
        q_norm, k_norm = (RMSNorm.init(weight.axes[1:], config.norm_eps) for weight in (plain.q, plain.k))
        return Block(
            attention=dataclasses.replace(plain, q_norm=q_norm, k_norm=k_norm),
            attention_norm=RMSNorm.init(embed, config.norm_eps),
            mlp=GatedMlp.init(config, key=mlp_key),
            mlp_norm=RMSNorm.init(embed, config.norm_eps),
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        x = x + self.attention_norm(self.attention(x, rope, segment_ids, attention))
        return x + self.mlp_norm(self.mlp(x))
