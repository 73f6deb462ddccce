"""Families of models, one folder each, and what the rest of Trellis needs of a family (`protocol.py`)."""

from trellis.models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from trellis.models.families import FAMILIES, ModelConfig
from trellis.models.gemma3 import Gemma3, Gemma3Config
from trellis.models.gpt2 import GPT2, GPT2Config
from trellis.models.gpt_oss import GptOssConfig
from trellis.models.gptj import GPTJ, GPTJConfig
from trellis.models.llama import Llama, LlamaConfig
from trellis.models.mistral import MistralConfig
from trellis.models.mixtral import Mixtral, MixtralConfig
from trellis.models.olmo2 import Olmo2Config
from trellis.models.protocol import FamilyConfig, LanguageModel, Measured, Output
from trellis.models.qwen2 import Qwen2Config
from trellis.models.qwen3 import Qwen3Config
from trellis.models.qwen3_moe import Qwen3MoeConfig
from trellis.nn import LinearScaling, Llama3Scaling, YarnScaling
from trellis.nn.moe import Routing

__all__ = [
    "FAMILIES",
    "GPT2",
    "GPTJ",
    "DeepseekV3",
    "DeepseekV3Config",
    "FamilyConfig",
    "GPT2Config",
    "GPTJConfig",
    "Gemma3",
    "Gemma3Config",
    "GptOssConfig",
    "LanguageModel",
    "LinearScaling",
    "Llama",
    "Llama3Scaling",
    "LlamaConfig",
    "Measured",
    "MistralConfig",
    "Mixtral",
    "MixtralConfig",
    "ModelConfig",
    "Olmo2Config",
    "Output",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "Routing",
    "YarnScaling",
]
