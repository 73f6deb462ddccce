"""Model families, each one file."""

from trellis.nn.rope import LinearScaling, Llama3Scaling

from .families import FAMILIES, ModelConfig
from .gpt2 import GPT2, GPT2Config
from .gptj import GPTJ, GPTJConfig
from .llama import Llama, LlamaConfig
from .mixtral import Mixtral, MixtralConfig, Routing
from .qwen3 import Qwen3Config

__all__ = [
    "FAMILIES",
    "GPT2",
    "GPTJ",
    "GPT2Config",
    "GPTJConfig",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "Mixtral",
    "MixtralConfig",
    "ModelConfig",
    "Qwen3Config",
    "Routing",
]
