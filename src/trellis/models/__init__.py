"""Model families, each one file."""

from trellis.nn.rope import LinearScaling, Llama3Scaling

from .families import FAMILIES, ModelConfig
from .gpt2 import GPT2Config
from .llama import LlamaConfig

__all__ = ["FAMILIES", "GPT2Config", "LinearScaling", "Llama3Scaling", "LlamaConfig", "ModelConfig"]
