"""Runs that are ready to go. Each is a function; its docstring has the command."""

from trellis.models.gpt2.recipes import gpt2_small
from trellis.models.llama.recipes import (
    llama32_1b_v5e_16,
    llama_1b,
    llama_2b,
    llama_8b,
    llama_8b_v5e_256,
    llama_8b_v5p_64,
    llama_8b_v6e_256,
    llama_70b,
    llama_70b_v5p_512,
    llama_84m,
    llama_270m,
    llama_540m,
)
from trellis.models.mixtral.recipes import mixtral_8x7b, mixtral_8x7b_v5p_64
from trellis.recipes.load import RECIPES, load_run
from trellis.recipes.starter import starter, tiny

__all__ = [
    "RECIPES",
    "gpt2_small",
    "llama32_1b_v5e_16",
    "llama_1b",
    "llama_270m",
    "llama_2b",
    "llama_540m",
    "llama_70b",
    "llama_70b_v5p_512",
    "llama_84m",
    "llama_8b",
    "llama_8b_v5e_256",
    "llama_8b_v5p_64",
    "llama_8b_v6e_256",
    "load_run",
    "mixtral_8x7b",
    "mixtral_8x7b_v5p_64",
    "starter",
    "tiny",
]
