"""Text in, exactly reproducible batches out: source -> tokenizer -> store -> order -> loader."""

from .batches import Batches
from .embedded import embedded_stores
from .evaluation import count_bytes
from .loader import Loader
from .mixture import Mixture
from .order import Shuffle
from .packing import Batch
from .sources import FileSource, embedded_corpus, find_files
from .store import Store, TokenStore, check_tokenizer, check_vocabulary
from .tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from .tokenizing import tokenize

__all__ = [
    "Batch",
    "Batches",
    "FileSource",
    "Loader",
    "Mixture",
    "Shuffle",
    "Store",
    "TokenStore",
    "Tokenizer",
    "byte_tokenizer",
    "check_tokenizer",
    "check_vocabulary",
    "count_bytes",
    "embedded_corpus",
    "embedded_stores",
    "find_files",
    "load_tokenizer",
    "tokenize",
    "train_bpe",
]
