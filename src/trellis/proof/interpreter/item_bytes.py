"""Arrays as the bytes of their elements, which a compiler copies in parts that begin anywhere.

Floats are not held in as many bytes as the program gives them. So a byte is held as the number that it is part of and
its place in that number. Bytes can be moved and put together again, and whatever would compute with them fails.
"""

import math

import numpy as np

from trellis.inspect.hlo import item_bits
from trellis.proof.interpreter.layouts import ArrayType, in_memory
from trellis.proof.interpreter.values import NotInterpreted

BYTES = ("s8", "u8")


def taken_apart(x: np.ndarray, before: ArrayType, after: ArrayType) -> np.ndarray:
    """An array as its bytes.

    Args:
        x: `device dim ...`, in the type `before`.
        before: its type.
        after: the type of the bytes.
    """
    width = item_bits(before.dtype) // 8
    element, byte = in_memory(before), in_memory(after)
    if len(element) * width != len(byte):
        raise NotInterpreted(f"the bytes of {before}, as {after}")
    element, place = np.repeat(element, width), np.tile(np.arange(width), len(element))
    there = (element >= 0) & (byte >= 0)
    out = np.zeros((len(x), math.prod(after.shape)), [("number", x.dtype), ("place", np.uint8)])
    out["number"][:, byte[there]] = np.asarray(x).reshape(len(x), -1)[:, element[there]]
    out["place"][:, byte[there]] = place[there]
    return out.reshape(len(x), *after.shape)


def put_together(x: np.ndarray, before: ArrayType, after: ArrayType) -> np.ndarray:
    """An array from its bytes.

    Args:
        x: `device dim ...`, as `taken_apart` makes them, in the type `before`.
        before: the type of the bytes.
        after: the array's type.

    Raises:
        NotInterpreted: bytes of several numbers would be one number, or they were computed and not taken apart.
    """
    width = item_bits(after.dtype) // 8
    byte, element = in_memory(before), in_memory(after)
    if len(element) * width != len(byte) or x.dtype.names is None:
        raise NotInterpreted(f"bytes of {before}, as {after}")
    byte = byte.reshape(-1, width)
    there = (element >= 0) & (byte >= 0).all(1)
    parts = x.reshape(len(x), -1)[:, byte[there]]
    number = parts["number"][..., 0]
    one = (parts["number"] == number[..., None]) | np.isnan(parts["number"])
    if not (one.all() and (parts["place"] == np.arange(width)).all()):
        raise NotInterpreted(f"bytes of several numbers as one, in {after}")
    out = np.zeros((len(x), math.prod(after.shape)), number.dtype)
    out[:, element[there]] = number
    return out.reshape(len(x), *after.shape)
