"""What experts compute between their products on TPUs (`trellis.nn.moe.activations`), in float32."""

from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.kernels.grouped import walked
from trellis.proof.interpreter.values import NotInterpreted, each


def _forward(name: str, instruction: Instruction, machine) -> Callable:
    kind, gate = machine.type(instruction), _gate(name)

    def one(*values: np.ndarray) -> np.ndarray:
        bounds, (gated, upped, counted, *biases) = walked(values)
        out = np.full(kind.shape, np.nan, gated.dtype)
        for rows, *operands in _operands(bounds, gated, upped, biases):
            act, _ = gate(*operands)
            out[rows] = (act * counted.reshape(-1)[rows, None]).astype(out.dtype)
        return out

    return lambda values, team: each(one, values, team)


def _backward(name: str, instruction: Instruction, machine) -> Callable:
    kinds, gate = machine.type(instruction), _gate(name)
    wide = 3 - len(kinds) % 2  # arrays of rows: two gradients, and perhaps the last product's operand

    def one(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        bounds, (d, gated, upped, counted, *biases) = walked(values)
        made = [np.full(kind.shape, np.nan, d.dtype) for kind in kinds[:wide]]
        of_counted = np.full(counted.size, np.nan, np.float32)
        of_biases = [np.zeros(kind.shape, np.float32) for kind in kinds[wide + 1 :]]
        for group, (rows, *operands) in enumerate(_operands(bounds, gated, upped, biases)):
            act, slopes = gate(*operands)
            of_out = d[rows].astype(np.float32)
            of_counted[rows] = (of_out * act).sum(1)
            mine = counted.reshape(-1)[rows, None]
            changes = [of_out * mine * slope for slope in slopes]
            for out, result in zip(made, (*changes, act * mine)):
                out[rows] = result.astype(out.dtype)
            for out, change in zip(of_biases, changes):
                out[group, 0] = change.sum(0)
        # Each part of the columns has its own sums, of which only the total is read.
        sums = np.zeros(kinds[wide].shape, np.float32)
        sums[0] = of_counted.reshape(sums.shape[1:])
        return *made, sums, *of_biases

    return lambda values, team: each(one, values, team)


def _operands(bounds, gated, upped, biases):
    """Each group's rows, and the two products there with their biases."""
    for group, (first, last) in enumerate(bounds):
        rows = slice(first, last)
        added = [bias[group].astype(np.float32) for bias in biases] or [0.0, 0.0]
        yield rows, gated[rows].astype(np.float32) + added[0], upped[rows].astype(np.float32) + added[1]


def _gate(name: str) -> Callable:
    """A gate by the kernel's name: what it makes of two arrays, and its derivatives by both.

    Raises:
        NotInterpreted: the name says a gate that is not known here.
    """
    _, _, said = name.partition(".")[0].partition("ward")
    try:
        limit, slope = (float(n.replace("_", ".")) for n in said[1:].split("_by_")) if said else (np.inf, 1.0)
    except ValueError as error:
        raise NotInterpreted(f"the gate of the kernel {name}") from error
    more = 1.0 if said else 0.0

    def gate(gated: np.ndarray, upped: np.ndarray):
        x, y = np.minimum(gated, limit), np.clip(upped, -limit, limit) + more
        share = 1 / (1 + np.exp(-slope * x))
        by_gated = y * share * (1 + slope * x * (1 - share)) * (gated < limit)
        return x * share * y, (by_gated, x * share * (np.abs(upped) < limit))

    return gate


KERNELS: dict[str, Callable] = {"experts_gate_forward": _forward, "experts_gate_backward": _backward}
