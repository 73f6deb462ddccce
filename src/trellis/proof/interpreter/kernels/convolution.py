"""cuDNN's convolutions, as XLA calls them: `__cudnn$convForward`, `...BackwardInput`, `...BackwardFilter` and
`...BiasActivationForward`."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.layouts import blank
from trellis.proof.interpreter.products import Window
from trellis.proof.interpreter.values import NotInterpreted, each

_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "kNone": lambda x: x,
    "kRelu": lambda x: np.maximum(x, 0),
    "kRelu6": lambda x: np.clip(x, 0, 6),
    "kElu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
}


def kernel(target: str, instruction: Instruction, machine) -> Callable:
    """One of them, by the custom call's target.

    Labels and window are those of the forward convolution in all of them: of the three arrays, `b 0 1 i`, `0 1 i o` and
    `b 0 1 o`, two are given and the third is the result.

    Raises:
        NotInterpreted: with gaps between inputs, groups of batches, or an activation that is not here.
    """
    result, *rest = machine.type(instruction)
    labels = re.split("_|->", instruction.attribute("dim_labels") or "")
    window = Window(instruction.attribute("window") or "", len(labels[0]) - 2)
    groups = int(instruction.attribute("feature_group_count") or 1)
    if any(gap > 1 for gap in window.gaps) or int(instruction.attribute("batch_group_count") or 1) > 1:
        raise NotInterpreted(f"{target} with gaps between inputs or groups of batches")
    way = target.removeprefix("__cudnn$conv")
    missing = {"BackwardInput": 0, "BackwardFilter": 1}.get(way, 2)
    finish = _finish(target, instruction)

    def one(*values: np.ndarray) -> np.ndarray:
        given = values[1::-1] if missing == 0 else values[:2]  # a result's gradient comes before the window's numbers
        arrays = [*given[:missing], np.zeros(result.shape, values[0].dtype), *given[missing:]]
        _filled(_ordered(arrays, labels, groups), window, missing)
        return finish(arrays[missing], values[2:], labels[2].index("f"))

    return lambda values, team: (each(one, values, team), *(blank(t, 1, machine.held) for t in rest))


def _ordered(arrays: Sequence[np.ndarray], labels: Sequence[str], groups: int) -> list[np.ndarray]:
    """Views: `b 0 1 g i`, `0 1 i g o` and `b 0 1 g o`."""
    x, w, y = arrays
    places = sorted(label for label in labels[0] if label.isdigit())
    ordered = lambda array, own, wanted: array.transpose([own.index(label) for label in wanted])
    x, y = (_split(ordered(a, own, ["b", *places, "f"]), groups) for a, own in ((x, labels[0]), (y, labels[2])))
    return [x, _split(ordered(w, labels[1], [*places, "i", "o"]), groups), y]


def _split(x: np.ndarray, groups: int) -> np.ndarray:
    """A view with the last dimension in groups, which is filled with it."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _filled(arrays: Sequence[np.ndarray], window: Window, missing: int) -> None:
    """Adds to the array that is missing what each tap of the window makes of the two others."""
    x, w, y = arrays
    for taps, inputs, outputs in _met(x.shape[1:-2], y.shape[1:-2], window):
        seen, made = (slice(None), *inputs), (slice(None), *outputs)
        if missing == 0:
            x[seen] += np.einsum("b...go,igo->b...gi", y[made], w[taps])
        elif missing == 1:
            w[taps] += np.einsum("b...gi,b...go->igo", x[seen], y[made], optimize=True)
        else:
            y[made] += np.einsum("b...gi,igo->b...go", x[seen], w[taps])


def _met(inputs: Sequence[int], outputs: Sequence[int], window: Window) -> Iterator[tuple[tuple, tuple, tuple]]:
    """For each tap of the window which inputs and outputs meet there: the tap, and slices of both."""
    for taps in itertools.product(*map(range, window.size)):
        seen, made = [], []
        for dim, tap in enumerate(taps):
            stride, shift = window.stride[dim], tap * window.spread[dim] - window.padding[dim][0]
            first = max(0, -(shift // stride))  # the first output whose input is not in the padding
            count = max(0, min(outputs[dim], (inputs[dim] - 1 - shift) // stride + 1) - first)
            begin = first * stride + shift
            seen.append(slice(begin, begin + max((count - 1) * stride + 1, 0), stride) if count else slice(0))
            made.append(slice(first, first + count))
        turned = (size - 1 - tap if back else tap for tap, size, back in zip(taps, window.size, window.turned))
        yield tuple(turned), tuple(seen), tuple(made)


def _finish(target: str, instruction: Instruction) -> Callable:
    """What follows a convolution in its kernel: a scale, another array, a bias for each feature, an activation."""
    number = lambda name: float((re.search(rf'"{name}":([-\d.e]+)', instruction.attributes) or [0, 1])[1])
    scale, side_scale = number("conv_result_scale"), number("side_input_scale")
    mode = instruction.quoted("activation_mode") or "kNone"
    if mode not in _ACTIVATIONS:
        raise NotInterpreted(f"{target} with the activation {mode}")

    def finish(made: np.ndarray, more: Sequence[np.ndarray], features: int) -> np.ndarray:
        made = made * scale
        if len(more) > 1:
            made = made + side_scale * more[1]
        if more:
            made = made + more[0].reshape(-1, *[1] * (made.ndim - 1 - features))
        return _ACTIVATIONS[mode](made).astype(made.dtype)

    return finish


KERNELS: dict[str, Callable] = {"__cudnn$conv": kernel}
