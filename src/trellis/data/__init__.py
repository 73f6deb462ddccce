"""Text in, exactly reproducible batches out: source -> tokenizer -> store -> order -> loader."""

from trellis.data.batch import Batch
from trellis.data.batch_sequence import Batches
from trellis.data.embedded import embedded_stores
from trellis.data.evaluation import count_bytes
from trellis.data.loader import Loader
from trellis.data.mixture import Mixture
from trellis.data.order.order import Shuffle
from trellis.data.store.bin_files import BinStore
from trellis.data.store.opening import open_store
from trellis.data.store.store import Store
from trellis.data.store.token_store import TokenStore, check_tokenizer, check_vocabulary
from trellis.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from trellis.data.tokenizing.sources import FileSource, embedded_corpus, find_files
from trellis.data.tokenizing.tokenize import tokenize

__all__ = [
    "Batch",
    "Batches",
    "BinStore",
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
    "open_store",
    "tokenize",
    "train_bpe",
]
