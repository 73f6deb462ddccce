"""The families of models that a run can name. A new one is a folder beside this file, and its lines here."""

from trellis.hub import Family
from trellis.models.deepseek_v3 import DeepseekV3Config
from trellis.models.deepseek_v3.hub import FAMILY as DEEPSEEK_V3
from trellis.models.gpt2 import GPT2Config
from trellis.models.gpt2.hub import FAMILY as GPT2
from trellis.models.gpt_oss import GptOssConfig
from trellis.models.gpt_oss.hub import FAMILY as GPT_OSS
from trellis.models.gptj import GPTJConfig
from trellis.models.gptj.hub import FAMILY as GPTJ
from trellis.models.llama import LlamaConfig
from trellis.models.llama.hub import FAMILY as LLAMA
from trellis.models.mixtral import MixtralConfig
from trellis.models.mixtral.hub import FAMILY as MIXTRAL
from trellis.models.qwen3 import Qwen3Config
from trellis.models.qwen3.hub import FAMILY as QWEN3
from trellis.models.qwen3_moe import Qwen3MoeConfig
from trellis.models.qwen3_moe.hub import FAMILY as QWEN3_MOE

ModelConfig = (
    LlamaConfig
    | Qwen3Config
    | MixtralConfig
    | Qwen3MoeConfig
    | GptOssConfig
    | DeepseekV3Config
    | GPT2Config
    | GPTJConfig
)
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, QWEN3, MIXTRAL, QWEN3_MOE, GPT_OSS, DEEPSEEK_V3, GPT2, GPTJ)
}
