"""Qwen3."""

from trellis.models.qwen3.qwen3 import Qwen3Config

__all__ = ["Qwen3Config"]
