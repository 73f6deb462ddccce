"""Operations along a dimension or over windows of it: sums of windows, what a pooling gives back, scans."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter import elementwise
from trellis.proof.interpreter.products import Window
from trellis.proof.interpreter.reducing import Combiner, written
from trellis.proof.interpreter.values import Value, each

Arrays = list[np.ndarray]


def _reduce_window(instruction: Instruction, machine) -> Callable:
    operands = machine.operand_types(instruction)
    count = len(operands) // 2
    shape = operands[0].shape
    window = Window(instruction.attribute("window") or "", len(shape))
    combine = machine.combiner(instruction.called()["to_apply"][0])
    kind = machine.type(instruction)
    result = kind[0].shape if isinstance(kind, tuple) else kind.shape

    def run(values, team):
        arrays, starts = list(values[:count]), values[count:]
        for dim, steps in enumerate(result):
            if window.size[dim] > 1 or steps != shape[dim]:
                arrays = _slid(arrays, starts, dim, window, steps, combine)
        return tuple(arrays) if isinstance(kind, tuple) else arrays[0]

    return run


def _slid(
    arrays: Arrays, starts: Sequence[np.ndarray], dim: int, window: Window, steps: int, combine: Combiner
) -> Arrays:
    """Windows along one dimension, combined; sums of floats are made in float64.

    Windows of 1, 2, 4, ... elements are made of two halves each, and the window of those that its size is a sum of. So
    a window over a whole dimension, which is how a cumulative sum is written, takes no more memory than a small one.
    """
    dtypes, spread = [x.dtype for x in arrays], window.spread[dim]
    some = [_widened(_with_padding(x, start, dim, window), combine) for x, start in zip(arrays, starts)]
    found = [start.reshape(len(start), *[1] * (x.ndim - 1)) for x, start in zip(arrays, starts)]
    done, reach = 0, (steps - 1) * window.stride[dim] + 1
    for bit in range(window.size[dim].bit_length()):
        if bit:
            half = spread << (bit - 1)
            some = _both([_along(x, dim, 0, -half) for x in some], [_along(x, dim, half, None) for x in some], combine)
        if window.size[dim] >> bit & 1:
            at = slice(done, done + reach, window.stride[dim])
            found = _both(found, [x[(slice(None),) * (1 + dim) + (at,)] for x in some], combine)
            done += spread << bit
    return [x.astype(dtype, copy=False) for x, dtype in zip(found, dtypes)]


def _with_padding(x: np.ndarray, start: np.ndarray, dim: int, window: Window) -> np.ndarray:
    """An array with the start before, behind and between its elements along a dimension, or less of it."""
    gap, (low, high) = window.gaps[dim], window.padding[dim]
    shape = list(x.shape)
    shape[0], shape[1 + dim] = max(len(x), len(start)), max((shape[1 + dim] - 1) * gap + 1, 0)
    sides = [max(low, 0), max(high, 0)]
    shape[1 + dim] += sum(sides)
    out = np.empty(shape, x.dtype)
    out[...] = start.reshape(len(start), *[1] * (x.ndim - 1))
    _along(out, dim, sides[0], shape[1 + dim] - sides[1])[(slice(None),) * (1 + dim) + (slice(None, None, gap),)] = x
    return _along(out, dim, max(-low, 0), shape[1 + dim] - max(-high, 0))


def _along(x: np.ndarray, dim: int, first: int, end: int | None) -> np.ndarray:
    return x[(slice(None),) * (1 + dim) + (slice(first, end),)]


def _widened(x: np.ndarray, combine: Combiner) -> np.ndarray:
    return x.astype(np.float64) if combine is np.add and x.dtype.kind == "f" else x


def _both(before: Arrays, after: Arrays, combine: Combiner) -> Arrays:
    found = combine(*before, *after)
    return list(found) if isinstance(found, tuple) else [found]


def _scan(instruction: Instruction, machine) -> Callable:
    """A loop along a dimension: from an array's slices and what is carried, slices of results and what is carried on.

    XLA has it since 2026: JAX 0.11 writes cumulative sums for GPUs with it.
    """
    (dim,), (body,) = machine.integers(instruction, "dimensions"), instruction.called()["to_apply"]
    count = len(instruction.operands) - int(instruction.attribute("num_carries") or 0)
    backwards = instruction.attribute("is_reverse") == "true"
    kind, simple = machine.type(instruction), _one_operation(machine.program.computations[body])

    def run(values: Sequence[Value], team) -> Value:
        arrays, carried = values[:count], values[count:]
        if simple is not None and len(arrays) == len(carried) == 1:
            found = _accumulated(arrays[0], carried[0], dim, simple, backwards=backwards)
        else:
            found = looped(arrays, carried, team)
        return found if isinstance(kind, tuple) else found[0]

    def looped(arrays: Sequence[np.ndarray], carried: Sequence[Value], team) -> tuple:
        slices, length = [], arrays[0].shape[1 + dim]
        for step in reversed(range(length)) if backwards else range(length):
            found = machine.run(body, [*(x.take(step, 1 + dim) for x in arrays), *carried], team)
            found = found if isinstance(found, tuple) else (found,)
            parts = len(found) - len(carried)
            slices.append(found[:parts])
            carried = found[parts:]
        columns = zip(*(slices[::-1] if backwards else slices))
        return *(np.stack(np.broadcast_arrays(*column), 1 + dim) for column in columns), *carried

    return run


def _one_operation(body: list[Instruction]) -> np.ufunc | None:
    """What a scan's body does if it combines a slice and the carry by one operation, and gives that twice."""
    made = [i for i in body if i.op != "parameter"]
    if len(body) != 4 or len(made) != 2 or made[0].op not in elementwise.COMMUTATIVE or made[1].op != "tuple":
        return None
    function: Any = elementwise.BINARY[made[0].op]
    return function if set(made[1].operands) == {made[0].name} else None


