"""The building blocks of models: parameters, layers, attention, losses, precision.

    import trellis as tr
    from trellis import nn

Everything takes and returns named arrays, mentions no mesh, and is right on every layout. `nn.moe` has the building
blocks of mixtures of experts. For programs written by hand there are functions on plain arrays:
`dot_product_attention`, `decode_attention` and `linear_cross_entropy`.
"""

from trellis.nn import moe
from trellis.nn.attention import (
    AttentionError,
    attend,
    attend_cached,
    decode_attention,
    dot_product_attention,
)
from trellis.nn.dropout import Dropout
from trellis.nn.embedding import Embedding
from trellis.nn.gate import ClampedSwiGLU, geglu, swiglu
from trellis.nn.initializers import constant, normal, weight
from trellis.nn.linear import Linear
from trellis.nn.loss import LossError, TokenLoss, cross_entropy, linear_cross_entropy, next_token_loss, tied
from trellis.nn.norm import LayerNorm, RMSNorm
from trellis.nn.parameters import Bias, Parameter, Picking, Role, Scale, Table, Weight, parameters
from trellis.nn.precision import Precision, in_one_type, in_type_of
from trellis.nn.rope import (
    LinearScaling,
    Llama3Scaling,
    Scaling,
    YarnScaling,
    frequencies,
    rotary_tables,
    rotate,
)

__all__ = [
    "AttentionError",
    "Bias",
    "ClampedSwiGLU",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LossError",
    "Parameter",
    "Picking",
    "Precision",
    "RMSNorm",
    "Role",
    "Scale",
    "Scaling",
    "Table",
    "TokenLoss",
    "Weight",
    "YarnScaling",
    "attend",
    "attend_cached",
    "constant",
    "cross_entropy",
    "decode_attention",
    "dot_product_attention",
    "frequencies",
    "geglu",
    "in_one_type",
    "in_type_of",
    "linear_cross_entropy",
    "moe",
    "next_token_loss",
    "normal",
    "parameters",
    "rotary_tables",
    "rotate",
    "swiglu",
    "tied",
    "weight",
]
