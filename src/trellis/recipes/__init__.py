"""Ready-made runs. Each is a function; its docstring has the command."""

from trellis.models.deepseek_v3.recipes import (
    deepseek_v3,
    deepseek_v3_b200_256,
    deepseek_v3_v5p_512,
    deepseek_v3_v6e_1024,
)
from trellis.models.gpt2.recipes import (
    gpt2_small,
)
from trellis.models.gpt_oss.recipes import (
    gpt_oss_20b,
    gpt_oss_20b_b200_8,
    gpt_oss_20b_v5p_64,
    gpt_oss_20b_v6e_64,
)
from trellis.models.llama.recipes.large import (
    llama_8b,
    llama_70b,
    llama_70b_h200_256,
    llama_405b,
    llama_405b_h200_512,
)
from trellis.models.llama.recipes.long import (
    llama_8b_1m_h100_64,
    llama_8b_1m_v5p_64,
    llama_8b_1m_v6e_256,
    llama_8b_128k_h100_32,
    llama_8b_128k_v5p_64,
    llama_8b_128k_v6e_256,
    llama_70b_1m_h200_256,
    llama_70b_1m_v5p_512,
    llama_70b_1m_v6e_256,
    llama_70b_128k_h200_256,
    llama_70b_128k_v5p_512,
    llama_70b_128k_v6e_256,
)
from trellis.models.llama.recipes.small import (
    llama_1b,
    llama_2b,
    llama_84m,
    llama_270m,
    llama_540m,
)
from trellis.models.llama.recipes.torus import (
    llama32_1b_v5e_16,
    llama_8b_v5e_256,
    llama_8b_v5p_64,
    llama_8b_v6e_256,
    llama_70b_v5p_512,
    llama_70b_v6e_256,
    llama_405b_v5p_1024,
    llama_405b_v6e_1024,
)
from trellis.models.mixtral.recipes import (
    mixtral_8x7b,
    mixtral_8x7b_b200_32,
    mixtral_8x7b_v5p_64,
    mixtral_8x7b_v6e_64,
)
from trellis.models.qwen3_moe.recipes import (
    qwen3_30b_a3b,
    qwen3_30b_a3b_b200_8,
    qwen3_30b_a3b_v5p_64,
    qwen3_30b_a3b_v6e_64,
)
from trellis.recipes.load import RECIPES, hardware_of, load_run
from trellis.recipes.starter import starter, tiny

__all__ = [
    "RECIPES",
    "deepseek_v3",
    "deepseek_v3_b200_256",
    "deepseek_v3_v5p_512",
    "deepseek_v3_v6e_1024",
    "gpt2_small",
    "gpt_oss_20b",
    "gpt_oss_20b_b200_8",
    "gpt_oss_20b_v5p_64",
    "gpt_oss_20b_v6e_64",
    "hardware_of",
    "llama32_1b_v5e_16",
    "llama_1b",
    "llama_270m",
    "llama_2b",
    "llama_405b",
    "llama_405b_h200_512",
    "llama_405b_v5p_1024",
    "llama_405b_v6e_1024",
    "llama_540m",
    "llama_70b",
    "llama_70b_128k_h200_256",
    "llama_70b_128k_v5p_512",
    "llama_70b_128k_v6e_256",
    "llama_70b_1m_h200_256",
    "llama_70b_1m_v5p_512",
    "llama_70b_1m_v6e_256",
    "llama_70b_h200_256",
    "llama_70b_v5p_512",
    "llama_70b_v6e_256",
    "llama_84m",
    "llama_8b",
    "llama_8b_128k_h100_32",
    "llama_8b_128k_v5p_64",
    "llama_8b_128k_v6e_256",
    "llama_8b_1m_h100_64",
    "llama_8b_1m_v5p_64",
    "llama_8b_1m_v6e_256",
    "llama_8b_v5e_256",
    "llama_8b_v5p_64",
    "llama_8b_v6e_256",
    "load_run",
    "mixtral_8x7b",
    "mixtral_8x7b_b200_32",
    "mixtral_8x7b_v5p_64",
    "mixtral_8x7b_v6e_64",
    "qwen3_30b_a3b",
    "qwen3_30b_a3b_b200_8",
    "qwen3_30b_a3b_v5p_64",
    "qwen3_30b_a3b_v6e_64",
    "starter",
    "tiny",
]
