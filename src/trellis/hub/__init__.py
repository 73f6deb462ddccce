"""Imports and exports Hugging Face folders. Each family describes its own in `models/FAMILY/hub.py`."""

from trellis.hub.family import Family
from trellis.hub.folder import Folder, copy_tokenizer, read_json, write_folder, write_tokenizer
from trellis.hub.keys import Key

__all__ = ["Family", "Folder", "Key", "copy_tokenizer", "read_json", "write_folder", "write_tokenizer"]
