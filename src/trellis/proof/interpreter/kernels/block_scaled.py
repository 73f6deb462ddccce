"""cuDNN's products of numbers in blocks, each with its scale, as XLA calls them: `__cudnn$blockScaledDot`."""

from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.values import NotInterpreted, each

# How many numbers have one scale, by its type: MXFP8's and NVFP4's.
_BLOCK = {"f8e8m0fnu": 32, "f8e4m3fn": 16}


def kernel(target: str, instruction: Instruction, machine) -> Callable:
    """The product of `batch rows in` and `batch columns in`, whose scales lie in tiles.

    Raises:
        NotInterpreted: with scales of another type, or something besides.
    """
    kinds, (_, working) = machine.operand_types(instruction), machine.type(instruction)
    if len(kinds) != 4 or kinds[2].dtype not in _BLOCK:
        raise NotInterpreted(f"{target} of {', '.join(kind.dtype for kind in kinds)}")
    block = _BLOCK[kinds[2].dtype]

    def wide(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
        of_each = np.repeat(_in_rows(scales), block, -1)
        return x * of_each[:, : x.shape[1], : x.shape[2]]

    def run(x: np.ndarray, y: np.ndarray, x_scales: np.ndarray, y_scales: np.ndarray) -> tuple[np.ndarray, ...]:
        product = np.matmul(wide(x, x_scales), wide(y, y_scales).swapaxes(1, 2))
        return product, np.zeros(working.shape, machine.held(working.dtype))

    return lambda values, team: each(run, values, team)


def _in_rows(scales: np.ndarray) -> np.ndarray:
    """Scales `batch rows blocks` from tiles of 128 x 4, in which a row of 16 has the blocks of every 32nd row.

    >>> tiles = np.arange(512).reshape(1, 128, 4)
    >>> _in_rows(tiles)[0, [0, 1, 32, 127], 0].tolist()
    [0, 16, 4, 508]
    """
    batch, rows, blocks = scales.shape
    tiles = scales.reshape(batch, rows // 128, blocks // 4, 32, 4, 4)
    return tiles.transpose(0, 1, 4, 3, 2, 5).reshape(batch, rows, blocks)


KERNELS: dict[str, Callable] = {"__cudnn$blockScaledDot": kernel}
