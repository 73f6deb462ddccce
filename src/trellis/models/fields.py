"""Fields that configurations of several families share: the type of each, what it is, and what must hold.

class LlamaConfig:
    vocab: fields.Vocab
    embed: fields.Embed
"""

import dataclasses
from typing import Annotated

from trellis import UserError
from trellis.choices import check_choices
from trellis.nn import Scaling
from trellis.nn.moe import Routing

Vocab = Annotated[int, "Tokens in the vocabulary. Set it to the tokenizer's size."]
Embed = Annotated[int, "Width of the residual stream. Raise it for a larger model; cost grows with its square."]
Layers = Annotated[int, "Number of blocks. Raise it for a deeper model; cost grows with it."]
Heads = Annotated[int, "Query heads. Raise it with the width, so that each head keeps its width."]
WholeHeads = Annotated[
    int, "Attention heads, each embed / heads wide. Raise it with the width, so that each head keeps its width."
]
KVHeads = Annotated[int, "Key and value heads; divides heads. Lower it for a smaller cache when generating."]
HeadDim = Annotated[int, "Width of one head. Leave it at 64 or 128, the widths that kernels are made for."]
Mlp = Annotated[int, "Width of the feed-forward block. Raise it for a larger model without more attention."]
RopeTheta = Annotated[float, "Base of the rotary frequencies. Raise it for long sequences, to 500,000 for example."]
RopeScaling = Annotated[
    Scaling | None,
    "How rotary frequencies are scaled for long contexts. Set it for longer sequences than in training.",
]
RMSNormEps = Annotated[float, "Added to the mean square before the root. Set it to the value of an imported model."]
LayerNormEps = Annotated[float, "Added to the variance before the root. Set it to the value of an imported model."]
TieEmbeddings = Annotated[
    bool,
    "Whether the embedding is also the unembedding. Set true for small models with a large vocabulary.",
]

ExpertMlp = Annotated[int, "Width of one expert. Lower it for more and finer experts at the same cost."]
Experts = Annotated[int, "Number of experts in each block. Raise it for more parameters at the same cost per token."]
ExpertsPerToken = Annotated[int, "Number of experts that each token goes to. Raise it for more computation per token."]
RoutingField = Annotated[Routing, "How experts are picked and weighed, kept evenly loaded, and reached."]


# Fields that may be 0, which turns them off.
_FROM_ZERO = ("dropout", "dense_layers")


def check_sizes(config) -> None:
    """The values of a configuration are of their fields' types, and its numbers positive: integers are sizes, others
    are bases and terms added under a root.

    Raises:
        UserError: naming the first that is not.
    """
    check_choices(config)
    for field in dataclasses.fields(config):
        size = getattr(config, field.name)
        if isinstance(size, bool) or field.name in _FROM_ZERO or not isinstance(size, int | float) or size > 0:
            continue
        raise UserError(
            "A model's sizes must be positive." if isinstance(size, int) else f"`{field.name}` must be positive.",
            seen=f"{field.name}={size}",
            where=f"model.{field.name}",
            fix="use 1 or more" if isinstance(size, int) else "use a positive number, as in the model's recipe",
        )


def check_key_heads(config) -> None:
    """Each key head serves the same number of query heads, and heads have pairs of elements.

    Raises:
        UserError: with both numbers.
    """
    if config.heads % config.kv_heads:
        raise UserError(
            "`heads` must be divisible by `kv_heads`.",
            seen=f"heads={config.heads}, kv_heads={config.kv_heads}",
            where="model.kv_heads",
            fix=f"make kv_heads a divisor of {config.heads}, or heads a multiple of {config.kv_heads}",
        )
    if config.head_dim % 2:
        raise UserError(
            "`head_dim` must be even, since rotary positions rotate pairs of elements.",
            seen=f"head_dim={config.head_dim}",
            where="model.head_dim",
            fix=f"use an even size, {config.head_dim + 1} for example",
        )


def check_heads_divide(config) -> None:
    """Heads divide the width between them.

    Raises:
        UserError: with both numbers.
    """
    if config.embed % config.heads:
        raise UserError(
            "`embed` must be divisible by `heads`.",
            seen=f"embed={config.embed}, heads={config.heads}",
            where="model.heads",
            fix=f"use a divisor of {config.embed}",
        )
