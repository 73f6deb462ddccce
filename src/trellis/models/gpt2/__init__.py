"""GPT-2."""

from trellis.models.gpt2.gpt2 import GPT2, GPT2Config

__all__ = ["GPT2", "GPT2Config"]
