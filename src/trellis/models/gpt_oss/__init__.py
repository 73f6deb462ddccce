"""GPT-OSS."""

from trellis.models.gpt_oss.gpt_oss import GptOssConfig

__all__ = ["GptOssConfig"]
