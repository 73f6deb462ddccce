"""Qwen2."""

from trellis.models.qwen2.qwen2 import Qwen2Config

__all__ = ["Qwen2Config"]
