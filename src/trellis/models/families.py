"""The families of models that a run can name."""

import functools
import importlib
import operator
from typing import TYPE_CHECKING

from trellis.hub import Family
from trellis.models.protocol import FamilyConfig

# To add a family, put its folder beside this file and its name here.
_FOLDERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "gptj",
)

FAMILIES: dict[str, Family] = {name: importlib.import_module(f"trellis.models.{name}.hub").FAMILY for name in _FOLDERS}

if TYPE_CHECKING:
    ModelConfig = FamilyConfig
else:
    ModelConfig = functools.reduce(operator.or_, (family.config for family in FAMILIES.values()))
