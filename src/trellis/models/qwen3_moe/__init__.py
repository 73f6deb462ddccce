"""Qwen3's mixtures of experts."""

from trellis.models.qwen3_moe.qwen3_moe import Qwen3MoeConfig

__all__ = ["Qwen3MoeConfig"]
