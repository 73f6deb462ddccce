"""DeepSeek-V3."""

from trellis.models.deepseek_v3.deepseek_v3 import DeepseekV3, DeepseekV3Config

__all__ = ["DeepseekV3", "DeepseekV3Config"]
