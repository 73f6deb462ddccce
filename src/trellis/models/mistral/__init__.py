"""Mistral."""

from trellis.models.mistral.mistral import MistralConfig

__all__ = ["MistralConfig"]
