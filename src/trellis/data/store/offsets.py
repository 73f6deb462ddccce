"""Token stores in other projects' formats that hold the offsets of their documents."""

import numpy as np

from trellis.data.store.token_store import TokenStore


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
