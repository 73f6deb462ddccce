"""The families of models that a run can name."""

from .gpt2 import GPT2Config
from .llama import LlamaConfig

ModelConfig = LlamaConfig | GPT2Config

FAMILIES: dict[str, type] = {"llama": LlamaConfig, "gpt2": GPT2Config}
