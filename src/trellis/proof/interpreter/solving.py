"""Fourier transforms, Cholesky factors and triangular systems, also as calls of libraries and kernels of libtpu."""

import re
from collections.abc import Callable

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.layouts import blank
from trellis.proof.interpreter.values import Value


def _fft(instruction: Instruction, machine) -> Callable:
    """A transform along the last dimensions; that of real numbers has half of the last one."""
    sizes, dtype = machine.integers(instruction, "fft_length"), machine.dtype(instruction)
    axes = tuple(range(-len(sizes), 0))
    makes = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}
    make = makes[instruction.attribute("fft_type") or ""]
    return lambda values, team: make(wide(values[0]), sizes, axes).astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    """Numbers of 64 bits, or pairs of such."""
    return x.astype(np.result_type(x.dtype, np.float64))


def _cholesky(instruction: Instruction, machine, *, lower: bool | None = None) -> Callable:
    lower, dtype = _flag(instruction, "lower") if lower is None else lower, machine.dtype(instruction)
    return lambda values, team: _factor(values[0], lower=lower).astype(dtype)


def _factor(x: np.ndarray, *, lower: bool) -> np.ndarray:
    """The triangular factor of matrices of which one half is read; NaN where there is none."""
    x = wide(x) if lower else np.conj(wide(x).swapaxes(-1, -2))
    x = np.tril(x) + np.conj(np.tril(x, -1).swapaxes(-1, -2))
    found = np.full(x.shape, np.nan, x.dtype)
    for at in np.ndindex(x.shape[:-2]):
        try:
            found[at] = np.linalg.cholesky(x[at])
        except np.linalg.LinAlgError:
            continue
    return found if lower else np.conj(found.swapaxes(-1, -2))


def _potrf(instruction: Instruction, machine) -> Callable:
    """cuSOLVER's: the factor, and for each matrix 0, or another number where there is none."""
    lower = _flag(instruction, "lower")

    def run(values, team) -> Value:
        found = _factor(values[0], lower=lower)
        return found.astype(values[0].dtype), np.isnan(found).any((-1, -2)).astype(np.int32)

    return run


def _triangular(instruction: Instruction, machine) -> Callable:
    """Solves `a x = b`, or `x a = b`, for triangular matrices of which one half is read."""
    left, lower, ones = (_flag(instruction, name) for name in ("left_side", "lower", "unit_diagonal"))
    turned = (re.search(r'transpose_a"?[=:]"?(\w+)', instruction.attributes) or ["", "NO_TRANSPOSE"])[1]
    kind = machine.type(instruction)

    def run(values, team) -> Value:
        a, b = map(wide, values)
        a = np.tril(a) if lower else np.triu(a)
        if ones:
            a = a - a * np.eye(a.shape[-1]) + np.eye(a.shape[-1])
        a = np.conj(a) if turned == "ADJOINT" else a
        if (turned == "NO_TRANSPOSE") != left:  # x a = b is the same as aT xT = bT
            a = a.swapaxes(-1, -2)
        found = np.linalg.solve(a, b if left else b.swapaxes(-1, -2))
        found = (found if left else found.swapaxes(-1, -2)).astype(values[1].dtype)
        return (found, *(blank(t, 1, machine.held) for t in kind[1:])) if isinstance(kind, tuple) else found

    return run


def _inverse(instruction: Instruction, machine, half: Callable) -> Callable:
    """libtpu's inverses of triangular matrices, from which it makes the solution of a larger one."""
    return lambda values, team: np.linalg.inv(half(wide(values[0]))).astype(values[0].dtype)


def _flag(instruction: Instruction, name: str) -> bool:
    """Whether an attribute, or a word in the settings of a library's call, is true; XLA leaves out what is false."""
    return re.search(rf'\b{name}"?\s*[=:]\s*true', instruction.attributes) is not None


OPERATIONS: dict[str, Callable] = {"cholesky": _cholesky, "fft": _fft, "triangular-solve": _triangular}
# Of libraries, by how the call's target begins: what is inside of them the program does not show.
KERNELS: dict[str, Callable] = {
    "__cublas$triangularSolve": lambda _, *call: _triangular(*call),
    "cusolver_potrf_ffi": lambda _, *call: _potrf(*call),
    "Cholesky": lambda _, *call: _cholesky(*call, lower=True),
    "InvertDiagBlocksLowerTriangular": lambda _, *call: _inverse(*call, np.tril),
    "InvertDiagBlocksUpperTriangular": lambda _, *call: _inverse(*call, np.triu),
}
