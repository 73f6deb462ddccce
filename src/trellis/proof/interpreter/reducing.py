"""Operations that combine elements by a computation of their own: reductions, scatters, maps."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.moving import Lookup
from trellis.proof.interpreter.values import each

Combiner = Callable[..., Any]  # an array, or a tuple of several


def later(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Combines by taking what comes later, as a scatter that writes over what was there."""
    return after


def summed(x: np.ndarray, axes: tuple[int, ...] | int, combine: np.ufunc) -> np.ndarray:
    """One array's elements along axes, combined; sums of floats are made in float64, those of integers wrap around."""
    wide = np.float64 if combine is np.add and x.dtype.kind == "f" else x.dtype
    return combine.reduce(x, axes, dtype=wide).astype(x.dtype, copy=False)


def _reduce(instruction: Instruction, machine) -> Callable:
    dims = machine.integers(instruction, "dimensions")
    combine = machine.combiner(instruction.called()["to_apply"][0])
    several = isinstance(machine.type(instruction), tuple)

    def run(values, team):
        count = len(values) // 2
        found = folded(values[:count], values[count:], dims, combine)
        return found if several else found[0]

    return run


def folded(arrays, starts, dims, combine: Combiner) -> tuple[np.ndarray, ...]:
    """Arrays' elements along dimensions, combined with each other and with a start for each.

    Args:
        arrays: `device dim ...` each.
        starts: `device` each.
        dims: which dimensions are combined, the first behind the devices being 0.
        combine: of the accumulated values and of the next ones.
    """
    rank = arrays[0].ndim - 1 - len(dims)
    starts = [s.reshape(len(s), *[1] * rank) for s in starts]
    axes = tuple(1 + d for d in dims)
    if len(arrays) == 1 and isinstance(combine, np.ufunc):
        if 0 in (arrays[0].shape[a] for a in axes):
            kept = [n for a, n in enumerate(arrays[0].shape) if a not in axes]
            return (np.broadcast_to(starts[0], (len(starts[0]), *kept[1:])),)
        return (combine(starts[0], summed(arrays[0], axes, combine)).astype(arrays[0].dtype, copy=False),)
    kept = [a for a in range(arrays[0].ndim) if a not in axes]
    devices = max(len(x) for x in (*arrays, *starts))
    rows = [x.transpose(*kept, *axes) for x in arrays]
    rows = [x.reshape(*x.shape[: len(kept)], -1) for x in rows]
    rows = [np.broadcast_to(x, (devices, *x.shape[1:])) for x in rows]
    while (length := rows[0].shape[-1]) > 1:
        half = length // 2
        pairs = combine(*(x[..., :half] for x in rows), *(x[..., half : 2 * half] for x in rows))
        pairs = pairs if isinstance(pairs, tuple) else (pairs,)
        rows = [np.concatenate([p, x[..., 2 * half :]], -1) for p, x in zip(pairs, rows)]
    if not length:
        return tuple(np.broadcast_to(s, x.shape[:-1]) for s, x in zip(starts, rows))
    found = combine(*starts, *(x[..., 0] for x in rows))
    return found if isinstance(found, tuple) else (found,)


def _scatter(instruction: Instruction, machine) -> Callable:
    ints = lambda name: machine.integers(instruction, name)
    operands = machine.operand_types(instruction)
    count = (len(operands) - 1) // 2
    batch = ints("input_batching_dims"), ints("scatter_indices_batching_dims")
    window, gone = ints("update_window_dims"), (*ints("inserted_window_dims"), *batch[0])
    updates = operands[count + 1].shape
    shown = iter([updates[d] for d in window])
    sizes = [1 if d in gone else next(shown) for d in range(len(operands[0].shape))]
    vector = int(instruction.attribute("index_vector_dim") or 0)
    lookup = Lookup(operands[0].shape, sizes, gone, batch, ints("scatter_dims_to_operand_dims"), vector)
    order = [*(d for d in range(len(updates)) if d not in window), *window]
    combine = machine.combiner(instruction.called()["to_apply"][0])
    several = isinstance(machine.type(instruction), tuple)

    def one(*arrays):
        """All results in one array, one after the other."""
        targets, index, news = arrays[:count], arrays[count], arrays[count + 1 :]
        numbers, inside = lookup.places(index, clip=False)
        numbers = np.broadcast_to(numbers, [updates[d] for d in order])
        numbers = numbers[inside].reshape(-1)
        out = [np.array(x).reshape(-1) for x in targets]
        news = [x.transpose(order)[inside].reshape(-1) for x in news]
        written(out, numbers, news, combine)
        return np.stack([x.reshape(operands[0].shape) for x in out])

    def run(values, team):
        found = each(one, values, team)
        return tuple(found[:, i] for i in range(count)) if several else found[:, 0]

    return run


def written(out: list[np.ndarray], numbers: np.ndarray, news: list[np.ndarray], combine: Combiner) -> None:
    """Combines elements in place with new ones, one after the other if several meet one."""
    if len(out) == 1 and isinstance(combine, np.ufunc):
        combine.at(out[0], numbers, news[0])
        return
    if combine is later:
        out[0][numbers] = news[0]  # the last of those that meet one element
        return
    # The first that meets each element, then the second, ...: in one round no element is met twice.
    order = np.argsort(numbers, kind="stable")
    first = np.searchsorted(numbers[order], numbers[order], side="left")
    turn = np.empty(len(numbers), np.int64)
    turn[order] = np.arange(len(numbers)) - first
    for step in range(int(turn.max(initial=-1)) + 1):
        mine = turn == step
        at = numbers[mine]
        found = combine(*(x[at][None] for x in out), *(x[mine][None] for x in news))
        for x, new in zip(out, found if isinstance(found, tuple) else (found,)):
            x[at] = new[0]


def _map(instruction: Instruction, machine) -> Callable:
    combine = machine.combiner(instruction.called()["to_apply"][0])
    return lambda values, team: combine(*values)


OPERATIONS: dict[str, Callable] = {
    "map": _map,
    "reduce": _reduce,
    "scatter": _scatter,
}
