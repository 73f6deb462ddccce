"""Token stores in the formats of other projects: opened by what lies at a path, and written."""

import os

import numpy as np

from trellis.data.storage import is_remote, open_folder
from trellis.data.store import TokenStore
from trellis.errors import UserError


class OffsetStore(TokenStore):
    """A store whose documents' offsets are in memory: 8 bytes a document.

    The id a model reads before a document is the one that ends documents, if all of the first hundred end in the same
    one, else 0.
    """

    _offsets: np.ndarray

    def _settle(self) -> None:
        self.num_documents = len(self._offsets) - 1
        some = self._offsets[1 : 1 + 100]
        ends = {int(self.tokens(int(at) - 1, int(at))[0]) for at in some if at > 0}
        self.start_token = ends.pop() if len(ends) == 1 else 0

    def offsets(self, start: int, stop: int) -> np.ndarray:
        return np.asarray(self._offsets[start:stop], np.int64)

    def shifted(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        stream = np.zeros((len(begins), length + 1), np.int32)
        starts = np.zeros((len(begins), length), bool)
        for i, begin in enumerate(map(int, begins)):
            stop = min(begin + length, self.num_tokens)
            first = max(begin - 1, 0)
            stream[i, first - begin + 1 : stop - begin + 1] = self.tokens(first, stop)
            low, high = np.searchsorted(self._offsets, [begin, stop])
            starts[i, np.asarray(self._offsets[low:high], np.int64) - begin] = True
        inputs = np.where(starts, np.int32(self.start_token), stream[:, :-1])
        return inputs, stream[:, 1:], starts


def open_foreign(url: str) -> TokenStore | None:
    """The store at ``url`` if it has another project's format, else None."""
    if url.endswith(".bin"):
        from trellis.data.binary import BinStore, MegatronStore

        if not is_remote(url) and os.path.exists(url[:-4] + ".idx"):
            return MegatronStore(url)
        return BinStore(url)
    folder = open_folder(url)
    if folder.exists("zarr.json") and b'"trellis"' in folder.read("zarr.json"):
        return None
    if folder.exists("encoded_tokens/.zarray") or folder.exists("encoded_tokens/zarr.json"):
        from trellis.data.seqax import FlatTokens

        return FlatTokens(url)
    if folder.exists("input_ids/offsets/zarr.json"):
        from trellis.data.levanter import LevanterStore

        return LevanterStore(url)
    for split in ("train", "validation"):
        if folder.exists(f"{split}/zarr.json") or folder.exists(f"{split}/.zgroup"):
            raise UserError(
                "A store is one split of a dataset.",
                seen=f"a folder with a {split} in it",
                where=url,
                fix=f"give {url.rstrip('/')}/{split}",
            )
    return None


def convert(store: TokenStore, out: str, *, to: str, split: str = "train") -> None:
    """Write a store in another project's format.

    Args:
        out: the folder ("seqax", "levanter"), or the .bin file ("nanogpt", "megatron"; the latter writes the .idx
            beside it).
        to: one of these.
        split: seqax only, the group inside ``out``.
    """
    if to == "seqax":
        from trellis.data.seqax import write_flat_tokens

        write_flat_tokens(store, out, split=split)
    elif to in ("nanogpt", "megatron"):
        from trellis.data.binary import write_bin

        write_bin(store, out, index=to == "megatron")
    elif to == "levanter":
        from trellis.data.levanter import write_levanter

        write_levanter(store, out)
    else:
        raise UserError(
            "A store is converted to a format that Trellis writes.",
            seen=to,
            where="--to",
            fix="use seqax, nanogpt, megatron or levanter",
        )
