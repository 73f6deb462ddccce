"""Sorted rows with one weight for each group of them: `jax.lax.ragged_dot`, libtpu's kernels for it, and our own."""

import base64
import re
from collections.abc import Callable, Sequence

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.values import NotInterpreted, each

# The dimensions of a product whose groups are of rows; weights may be swapped.
_RAGGED = {"lhs_contracting": (1,), "lhs_ragged": (0,), "rhs_group": (0,)}


def _ragged_dot(instruction: Instruction, machine) -> Callable:
    """The operation itself, as it is before a compiler has seen it, if groups are of rows."""
    kind = machine.type(instruction)
    dims = lambda name: machine.integers(instruction, f"{name}_dims")
    swapped = dims("rhs_contracting") == (2,)
    if dims("rhs_contracting") not in ((1,), (2,)) or any(dims(name) != said for name, said in _RAGGED.items()):
        raise NotInterpreted(f"{instruction.name} with groups along another dimension")

    def one(rows: np.ndarray, weights: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        ends = np.cumsum(sizes)
        weights = weights.swapaxes(1, 2) if swapped else weights
        return _written(kind.shape, rows, weights, enumerate(zip(ends - sizes, ends)))

    return lambda values, team: each(one, values, team)


def _metadata(name: str, instruction: Instruction, machine) -> Callable:
    """Where groups begin, from their sizes, and which tile is of which group, which only the other kernel reads."""
    kind = machine.type(instruction)

    def one(sizes: np.ndarray) -> tuple[np.ndarray, ...]:
        begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return begins, *(np.zeros(t.shape, np.int32) for t in kind[1:])

    return lambda values, team: each(one, values[:1], team)


def _product(name: str, instruction: Instruction, machine) -> Callable:
    """Rows past the last group are not written: NaN here."""
    kind = machine.type(instruction)
    operands = machine.operand_types(instruction)
    if len(operands) != 7 or isinstance(kind, tuple):
        raise NotInterpreted(f"the kernel {name} with {len(operands)} operands")
    found = re.search(r"dot_dimension_numbers<\[1\], \[([01])\]", _body(instruction))
    if found is None:
        raise NotInterpreted(f"the kernel {name} with another product inside")

    def one(_, begins, *rest: np.ndarray) -> np.ndarray:
        rows, weights = rest[-2:]
        weights = weights if found[1] == "0" else weights.swapaxes(1, 2)
        return _written(kind.shape, rows, weights, enumerate(zip(begins[:-1], begins[1:])))

    return lambda values, team: each(one, values, team)


def _our_product(name: str, instruction: Instruction, machine) -> Callable:
    """Operands are tiles of rows on GPUs, each with its group, its first row and where the group's rows end; then rows
    and weights of each product that is summed. Weights may be swapped, and lie with a dimension other than that of
    groups outermost. Rows may be gathered, and written elsewhere: which ones, and where to, comes before them."""
    kind, swapped, outers = machine.type(instruction), name.startswith("grouped_product_swapped"), _outers(name)
    gathers, scatters = "_gathers" in name, "_scatters" in name

    def one(*values: np.ndarray) -> np.ndarray:
        groups, first, end, *pairs = values
        sources, targets = (pairs.pop(0) if listed else None for listed in (gathers, scatters))
        parts, sums = [*zip(groups, zip(first, end))], []
        for rows, weights, outer in zip(pairs[::2], pairs[1::2], outers or [0] * len(pairs)):
            weights, rows = np.moveaxis(weights, 0, outer), _gathered(rows, sources)
            sums.append(_written(kind.shape, rows, weights.swapaxes(1, 2) if swapped else weights, parts, targets))
        return sum(sums[1:], sums[0])

    return lambda values, team: each(one, values, team)


def _our_rows_gradient(name: str, instruction: Instruction, machine) -> Callable:
    """Operands are what a TPU walks by, where each group's rows begin and end, and gradients and weights in pairs."""
    kind = machine.type(instruction)

    def one(*values: np.ndarray) -> np.ndarray:
        bounds, pairs = walked(values)
        parts = [*enumerate(bounds)]
        sums = [_written(kind.shape, d, w.swapaxes(1, 2), parts) for d, w in zip(pairs[::2], pairs[1::2])]
        return sum(sums[1:], sums[0])

    return lambda values, team: each(one, values, team)


def _our_gradient(name: str, instruction: Instruction, machine) -> Callable:
    """Operands are what a TPU walks by, then where each group's rows begin and end, the rows, and their gradients. If
    either is gathered, on GPUs, which ones they are comes before them."""
    kind, (outer,) = machine.type(instruction), _outers(name) or [0]
    gathered = re.findall(r"_gathers_(rows|d)", name)

    def one(*values: np.ndarray) -> np.ndarray:
        begins, ends, *sources, rows, d = values[-4 - len(gathered) :]
        of = dict(zip(gathered, sources, strict=True))
        rows, d = _gathered(rows, of.get("rows")), _gathered(d, of.get("d"))
        sums = np.stack([rows[first:last].T @ d[first:last] for first, last in zip(begins, ends)])
        return np.moveaxis(sums, outer, 0).reshape(kind.shape).astype(d.dtype)

    return lambda values, team: each(one, values, team)


def walked(values: Sequence[np.ndarray]) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Where each group's rows begin and end, by the last two tables that a TPU walks by, and the other operands."""
    tables = [v for v in values if v.ndim < 2]
    return [*zip(*tables[-2:])], [*values[len(tables) :]]


def _gathered(rows: np.ndarray, sources: np.ndarray | None) -> np.ndarray:
    """The rows that a kernel reads; it passes over those whose source is out of range: NaN."""
    if sources is None:
        return rows
    inside = (sources >= 0) & (sources < len(rows))
    return np.where(inside[:, None], rows[np.where(inside, sources, 0)], np.nan).astype(rows.dtype)


def _outers(name: str) -> list[int]:
    """Which dimension of each product's weights lies outermost, by the kernel's name; nothing if it is the first."""
    found = re.search(r"_outer_(\d(?:_\d)*)", name)
    return [int(outer) for outer in found[1].split("_")] if found else []


def _written(shape, rows, weights, parts, targets: np.ndarray | None = None) -> np.ndarray:
    """Products of the parts of the rows, `(group, (first, last))`, each where its row is or at its target; rows in no
    part are not written: NaN."""
    out = np.full(shape, np.nan, rows.dtype)
    for group, (first, last) in parts:
        out[slice(first, last) if targets is None else targets[first:last]] = rows[first:last] @ weights[group]
    return out


def _body(instruction: Instruction) -> str:
    """The kernel's own program, which is in the call as text."""
    found = re.search(r'"body":"([^"]*)"', instruction.attributes)
    code = re.sub(r"[^A-Za-z0-9+/]", "", found[1].replace("\\n", "")) if found else ""
    return base64.b64decode(code + "=" * (-len(code) % 4)).decode(errors="replace")


KERNELS: dict[str, Callable] = {
    "ragged-dot-metadata": _metadata,
    "ragged-dot-none": _product,
    "grouped_product": _our_product,
    "grouped_rows_gradient": _our_rows_gradient,
    "grouped_gradient": _our_gradient,
}
OPERATIONS: dict[str, Callable] = {"ragged-dot": _ragged_dot}
