"""Small corpora and stores for the tests, and a second reader of the store written from docs/data.md alone."""

import json
import pathlib

import numpy as np

from trellis.data import FileSource, Store, find_files, tokenize

END = 256


def write_jsonl(path: pathlib.Path, texts: list[str]) -> pathlib.Path:
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def make_store(folder: pathlib.Path, texts: list[str], *, name: str = "store", **options) -> Store:
    """A store of bytes with small chunks."""
    folder.mkdir(parents=True, exist_ok=True)
    source = FileSource(files=find_files(write_jsonl(folder / f"{name}.jsonl", texts)))
    options = {"use_bytes": True, "workers": 0, "chunk_tokens": 64, "chunk_offsets": 8} | options
    return tokenize(source, folder / name, **options)


def random_texts(rng: np.random.Generator, count: int, longest: int = 60) -> list[str]:
    """Texts of random length, each different from the others, with non-ASCII letters among them."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz éßж☃"))
    return [f"{i}:" + "".join(rng.choice(letters, rng.integers(0, longest))) for i in range(count)]


def stream(texts: list[str]) -> np.ndarray:
    """What a store of bytes holds for these texts."""
    return np.array([t for text in texts for t in (*text.encode(), END)], np.int64)


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class SecondReader:
    """Reads a store with json and numpy, following docs/data.md."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.about = json.loads((path / "zarr.json").read_text())["attributes"]["trellis"]
        assert self.about["format"] == "trellis-tokens" and self.about["version"] == 1 and self.about["complete"]
        self.tokens = self._array("tokens")
        self.offsets = self._array("offsets")

    def _array(self, name):
        meta = json.loads((self.path / name / "zarr.json").read_text())
        length, chunk = meta["shape"][0], meta["chunk_grid"]["configuration"]["chunk_shape"][0]
        dtype = np.dtype(meta["data_type"]).newbyteorder("<")
        parts = []
        for i in range(-(-length // chunk)):
            data = (self.path / name / "c" / str(i)).read_bytes()
            assert len(data) == chunk * dtype.itemsize + 4
            parts.append(np.frombuffer(data[:-4], dtype))
        return np.concatenate(parts)[:length].astype(np.int64)

    def documents(self):
        return [self.tokens[a:b].tolist() for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]


MASK = 2**64 - 1


def second_mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def second_key(*words: int) -> int:
    key = 0
    for word in words:
        key = second_mix64(key ^ (word & MASK))
    return key


def second_permutation(n: int, key: int, x: int) -> int:
    """The permutation of docs/data.md in plain integers."""
    width = next(w for w in range(max(1, int(n**0.5) - 2), n + 2) if w * w >= n)
    height = -(-n // width)
    while True:
        left, right = divmod(x, width)
        for i in range(12):
            round_key = second_key(key, i)
            if i % 2 == 0:
                left = (left + second_mix64(right ^ round_key) % height) % height
            else:
                right = (right + second_mix64(left ^ round_key) % width) % width
        x = left * width + right
        if x < n:
            return x