def _accumulated(x: np.ndarray, start: np.ndarray, dim: int, combine: np.ufunc, *, backwards: bool) -> tuple:
    """Elements along a dimension, each combined with all before it and a start, and the last of these."""
    axis = 1 + dim
    turned = np.flip(x, axis) if backwards else x
    found = combine.accumulate(_widened(turned, combine), axis)
    found = combine(found, np.expand_dims(start, axis)).astype(x.dtype, copy=False)
    last = found.take(-1, axis) if found.shape[axis] else start
    return np.flip(found, axis) if backwards else found, last


def _select_and_scatter(instruction: Instruction, machine) -> Callable:
    """The gradient of a pooling: each window's number is added where the element is that the window chose."""
    x, source, _ = machine.operand_types(instruction)
    window = Window(instruction.attribute("window") or "", len(x.shape))
    chosen, combine = (machine.combiner((instruction.attribute(n) or "").lstrip("%")) for n in ("select", "scatter"))

    def one(x: np.ndarray, news: np.ndarray, start: np.ndarray) -> np.ndarray:
        best, number = np.zeros_like(news), np.full(news.shape, -1)
        flat = x.reshape(-1)
        for places, inside in _met(x.shape, news.shape, window):
            candidate = flat[places]
            stays = (number >= 0) & chosen(best[None], candidate[None])[0]
            taken = inside & ~stays
            best, number = np.where(taken, candidate, best), np.where(taken, places, number)
        out = [np.full(flat.shape, start, x.dtype)]
        written(out, number[number >= 0], [news[number >= 0]], combine)
        return out[0].reshape(x.shape)

    return lambda values, team: each(one, values, team)


def _met(shape: Sequence[int], result: Sequence[int], window: Window) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each place in a window, in order: which element each window has there, by number, and whether it has one."""
    for taps in itertools.product(*map(range, window.size)):
        places, inside = np.zeros(result, np.int64), np.ones(result, bool)
        for dim, tap in enumerate(taps):
            at = np.arange(result[dim]) * window.stride[dim] + tap - window.padding[dim][0]
            at = at.reshape(-1, *[1] * (len(result) - 1 - dim))
            inside = inside & (at >= 0) & (at < shape[dim])
            places = places * shape[dim] + np.clip(at, 0, shape[dim] - 1)
        yield places, inside


OPERATIONS: dict[str, Callable] = {
    "reduce-window": _reduce_window,
    "scan": _scan,
    "select-and-scatter": _select_and_scatter,
}
