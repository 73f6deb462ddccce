"""Matrix products: dots, and convolutions, which a TPU's compiler makes of them."""

import re
from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction

DEVICE = "@"


def contract(x: np.ndarray, x_labels: list, y: np.ndarray, y_labels: list, out: list) -> np.ndarray:
    """A sum of products over the labels that are not in the result, as one matrix product a batch.

    Args:
        x: `device dim ...`.
        x_labels: a label for each dimension behind the first.
        y: likewise.
        y_labels: likewise.
        out: labels of the result's dimensions behind the first.
    """
    labels = []
    for array, names in ((x, x_labels), (y, y_labels)):
        alone = len(array) == 1
        labels.append(list(names) if alone else [DEVICE, *names])
    x, y = (a[0] if len(a) == 1 else a for a in (x, y))
    has_devices = DEVICE in labels[0] or DEVICE in labels[1]
    found = _matmul(x, labels[0], y, labels[1], [DEVICE, *out] if has_devices else out)
    return found if has_devices else found[None]


def _matmul(x: np.ndarray, left: list, y: np.ndarray, right: list, out: list) -> np.ndarray:
    x, left = _summed(x, left, {*right, *out})
    y, right = _summed(y, right, {*left, *out})
    batch = [n for n in left if n in right and n in out]
    contracted = [n for n in left if n in right and n not in out]
    rows, columns = ([n for n in names if n not in batch and n not in contracted] for names in (left, right))
    size = {**dict(zip(left, x.shape)), **dict(zip(right, y.shape))}
    many = lambda names: int(np.prod([size[n] for n in names], dtype=np.int64))
    a = x.transpose([left.index(n) for n in (*batch, *rows, *contracted)])
    b = y.transpose([right.index(n) for n in (*batch, *contracted, *columns)])
    a = a.reshape(*(size[n] for n in batch), many(rows), many(contracted))
    b = b.reshape(*(size[n] for n in batch), many(contracted), many(columns))
    found = np.matmul(a, b).reshape([size[n] for n in (*batch, *rows, *columns)])
    made = [*batch, *rows, *columns]
    return found.transpose([made.index(n) for n in out])


def _summed(x: np.ndarray, labels: list, needed: set) -> tuple[np.ndarray, list]:
    gone = tuple(i for i, n in enumerate(labels) if n not in needed)
    return (x.sum(gone) if gone else x), [n for n in labels if n in needed]


def _dot(instruction: Instruction, machine) -> Callable:
    dtype = machine.dtype(instruction)
    left, right = (len(t.shape) for t in machine.operand_types(instruction)[:2])
    ints = lambda name: machine.integers(instruction, name)
    labels: list[list] = [[("l", i) for i in range(left)], [("r", i) for i in range(right)]]
    pairs = [*zip(ints("lhs_batch_dims"), ints("rhs_batch_dims")),
             *zip(ints("lhs_contracting_dims"), ints("rhs_contracting_dims"))]  # fmt: skip
    for i, j in pairs:
        labels[1][j] = labels[0][i]
    batch, summed = ints("lhs_batch_dims"), ints("lhs_contracting_dims")
    out = [labels[0][i] for i in batch]
    out += [n for i, n in enumerate(labels[0]) if i not in batch and i not in summed]
    mine = (*ints("rhs_batch_dims"), *ints("rhs_contracting_dims"))
    out += [n for i, n in enumerate(labels[1]) if i not in mine]

    def run(values, team):
        x, y = (machine.typed(v, dtype) for v in values[:2])
        return contract(x, labels[0], y, labels[1], out)

    return run


def _convolution(instruction: Instruction, machine) -> Callable:
    """Each spatial dimension says which input meets which tap of the window for each place of the result."""
    dtype, kind = machine.dtype(instruction), machine.type(instruction)
    left, right = machine.operand_types(instruction)
    inputs, rest = (instruction.attribute("dim_labels") or "").split("_")
    kernel, outputs = rest.split("->")
    window = Window(instruction.attribute("window") or "", sum(label.isdigit() for label in kernel))
    features = int(instruction.attribute("feature_group_count") or 1)
    batches = int(instruction.attribute("batch_group_count") or 1)
    spatial = []
    for label in sorted(label for label in kernel if label.isdigit()):
        sizes = (left.shape[inputs.index(label)], right.shape[kernel.index(label)], kind.shape[outputs.index(label)])
        spatial.append((label, *window.pairs(int(label), *sizes)))
    out: list = [{"b": "b", "f": "o"}.get(label, label) for label in outputs]

    def run(values, team):
        x, y = (machine.typed(v, dtype) for v in values)
        x_labels: list = [{"f": "i"}.get(label, label) for label in inputs]
        y_labels: list = list(kernel)
        wanted = list(out)
        x, y, x_labels, y_labels = _grouped(x, y, x_labels, y_labels, features, batches)
        for label, places, taps in spatial:
            x, x_labels, y, y_labels = _met(x, x_labels, y, y_labels, label, places, taps)
        if features * batches > 1:
            at = wanted.index("o")
            wanted = [*wanted[:at], "g", *wanted[at:]]
        found = contract(x, x_labels, y, y_labels, wanted)
        return found.reshape(len(found), *kind.shape)

    return run


