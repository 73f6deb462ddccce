"""OLMo 2."""

from trellis.models.olmo2.olmo2 import Olmo2Config

__all__ = ["Olmo2Config"]
