"""Arrays as the bytes of their elements, which a compiler copies in parts that begin anywhere.

Floats are not held in as many bytes as the program gives them. So a byte is held as the number that it is part of and
its place in that number. Bytes can be moved and put together again, and whatever would compute with them fails.

The other way round, several narrow floats are one word for a compiler that adds them up over devices, or gathers them
by a sum to which all devices but one give zeros. Such a word is held as these floats.
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


def as_words(x: np.ndarray, before: ArrayType, after: ArrayType) -> np.ndarray:
    """Narrow floats as words of several.

    Args:
        x: `device dim ...`, in the type `before`.
        before: its type.
        after: the type of the words.
    """
    each = item_bits(after.dtype) // item_bits(before.dtype)
    element, word = in_memory(before), in_memory(after)
    if len(element) != len(word) * each:
        raise NotInterpreted(f"words of {before}, as {after}")
    element = element.reshape(-1, each)[word >= 0]
    parts = np.where(element >= 0, np.asarray(x).reshape(len(x), -1)[:, element], 0)
    out = np.zeros((len(x), math.prod(after.shape)), [("floats", x.dtype, (each,))])
    out["floats"][:, word[word >= 0]] = parts
    return out.reshape(len(x), *after.shape)


def of_words(x: np.ndarray, before: ArrayType, after: ArrayType) -> np.ndarray:
    """The narrow floats of words, as `as_words` makes them.

    Raises:
        NotInterpreted: the words were computed, and are not made of floats.
    """
    each = item_bits(before.dtype) // item_bits(after.dtype)
    word, element = in_memory(before), in_memory(after)
    if x.dtype.names != ("floats",) or len(element) != len(word) * each:
        raise NotInterpreted(f"the floats in words of {before}, as {after}")
    parts = np.where(word[:, None] >= 0, x.reshape(len(x), -1)["floats"][:, word], 0).reshape(len(x), -1)
    out = np.zeros((len(x), math.prod(after.shape)), parts.dtype)
    out[:, element[element >= 0]] = parts[:, element >= 0]
    return out.reshape(len(x), *after.shape)


def sum_of_words(rows: np.ndarray, *, apart: bool) -> np.ndarray:
    """The sum over members, `"member dim ..."`, of the floats in words.

    Args:
        rows: them.
        apart: whether bits are added as whole numbers, which is gathering floats if all members but one have zeros.

    Raises:
        NotInterpreted: it is not.
    """
    if apart and ((rows["floats"] != 0).sum(0) > 1).any():
        raise NotInterpreted("a sum of the bits of floats")
    out = rows[:1].copy()
    out["floats"] = rows["floats"].sum(0)
    return out
