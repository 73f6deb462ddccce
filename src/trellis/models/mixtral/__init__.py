"""Mixtral."""

from trellis.models.mixtral.mixtral import Block, Mixtral, MixtralConfig

__all__ = ["Block", "Mixtral", "MixtralConfig"]
