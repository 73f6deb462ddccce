"""Hugging Face folders in and out. What a family looks like there is said in its own folder, `models/FAMILY/hub.py`."""

from trellis.hub.family import Family
from trellis.hub.folder import Folder, copy_tokenizer, write_folder, write_tokenizer
from trellis.hub.keys import Key

__all__ = ["Family", "Folder", "Key", "copy_tokenizer", "write_folder", "write_tokenizer"]
