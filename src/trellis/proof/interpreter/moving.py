"""Operations that move elements about: broadcasts, slices, lookups, sorting."""

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from trellis.inspect.hlo import Instruction, item_bits
from trellis.proof.interpreter.item_bytes import BYTES, as_words, of_words, put_together, taken_apart
from trellis.proof.interpreter.layouts import ArrayType, bitcast, in_memory
from trellis.proof.interpreter.values import FLOATS, NotInterpreted, each, spread


def _broadcast(instruction: Instruction, machine) -> Callable:
    shape, dims = machine.type(instruction).shape, machine.integers(instruction, "dimensions")
    turned = tuple(1 + i for i in np.argsort(dims, kind="stable"))
    kept = [size if d in dims else 1 for d, size in enumerate(shape)]

    def run(values, team):
        x = values[0].transpose(0, *turned)
        return np.broadcast_to(x.reshape(len(x), *kept), (len(x), *shape))

    return run


def _reshape(instruction: Instruction, machine) -> Callable:
    shape = machine.type(instruction).shape
    return lambda values, team: values[0].reshape(len(values[0]), *shape)


def _bitcast(instruction: Instruction, machine) -> Callable:
    (before,), after = machine.operand_types(instruction), machine.type(instruction)
    view = viewed(before, after, machine, instruction.name)
    return lambda values, team: view(values[0])


