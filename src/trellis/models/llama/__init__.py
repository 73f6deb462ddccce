"""Llama."""

from trellis.models.llama.llama import Attention, Block, GatedMlp, Llama, LlamaConfig

__all__ = ["Attention", "Block", "GatedMlp", "Llama", "LlamaConfig"]
