"""Hugging Face folders in and out."""

from .families import FAMILIES, from_config_json, to_config_json
from .folder import Folder, copy_tokenizer, write_folder, write_tokenizer

__all__ = [
    "FAMILIES",
    "Folder",
    "copy_tokenizer",
    "from_config_json",
    "to_config_json",
    "write_folder",
    "write_tokenizer",
]
