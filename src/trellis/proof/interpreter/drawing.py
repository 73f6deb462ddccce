"""Random bits of XLA's generator, halves of what TPUs keep in two, and the largest entries as a TPU finds most of them.

On CPUs and GPUs the generator is Philox. A TPU has its own, which the program does not show: Philox stands in for it.
In the place of most of the largest entries stand all of them.
"""

import functools
import math
import re
from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.moving import falling
from trellis.proof.interpreter.values import NotInterpreted, Value, each


def _bits(instruction: Instruction, machine) -> Callable:
    """A generator's bits. What its state is afterwards depends on the chip: nothing, which no program may read."""
    kind, algorithm = machine.type(instruction), instruction.attribute("algorithm")
    (state,) = machine.operand_types(instruction)
    if algorithm not in ("rng_default", "rng_philox") or state.shape != (2,):
        raise NotInterpreted(f"{instruction.name}, {algorithm} from a state {state}")
    made = kind[1] if isinstance(kind, tuple) else kind
    dtype = machine.held(made.dtype)
    machine.opaque.add(instruction.op)

    def run(values, team) -> Value:
        found = each(lambda state: philox(state, math.prod(made.shape), dtype).reshape(made.shape), values, team)
        return (None, found) if isinstance(kind, tuple) else found

    return run


def philox(state: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
    """Ten rounds of Philox-4x32 (Salmon et al., 2011) of counters from a state on, as XLA has them.

    Args:
        state: the key, which is also the counter's upper half, and the counter's lower half, `u64[2]`.
        count: how many numbers.
        dtype: unsigned, of theirs: those of few bits are the lower ones of a word, those of many are of two.
    """
    words = count * max(dtype.itemsize // 4, 1)
    low32, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    lower = state[1] + np.arange(-(-words // 4), dtype=np.uint64)
    upper = state[0] + (lower < state[1])
    x = [lower & low32, lower >> half, upper & low32, upper >> half]
    keys = [state[0] & low32, state[0] >> half]
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(second >> half) ^ x[1] ^ keys[0], second & low32, (first >> half) ^ x[3] ^ keys[1], first & low32]
        keys = [(key + np.uint64(by)) & low32 for key, by in zip(keys, (0x9E3779B9, 0xBB67AE85))]
    found = np.stack(x, -1).reshape(-1)[:words]
    if dtype.itemsize == 8:
        found = found[::2] | found[1::2] << half
    return found.astype(dtype)


def _kind(dtype: np.dtype) -> str:
    """What halves make: complex numbers, of real and imaginary parts, or words of 64 bits, of lower and upper ones."""
    if dtype.kind == "f":
        raise NotInterpreted("floats of 64 bits, which TPUs compute as a rounded number and what is left of it")
    return dtype.kind


def _combined(instruction: Instruction, machine) -> Callable:
    """What TPUs keep as two halves."""
    dtype = machine.dtype(instruction)
    if _kind(dtype) == "c":
        return lambda values, team: (values[0] + 1j * values[1]).astype(dtype)
    wide = lambda half: half.astype(np.uint32).astype(np.uint64)
    return lambda values, team: (wide(values[0]) | wide(values[1]) << np.uint64(32)).astype(dtype)


def _half(instruction: Instruction, machine, by: int) -> Callable:
    dtype, (whole,) = machine.dtype(instruction), machine.operand_types(instruction)
    if _kind(machine.held(whole.dtype)) == "c":
        return lambda values, team: (values[0].imag if by else values[0].real).astype(dtype)
    return lambda values, team: (values[0].astype(np.uint64) >> np.uint64(by)).astype(np.uint32).astype(dtype)


def _partial(instruction: Instruction, machine) -> Callable:
    """The entries that come first in an order, of whole rows, and what comes with them."""
    settings = re.search(r'"reduction_dim": (\d+)', instruction.attributes)
    compare = machine.program.root(instruction.called()["called_computations"][0])
    orders = {"GT": falling, "LT": functools.partial(np.argsort, axis=-1, kind="stable")}
    order = orders.get(compare.attribute("direction") or "") if compare is not None else None
    if settings is None or order is None:
        raise NotInterpreted(f"{instruction.name}, a selection in an order that is not known")
    axis, count = int(settings[1]) + 1, machine.type(instruction)[0].shape[int(settings[1])]

    def run(values, team) -> Value:
        first = np.moveaxis(order(np.moveaxis(values[0], axis, -1)), -1, axis).take(range(count), axis=axis)
        return tuple(np.take_along_axis(np.broadcast_to(v, values[0].shape), first, axis) for v in values[:2])

    return run


OPERATIONS: dict[str, Callable] = {"rng-bit-generator": _bits}
TARGETS: dict[str, Callable] = {
    "X64Combine": _combined,
    "X64SplitLow": functools.partial(_half, by=0),
    "X64SplitHigh": functools.partial(_half, by=32),
}
KERNELS: dict[str, Callable] = {"PartialReduce": lambda _, *call: _partial(*call)}
