"""Mixtral."""

from trellis.models.mixtral.mixtral import Mixtral, MixtralConfig

__all__ = ["Mixtral", "MixtralConfig"]
