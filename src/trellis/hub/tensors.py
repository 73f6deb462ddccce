"""The safetensors format, read and written one tensor at a time.

A file consists of the length of a header (8 bytes, little endian), the header (JSON: name to dtype, shape and place of
the data) and the data. The `safetensors` package needs all tensors of a file in memory, where a model may not fit.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from trellis.errors import UserError
from trellis.files import naming

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
# The types in which a model's weights may be stored.
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")
_POINTER = b"version "  # that a file of Git LFS begins with, where what it stands for was not fetched
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class TensorFile:
    """A safetensors file whose tensors are read on demand.

    Args:
        path: the file.

    Raises:
        UserError: it is not one, or is cut off.
    """

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if len(start) == 8 and length <= os.path.getsize(path) else b""
        try:
            header = json.loads(text)
            self.entries = {
                k: (v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in header.items() if k != META
            }
            wrong = _disordered(self.entries)
        except (ValueError, KeyError, AttributeError, TypeError):
            wrong = f"a header of {length} bytes that cannot be read"
        fix = "download or export it again"
        if start == _POINTER:
            wrong, fix = "a pointer of Git LFS to the file", "get the file itself: run `git lfs pull` in its folder"
        if wrong:
            raise UserError("A weight file must be in the safetensors format.", seen=wrong, where=str(path), fix=fix)
        self._begin = 8 + length
        need = self._begin + max((entry[3] for entry in self.entries.values()), default=0)
        if (size := os.path.getsize(path)) != need:
            raise UserError("A weight file must be complete.", seen=f"{size} of {need} bytes", where=str(path), fix=fix)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as a view of the file: only the parts that are read come into memory."""
        dtype, shape, start, stop = self.entries[name]
        if not math.prod(shape):
            return np.zeros(shape, DTYPES[dtype])
        raw = np.memmap(self.path, np.uint8, "r", offset=self._begin + start, shape=(stop - start,))
        return raw.view(DTYPES[dtype]).reshape(shape)


def _disordered(entries: Mapping[str, tuple]) -> str | None:
    """The first tensor that does not follow the one before it, or is not as long as its shape says; None if all are
    in order, as the format has them: without holes, and no byte in two tensors.

    Raises:
        ValueError, TypeError: a number is none.
    """
    end = 0
    for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda entry: entry[1][2:]):
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError
        if dtype in DTYPES:
            size = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        else:  # its width is not known; it is refused when it is read
            size = stop - start
        if start != end or stop != start + size:
            return f"{name} of {size} bytes at {start} to {stop}, after a tensor that ends at {end}"
        end = stop
    return None


class Tensor(NamedTuple):
    """A tensor to be written: `make` is called when its turn comes, and its result is released after that."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


META = "__metadata__"


def write_tensors(path: Path, tensors: Sequence[Tensor]) -> None:
    """Writes one file, holding one tensor at a time.

    Raises:
        UserError: a number is too large for the type that it is written in.
    """
    header: dict = {META: {"format": "pt"}}  # `transformers` asks for this, whoever wrote the tensors
    place = 0
    for t in tensors:
        offsets = [place, place + t.nbytes]
        header[t.name] = {"dtype": _NAMES[np.dtype(t.dtype)], "shape": list(t.shape), "data_offsets": offsets}
        place += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            made = t.make()
            with np.errstate(over="ignore"):
                array = np.asarray(made, dtype=t.dtype)
            assert array.shape == t.shape, (t.name, array.shape, t.shape)
            if t.dtype == np.float16 and (lost := np.isinf(array) & np.isfinite(made)).any():
                path.unlink()
                raise UserError(
                    "Weights must be in the range of the dtype that they are written in.",
                    seen=f"{float(np.abs(made[lost]).max()):.3g} in {t.name}, where float16 ends at 65,504",
                    where=str(path),
                    fix="use --dtype bfloat16 or float32",
                )
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def in_shards(tensors: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """The tensors in order, in groups of at most `limit` bytes (a larger tensor is alone).

    >>> sizes = [3, 3, 5, 1]
    >>> tensors = [Tensor(str(i), (n,), np.dtype(np.uint8), None) for i, n in enumerate(sizes)]
    >>> [[t.name for t in shard] for shard in in_shards(tensors, 6)]
    [['0', '1'], ['2', '3']]
    """
    shards: list[list[Tensor]] = []
    room = 0
    for t in tensors:
        if not shards or t.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(t)
        room -= t.nbytes
    return shards
