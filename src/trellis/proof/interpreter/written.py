"""Constants that a compiler rounded, as they were written.

Where a program multiplies by an array that it holds itself, such as a weight that a function closes over, a TPU's
compiler rounds that array to bfloat16 once and for all, since products round it anyway. All other floats are held
unrounded, so a right program would be as far off as that rounding. A program can therefore be run with the constants of
the program before a compiler has seen it, wherever one of these rounds to what the compiled one holds.
"""

import itertools
import math

import numpy as np

from trellis.inspect.hlo import parse_program
from trellis.proof.interpreter.elementwise import constant
from trellis.proof.interpreter.layouts import parse_type
from trellis.proof.interpreter.values import FLOATS

_WIDE, _NARROW = "f32", ("bf16", "f16")
# Of more dimensions only their order as written is looked for.
_MOST_TURNED = 4


class Written:
    """The float32 constants of a program before a compiler has seen it, by their numbers of elements.

    Args:
        text: the program, printed with large constants.
    """

    def __init__(self, text: str):
        self.used = False  # whether one stood in for a rounded one
        self._by_size: dict[int, list[np.ndarray]] = {}
        for instruction in parse_program(text).by_name.values():
            if instruction.op == "constant" and instruction.type.startswith(f"{_WIDE}["):
                kind = parse_type(instruction.type)
                if (size := math.prod(kind.shape)) > 1:
                    value = constant(instruction.literal, kind, np.dtype(np.float32))
                    self._by_size.setdefault(size, []).append(value)

    def instead_of(self, value: np.ndarray, dtype: str) -> np.ndarray:
        """The constant that rounds to this narrow one, in any order of its dimensions; this one if there is none."""
        for own in self._by_size.get(value.size, ()) if dtype in _NARROW else ():
            orders = itertools.permutations(range(own.ndim)) if own.ndim <= _MOST_TURNED else [range(own.ndim)]
            for turned in (own.transpose(order).reshape(value.shape) for order in orders):
                if np.array_equal(turned.astype(FLOATS[dtype]).astype(value.dtype), value):
                    self.used = True
                    return turned.astype(value.dtype)
        return value
