"""The families of models that a run can name."""

from .gpt2 import GPT2Config
from .gptj import GPTJConfig
from .llama import LlamaConfig
from .mixtral import MixtralConfig
from .qwen3 import Qwen3Config

ModelConfig = LlamaConfig | Qwen3Config | MixtralConfig | GPT2Config | GPTJConfig

FAMILIES: dict[str, type] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "gpt2": GPT2Config,
    "gptj": GPTJConfig,
}
