"""Gemma 3."""

from trellis.models.gemma3.gemma3 import Gemma3, Gemma3Config

__all__ = ["Gemma3", "Gemma3Config"]
