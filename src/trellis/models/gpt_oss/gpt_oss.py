"""GPT-OSS (OpenAI, 2025, arXiv:2508.10925): mixtures of experts; attention with sinks, windowed in every other layer.

Written for one device, in named tensors; a layout makes it parallel. A kernel's mask is fixed when it is compiled, so
layers are stacked in pairs: the first sees a window and the second everything. Axes beside those of `llama.py`:

    layers     pairs of blocks
    pair       the two blocks of a pair, in what is measured
    experts    the experts' weights
    routes     the experts as the router sees them: each token's scores, whole on every device
    choices    the experts that a token goes to
"""

import dataclasses
import functools
from typing import ClassVar, Literal

import equinox as eqx
import jax

from trellis import Axis, NamedArray, UserError, checkpoint, stack, unbind
from trellis.models import fields
from trellis.models.llama import Attention, Llama
from trellis.models.mixtral import Block, Mixtral
from trellis.nn import ClampedSwiGLU, attend, constant
from trellis.nn.moe import Routed, Routing, check_count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig:
    """What defines a GPT-OSS."""

    family: Literal["gpt_oss"] = "gpt_oss"
    vocab: fields.Vocab
    embed: fields.Embed
    layers: fields.Layers
    heads: fields.Heads
    kv_heads: fields.KVHeads
    head_dim: fields.HeadDim
    window: int
    """Keys that a query of the first, third, ... block sees, itself included. Raise it for more local attention; cost
    grows with it."""
    mlp: fields.ExpertMlp
    experts: fields.Experts
    experts_per_token: fields.ExpertsPerToken
    swiglu_limit: float = 7.0
    """Bound on the inputs of an expert's gate. Set it to the value of an imported model."""
    rope_theta: fields.RopeTheta
    rope_scaling: fields.RopeScaling = None
    norm_eps: fields.RMSNormEps = 1e-5
    tie_embeddings: fields.TieEmbeddings
    routing: fields.RoutingField = Routing()
    positions = shared_mlp = None  # sequences may have any length; no block is shared
    expert_biases = True

    def __post_init__(self):
        fields.check_sizes(self)
        fields.check_key_heads(self)
        check_count(self.experts_per_token, self.experts, "model.experts_per_token", self.routing)
        if self.layers % 2:
            raise UserError(
                "`layers` must be even: blocks come in pairs, one that attends to a window and one that attends to "
                "everything.",
                seen=f"layers={self.layers}",
                where="model.layers",
                fix=f"use an even number, {self.layers + 1} for example",
            )

    @property
    def stacked(self) -> int:
        """Pairs of blocks."""
        return self.layers // 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        """What each block's queries see."""
        return (self.window, None) * self.stacked

    def init(self, *, key, vocab_multiple: int = 1) -> Mixtral:
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        plain = Llama.init(self, key=key, vocab_multiple=vocab_multiple, block=Pair.init, each=2)
        return Mixtral(plain.embedding, plain.layers, plain.norm, plain.head, self)


def attention(config: GptOssConfig, window: int | None, *, key) -> Attention:
    """Llama's attention with biases and sinks, whose queries see a window or everything."""
    plain = Attention.init(config, key=key).with_biases(out=True)
    return dataclasses.replace(plain, sinks=constant(Axis("heads", config.heads), 0.0), window=window)


def block(config: GptOssConfig, window: int | None, *, key) -> Block:
    """Mixtral's block, whose attention sees a window or everything, and whose experts have bounded gates."""
    seeing = functools.partial(attention, window=window)
    gated = ClampedSwiGLU(config.swiglu_limit)
    return Block.init(config, key=key, attention=seeing, router_bias=True, gated=gated)


class Pair(eqx.Module):
    """Two layers: one whose queries see a window, and one whose queries see everything."""

    near: Block
    far: Block
    several: ClassVar[bool] = True

    @staticmethod
    def init(config: GptOssConfig, *, key) -> "Pair":
        near_key, far_key = jax.random.split(key)
        return Pair(
            near=block(config, config.window, key=near_key),
            far=block(config, None, key=far_key),
        )

    def __call__(self, x: NamedArray, rope, segment_ids: NamedArray | None, attention=attend) -> NamedArray:
        return self.far(self.near(x, rope, segment_ids, attention), rope, segment_ids, attention)

    def measured(self, parts, shares: NamedArray | None, *about, policy=None):
        """The stream after both layers, and what is measured of their routing: each layer's load, and the mean of the
        rest. For several parts of a batch, as in `Block.measured`.

        The backward pass makes again one layer at a time. It needs no layer's last product then, and so no exchange of
        its rows; of a pair at a time it would make the first layer's.
        """
        of_near, of_far = (None, None) if shares is None else unbind(shares, "pair")
        one = checkpoint(lambda block, *given: block.measured(*given), policy)
        parts, near = one(self.near, parts, of_near, *about)
        parts, far = one(self.far, parts, of_far, *about)
        load = stack((near.load, far.load), "pair")
        return parts, Routed(load, (near.balance + far.balance) / 2, (near.z + far.z) / 2, near.routing)

    @property
    def picking(self) -> list[NamedArray | None]:
        """`Block.picking` of both layers."""
        return self.near.picking + self.far.picking

    def balanced(self, load: NamedArray, rate: float) -> "Pair":
        """The pair with its experts' biases moved towards an even load."""
        of_near, of_far = unbind(load, "pair")
        return Pair(self.near.balanced(of_near, rate), self.far.balanced(of_far, rate))