def viewed(before: ArrayType, after: ArrayType, machine, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function from an array to what another type sees in its memory; `name` is that of the instruction that asks."""
    held = [machine.held(kind.dtype) for kind in (before, after)]
    if before.dtype == after.dtype or held[0] == held[1]:
        return lambda x: bitcast(x, before, after)
    narrow = [kind.dtype in FLOATS and item_bits(kind.dtype) < 32 for kind in (before, after)]
    if narrow == [True, False] and item_bits(after.dtype) > item_bits(before.dtype) and held[1].kind in "iu":
        return lambda x: as_words(x, before, after)
    if narrow == [False, True] and item_bits(before.dtype) > item_bits(after.dtype) and held[0].kind in "iu":
        return lambda x: of_words(x, before, after)
    if held[0].itemsize == held[1].itemsize and not {before.dtype, after.dtype} & {"bf16", "f16"}:
        return lambda x: np.ascontiguousarray(bitcast(x, before, after)).view(held[1])

    def either(x: np.ndarray) -> np.ndarray:
        if x.dtype.names == ("floats",):
            return of_words(x, before, after)
        if x.dtype.names:  # bytes of floats that are held in fewer bytes are no numbers (`taken_apart`)
            return put_together(x, before, after)
        if machine.unrounded and x.dtype.kind == "f" and held[0].kind == "i":
            return as_words(x, before, after)
        return in_other_items(x, before, after, held[1])

    whole = all(h.itemsize * 8 == item_bits(kind.dtype) for h, kind in zip(held, (before, after), strict=True))
    alike = whole and held[0].itemsize * len(in_memory(before)) == held[1].itemsize * len(in_memory(after))
    unpadded = all((in_memory(kind) >= 0).all() for kind in (before, after))
    if whole and unpadded or alike and all(h.kind in "iu" for h in held):
        return either
    if after.dtype in BYTES:
        return lambda x: taken_apart(x, before, after)
    if before.dtype in BYTES:
        return lambda x: put_together(x, before, after)
    if alike:
        return either
    raise NotInterpreted(f"a bitcast from {before.dtype} to {after.dtype}, in {name}")


def in_other_items(x: np.ndarray, before: ArrayType, after: ArrayType, held: np.dtype) -> np.ndarray:
    """What another type, whose elements are wider or narrower, sees in an array's memory, with zeros for padding.

    Args:
        x: `device dim ...`, each element in as many bytes as the program gives it.
        before: its type.
        after: the other type.
        held: as which elements of that are held.
    """
    source, target = in_memory(before), in_memory(after)
    memory = np.zeros((len(x), len(source)), x.dtype)
    memory[:, source >= 0] = np.asarray(x).reshape(len(x), -1)[:, source[source >= 0]]
    out = np.empty((len(x), math.prod(after.shape)), held)
    out[:, target[target >= 0]] = memory.view(held)[:, target >= 0]
    return out.reshape(len(x), *after.shape)


def _transpose(instruction: Instruction, machine) -> Callable:
    order = (0, *(1 + d for d in machine.integers(instruction, "dimensions")))
    return lambda values, team: values[0].transpose(order)


def _reverse(instruction: Instruction, machine) -> Callable:
    axes = tuple(1 + d for d in machine.integers(instruction, "dimensions"))
    return lambda values, team: np.flip(values[0], axes)


def _concatenate(instruction: Instruction, machine) -> Callable:
    axis = 1 + machine.integers(instruction, "dimensions")[0]

    def run(values, team):
        alike = all(len(v) == 1 for v in values)
        return np.concatenate(values if alike else [spread(v, team) for v in values], axis)

    return run


def _slice(instruction: Instruction, machine) -> Callable:
    cut = sliced(instruction)
    return lambda values, team: values[0][cut]


def sliced(instruction: Instruction) -> tuple[slice, ...]:
    """What a slice takes: all devices, and the limits and strides of its other dimensions."""
    limits = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", instruction.attribute("slice") or "")
    return (slice(None), *(slice(int(a), int(b), int(step or 1)) for a, b, step in limits))


def _pad(instruction: Instruction, machine) -> Callable:
    shape = machine.type(instruction).shape
    sides = [[int(n) for n in side.split("_")] for side in re.split("x", instruction.attribute("padding") or "")]
    sides = [] if not shape else [(low, (gap or [0])[0]) for low, _, *gap in sides]

    def run(values, team):
        x, filler = values
        devices = max(len(x), len(filler))
        out = np.empty((devices, *shape), x.dtype)
        out[...] = filler.reshape(len(filler), *[1] * len(shape))
        source, target = [slice(None)], [slice(None)]
        for (low, gap), size, room in zip(sides, x.shape[1:], shape):
            step = gap + 1
            first = max(0, -(low // step))  # the first element that is not cut off
            last = min(size, -((low - room) // step))
            source.append(slice(first, max(last, first)))
            target.append(slice(low + first * step, max(low + (last - 1) * step + 1, low + first * step), step))
        out[tuple(target)] = x[tuple(source)]
        return out

    return run


def _starts(values: Sequence[np.ndarray], room: Sequence[int]) -> np.ndarray:
    """Where slices begin on each device, moved inside the array: `"device dim"`."""
    devices = max((len(v) for v in values), default=1)
    columns = [np.broadcast_to(np.clip(v.astype(np.int64), 0, most), devices) for v, most in zip(values, room)]
    return np.stack(columns, -1) if columns else np.zeros((devices, 0), np.int64)


def _dynamic_slice(instruction: Instruction, machine) -> Callable:
    sizes = machine.integers(instruction, "dynamic_slice_sizes")
    room = [size - n for size, n in zip(machine.operand_types(instruction)[0].shape, sizes)]

    def run(values, team):
        x, starts = values[0], _starts(values[1:], room)
        cut = lambda at: tuple(slice(s, s + n) for s, n in zip(at, sizes))
        if len(starts) == 1 or (starts == starts[0]).all():
            return x[(slice(None), *cut(starts[0]))]
        return np.stack([x[d if len(x) > 1 else 0][cut(at)] for d, at in enumerate(starts)])

    return run


def _dynamic_update_slice(instruction: Instruction, machine) -> Callable:
    whole, part = (t.shape for t in machine.operand_types(instruction)[:2])
    room = [size - n for size, n in zip(whole, part)]

    def run(values, team):
        x, new, starts = values[0], values[1], _starts(values[2:], room)
        cut = lambda at: tuple(slice(s, s + n) for s, n in zip(at, part))
        x = x.astype(np.result_type(x, new), copy=False) if machine.unrounded else x
        same = len(starts) == 1 or (starts == starts[0]).all()
        alike = same and len(x) == len(new) == 1
        out = x.copy() if alike else np.array(spread(x, team))
        if same:
            out[(slice(None), *cut(starts[0]))] = new
            return out
        for d, at in enumerate(starts):
            out[d][cut(at)] = new[d if len(new) > 1 else 0]
        return out

    return run


class Lookup:
    """Where a gather reads, and a scatter writes, one element: the common part of their dimension numbers.

    Args:
        shape: of the array that is looked into.
        sizes: of the window, for each of its dimensions.
        gone: its dimensions that a window does not show, those of batches included.
        batch: its dimensions that go along with the indices', and those dimensions of the indices.
        starts: the dimensions that an index vector has entries for.
        vector: the dimension of the indices that the vectors are along.
    """

    def __init__(self, shape, sizes, gone, batch, starts, vector: int):
        self.shape, self.sizes, self.starts, self.vector = shape, sizes, starts, vector
        self.window = [d for d in range(len(shape)) if d not in gone]
        self.batch = dict(zip(*batch))

    def places(self, index: np.ndarray, *, clip: bool) -> tuple[np.ndarray, np.ndarray]:
        """For one device: numbers of elements, `"index ... window ..."`, and which indices are inside.

        Args:
            index: the indices.
            clip: move windows inside of the array, as a gather does; a scatter leaves them out.
        """
        index = index[..., None] if self.vector == index.ndim else np.moveaxis(index, self.vector, -1)
        index = index.astype(np.int64)
        lead, rank = index.shape[:-1], len(self.window)
        number, inside = np.zeros((*lead, *[1] * rank), np.int64), np.ones(lead, bool)
        for d, (size, n) in enumerate(zip(self.shape, self.sizes)):
            at = np.zeros(lead, np.int64)
            if d in self.starts:
                at = index[..., self.starts.index(d)]
                inside &= (at >= 0) & (at <= size - n)
                at = np.clip(at, 0, size - n) if clip else np.where(inside, at, 0)
            elif d in self.batch:
                along = self.batch[d]
                along -= along > self.vector
                at = np.broadcast_to(np.arange(size).reshape([-1 if i == along else 1 for i in range(len(lead))]), lead)
            at = np.reshape(at, (*lead, *[1] * rank))
            if d in self.window:
                own = [1] * rank
                own[self.window.index(d)] = n
                at = at + np.arange(n).reshape(own)
            number = number * size + at
        return number, inside


def _gather(instruction: Instruction, machine) -> Callable:
    ints = lambda name: machine.integers(instruction, name)
    batch = ints("operand_batching_dims"), ints("start_indices_batching_dims")
    lookup = Lookup(
        machine.operand_types(instruction)[0].shape,
        ints("slice_sizes"),
        (*ints("collapsed_slice_dims"), *batch[0]),
        batch,
        ints("start_index_map"),
        int(instruction.attribute("index_vector_dim") or 0),
    )
    offset, rank = ints("offset_dims"), len(machine.type(instruction).shape)
    order = np.argsort([*(d for d in range(rank) if d not in offset), *offset], kind="stable")

    def one(x, index):
        return np.asarray(x.reshape(-1)[lookup.places(index, clip=True)[0]]).transpose(order)

    return lambda values, team: each(one, values, team)


def falling(x: np.ndarray) -> np.ndarray:
    """The order of entries along the last dimension from the largest to the smallest, equal ones as they come.

    >>> falling(np.array([1, 3, 0, 3], np.uint32)).tolist()
    [1, 3, 0, 2]
    """
    return x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]


def _sort(instruction: Instruction, machine) -> Callable:
    axis = 1 + machine.integers(instruction, "dimensions")[0]
    less = machine.combiner(instruction.called()["to_apply"][0])
    several = isinstance(machine.type(instruction), tuple)

    def run(values, team):
        rows = [np.moveaxis(v, axis, -1) for v in values]
        devices = max(map(len, rows))
        rows = [np.broadcast_to(r, (devices, *r.shape[1:])) for r in rows]
        order = _order(rows, less)
        out = tuple(np.moveaxis(np.take_along_axis(r, order, -1), -1, axis) for r in rows)
        return out if several else out[0]

    return run


def _order(rows: list[np.ndarray], less: Callable) -> np.ndarray:
    """The order of each row's entries by a comparison of any kind; entries that compare alike keep their order.

    Sorted stretches of 1, 2, 4, ... entries are merged in pairs, in all rows at once, so that a sort takes memory for a
    few numbers an entry.
    """
    length = rows[0].shape[-1]
    order = np.broadcast_to(np.arange(length), rows[0].shape)
    width = 1
    while width < length:
        order = _merged_stretches([np.take_along_axis(r, order, -1) for r in rows], order, width, less)
        width *= 2
    return order


def _merged_stretches(rows: list[np.ndarray], order: np.ndarray, width: int, less: Callable) -> np.ndarray:
    """Pairs of sorted stretches as one: an entry comes after its own stretch's before it, and the other's before it."""
    length = order.shape[-1]
    place = np.arange(length)
    pair, left = place // (2 * width) * (2 * width), place // width % 2 == 0
    first = np.where(left, pair + width, pair)  # of the other stretch
    end = np.minimum(first + width, length)
    low, high = (np.broadcast_to(np.minimum(edge, length), order.shape) for edge in (first, end))
    while (open_ := low < high).any():
        middle = (low + high) // 2
        others = [np.take_along_axis(r, np.minimum(middle, length - 1), -1) for r in rows]
        pairs = [x for r, o in zip(rows, others) for x in (np.where(left, o, r), np.where(left, r, o))]
        before = less(*pairs)
        if isinstance(before, tuple):
            raise NotInterpreted("a sort whose comparison gives several values")
        passed = open_ & (before == left)
        low, high = np.where(passed, middle + 1, low), np.where(open_ & ~passed, middle, high)
    found = np.empty(order.shape, np.int64)
    np.put_along_axis(found, place - np.where(left, 0, width) + low - np.minimum(first, length), order, -1)
    return found


OPERATIONS: dict[str, Callable] = {
    "bitcast": _bitcast,
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "reverse": _reverse,
    "slice": _slice,
    "sort": _sort,
    "transpose": _transpose,
}
