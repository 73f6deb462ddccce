"""GPT-J."""

from trellis.models.gptj.gptj import GPTJ, Block, GPTJConfig

__all__ = ["GPTJ", "Block", "GPTJConfig"]