def _grouped(x, y, x_labels, y_labels, features: int, batches: int):
    """Groups of features or of batches as a dimension `g` of both sides, before the kernel's output features."""
    if features * batches == 1:
        return x, y, x_labels, y_labels
    groups, mine = (features, "i") if features > 1 else (batches, "b")
    x, x_labels = _split(x, x_labels, mine, groups)
    y, y_labels = _split(y, y_labels, "o", groups)
    return x, y, x_labels, y_labels


def _split(x: np.ndarray, labels: list, label: str, groups: int) -> tuple[np.ndarray, list]:
    at = labels.index(label) + 1
    shape = (*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])
    return x.reshape(shape), [*labels[: at - 1], "g", *labels[at - 1 :]]


def _met(x, x_labels, y, y_labels, label: str, places: np.ndarray, taps: np.ndarray):
    """Both sides with a spatial dimension turned into one that is shared, free or summed over.

    Args:
        places: `"out pair"`, the input that is met, or -1.
        taps: `"out pair"`, the tap that it meets.
    """
    summed = (label, "summed")
    if len(places) == 1:  # one place of the result: a sum over all pairs
        valid = places[0] >= 0
        x, y = _taken(x, x_labels, label, places[0][valid]), _taken(y, y_labels, label, taps[0][valid])
        x_labels, y_labels = _renamed(x_labels, label, summed), _renamed(y_labels, label, summed)
        at = x_labels.index(summed)  # the result keeps a dimension of size 1
        return np.expand_dims(x, at + 1), [*x_labels[:at], label, *x_labels[at:]], y, y_labels
    if places.shape[1] == 1:  # each place of the result is of one pair
        if (taps == taps[0]).all():
            return _taken(x, x_labels, label, places[:, 0]), x_labels, *_dropped(y, y_labels, label, taps[0, 0])
        if (places == places[0]).all() and places[0, 0] >= 0:
            return *_dropped(x, x_labels, label, places[0, 0]), _taken(y, y_labels, label, taps[:, 0]), y_labels
        return _taken(x, x_labels, label, places[:, 0]), x_labels, _taken(y, y_labels, label, taps[:, 0]), y_labels
    at = x_labels.index(label) + 1  # windows that overlap: every place gets its own copy of what it meets
    x = _taken(x, x_labels, label, places.reshape(-1))
    x = x.reshape(*x.shape[:at], *places.shape, *x.shape[at + 1 :])
    at = y_labels.index(label) + 1
    y = _taken(y, y_labels, label, taps.reshape(-1))
    y = y.reshape(*y.shape[:at], *taps.shape, *y.shape[at + 1 :])
    both = lambda labels: [n for own in labels for n in ((label, summed) if own == label else (own,))]
    return x, both(x_labels), y, both(y_labels)


def _taken(x: np.ndarray, labels: list, label: str, index: np.ndarray) -> np.ndarray:
    """The entries at an index along a dimension; zeros where it is negative."""
    axis = labels.index(label) + 1
    if len(index) == x.shape[axis] and (index == np.arange(len(index))).all():
        return x
    found = np.take(x, np.maximum(index, 0), axis)
    if (index < 0).any():
        found[(slice(None),) * axis + (index < 0,)] = 0
    return found


def _dropped(x: np.ndarray, labels: list, label: str, index: int) -> tuple[np.ndarray, list]:
    at = labels.index(label)
    return np.take(x, index, at + 1), [*labels[:at], *labels[at + 1 :]]


def _renamed(labels: list, old: str, new: object) -> list:
    return [new if n == old else n for n in labels]


class Window:
    """A window's attribute: `size=1x4 stride=1x2 pad=0_0x3_3 lhs_dilate=.. rhs_dilate=.. rhs_reversal=0x1`."""

    def __init__(self, text: str, dimensions: int):
        fields = dict(re.findall(r"(\w+)=([\w\-]+)", text))

        def numbers(name: str, default: int) -> list[int]:
            return [int(n) for n in fields[name].split("x")] if name in fields else [default] * dimensions

        self.size, self.stride = numbers("size", 1), numbers("stride", 1)
        self.spread, self.gaps = numbers("rhs_dilate", 1), numbers("lhs_dilate", 1)
        self.turned = numbers("rhs_reversal", 0)
        padding = fields["pad"].split("x") if "pad" in fields else ["0_0"] * dimensions
        self.padding = [tuple(int(n) for n in side.split("_")) for side in padding]

    def pairs(self, index: int, length: int, taps: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Which inputs and taps meet at each place of the result: both `"out pair"`, inputs -1 where none is left.

        Args:
            index: the spatial dimension.
            length: of the input.
            taps: of the kernel.
            steps: of the result.
        """
        tap = np.arange(taps)
        at = np.arange(steps)[:, None] * self.stride[index] + tap[None] * self.spread[index] - self.padding[index][0]
        inside = (at >= 0) & (at % self.gaps[index] == 0) & (at // self.gaps[index] < length)
        at = np.where(inside, at // self.gaps[index], -1)
        tap = np.broadcast_to(tap[::-1] if self.turned[index] else tap, at.shape)
        most = max(int(inside.sum(1).max()), 1)
        if most < taps and steps > 1:  # bring the pairs that there are to the front
            first = np.argsort(~inside, axis=1, kind="stable")[:, :most]
            at, tap = np.take_along_axis(at, first, 1), np.take_along_axis(tap, first, 1)
        return at, tap


OPERATIONS: dict[str, Callable] = {"dot": _dot, "convolution": _convolution}
