"""Small integers of a compiled program, computed for every device: offsets, and what they are made of."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trellis.inspect.hlo import Instruction

# A table has no more entries than this.
LARGEST = 4096
_TYPES = {"pred": bool, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
          "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}  # fmt: skip


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A quotient, rounded towards zero; -1 for a division by zero."""
    safe = np.where(y == 0, 1, y)
    return np.where(y == 0, -1, np.sign(x) * np.sign(safe) * (np.abs(x) // np.abs(safe)))


_ELEMENTWISE: Mapping[str, Callable] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "divide": _divided,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "not": lambda x: ~x,
    "or": np.bitwise_or,
    "remainder": lambda x, y: x - y * _divided(x, y),
    "select": np.where,
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "subtract": np.subtract,
    "xor": np.bitwise_xor,
}
_COMPARED = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
             "GE": np.greater_equal}  # fmt: skip
_ALIKE = ("bitcast", "convert", "copy", "reshape")


def constant_of(instruction: Instruction) -> np.ndarray | None:
    """A constant's integers, `1 dim ...`; None for floats, and for what is large or not written out."""
    array, *others = instruction.results
    if others or array.dtype not in _TYPES or int(np.prod(array.shape)) > LARGEST:
        return None
    words = re.findall(r"-?\d+|true|false", re.sub(r"/\*.*?\*/", "", instruction.literal))
    values = [word == "true" if word in ("true", "false") else int(word) for word in words]
    if len(values) != int(np.prod(array.shape)):
        return None
    return np.array(values, _TYPES[array.dtype]).reshape(1, *array.shape)


def left_out(constant: Instruction) -> bool:
    """Whether a constant's few integers are not written out, as in `as_text()` where there are more than ten."""
    (array, *_) = constant.results
    few = array.dtype in _TYPES and int(np.prod(array.shape)) <= LARGEST
    return few and "..." in constant.literal


def numbers_of(instruction: Instruction, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """What an operation makes of integers, `device dim ...` each; None for one that is not known."""
    array, *others = instruction.results
    if others or array.dtype not in _TYPES:
        return None
    found = _computed(instruction, operands, array.shape)
    return None if found is None else found.astype(_TYPES[array.dtype]).reshape(len(found), *array.shape)


def _computed(instruction: Instruction, operands: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
    op = instruction.op
    if op in _ALIKE:
        return operands[0] if operands[0][0].size == int(np.prod(shape)) else None
    if op in _ELEMENTWISE:
        return _ELEMENTWISE[op](*operands)
    if op == "compare":
        return _COMPARED[instruction.attribute("direction") or "EQ"](*operands)
    if op == "broadcast" and operands[0].ndim == 1 and int(np.prod(shape)) <= LARGEST:
        return np.broadcast_to(operands[0].reshape(-1, *[1] * len(shape)), (len(operands[0]), *shape))
    if op == "dynamic-slice":
        return _sliced(operands[0], operands[1:], shape)
    return None


def _sliced(table: np.ndarray, begins: Sequence[np.ndarray], sizes: tuple[int, ...]) -> np.ndarray:
    """Each device's part of a table, from where it begins there; moved back if it would reach past the end."""
    rows = max(len(table), *map(len, begins))
    parts = []
    for row in range(rows):
        own = table[row % len(table)]
        firsts = [int(begin[row % len(begin)]) for begin in begins]
        cuts = (min(max(f, 0), full - size) for f, full, size in zip(firsts, own.shape, sizes))
        parts.append(own[tuple(slice(f, f + size) for f, size in zip(cuts, sizes))])
    return np.stack(parts)
