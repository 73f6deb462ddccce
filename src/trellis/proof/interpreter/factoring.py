"""Factors of matrices (LU, QR, eigenvectors, singular vectors) as calls of libtpu's kernels and of CUDA's libraries.

Which of several right factors a library gives, the program does not show. Here it is always the same for the same
matrix: the largest entry of each eigenvector is positive.
"""

import re
from collections.abc import Callable
from typing import Literal

import numpy as np

from trellis.inspect.hlo import Instruction
from trellis.proof.interpreter.solving import wide
from trellis.proof.interpreter.values import NotInterpreted, Value

Half = Literal["L", "U"]  # the half of a matrix that is read: the lower or the upper one


def _lu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both factors in one array, as LAPACK has them, and which row each row was exchanged with."""
    *batch, rows, columns = x.shape
    a = wide(x).reshape(-1, rows, columns).copy()
    every, pivots = np.arange(len(a)), np.zeros((len(a), min(rows, columns)), np.int32)
    for k in range(min(rows, columns)):
        at = pivots[:, k] = k + np.argmax(np.abs(a[:, k:, k]), axis=1)
        a[every, k], a[every, at] = a[every, at], a[every, k].copy()
        first = a[:, k, k, None]
        a[:, k + 1 :, k] /= np.where(first == 0, 1, first)
        a[:, k + 1 :, k + 1 :] -= a[:, k + 1 :, k, None] * a[:, k, None, k + 1 :]
    return a.reshape(x.shape), pivots.reshape(*batch, -1)


def _permutation(pivots: np.ndarray, rows: int) -> np.ndarray:
    """Where each row comes from, after its exchanges."""
    flat = pivots.reshape(-1, pivots.shape[-1])
    found = np.tile(np.arange(rows, dtype=np.int32), (len(flat), 1))
    for k, at in enumerate(flat.T):
        every = np.arange(len(flat))
        found[every, k], found[every, at] = found[every, at], found[every, k].copy()
    return found.reshape(*pivots.shape[:-1], rows)


def _factors(name: str, instruction: Instruction, machine) -> Callable:
    """libtpu's gives the permutation too; CUDA's counts rows from one, and says that all went well."""
    of_cuda = name.startswith("cu")

    def run(values, team) -> Value:
        both, pivots = _lu(values[0])
        both = both.astype(values[0].dtype)
        if of_cuda:
            return both, pivots + np.int32(1), _well(values[0])
        return both, pivots, _permutation(pivots, values[0].shape[-2])

    return run


def _exchanges(name: str, instruction: Instruction, machine) -> Callable:
    rows = machine.type(instruction).shape[-1]
    return lambda values, team: _permutation(values[0], rows)


def _reflections(name: str, instruction: Instruction, machine) -> Callable:
    """A triangular factor and, below it, the Householder vectors of the orthogonal one, with their scales."""

    def run(values, team) -> Value:
        packed, scales = np.linalg.qr(wide(values[0]), mode="raw")
        return packed.swapaxes(-1, -2).astype(values[0].dtype), scales.astype(values[0].dtype)

    return run


def _orthogonal(name: str, instruction: Instruction, machine) -> Callable:
    """The product of Householder reflections."""

    def run(values, team) -> Value:
        packed, scales = map(wide, values)
        rows, columns = packed.shape[-2:]
        lead = np.broadcast_shapes(packed.shape[:-2], scales.shape[:-1])
        found = np.broadcast_to(np.eye(rows, columns), (*lead, rows, columns)).astype(packed.dtype)
        for k in reversed(range(scales.shape[-1])):
            vector = np.concatenate([np.zeros((*packed.shape[:-2], k)), np.ones((*packed.shape[:-2], 1)),
                                     packed[..., k + 1 :, k]], -1)[..., None]  # fmt: skip
            along = np.conj(vector).swapaxes(-1, -2) @ found
            found = found - scales[..., k, None, None] * vector * along
        return found.astype(values[0].dtype)

    return run


def _compact(name: str, instruction: Instruction, machine) -> Callable:
    """The triangular matrix T for which I + Y T Y* is a product of reflections (Schreiber and Van Loan, 1989), from
    the upper half of Y* Y, scaled, and the scales on its diagonal."""

    def run(values, team) -> Value:
        given = wide(values[0])
        found = np.triu(given)
        for i in range(1, given.shape[-1]):
            found[..., :i, i] = (found[..., :i, :i] @ given[..., :i, i, None])[..., 0]
        return found.astype(values[0].dtype)

    return run


def _quarters(name: str, instruction: Instruction, machine) -> Callable:
    """libtpu's own: from the quarters of a symmetric matrix to its eigenvalues, in halves, and the quarters of a matrix
    whose rows are the eigenvectors."""

    def run(values, team) -> Value:
        lead = np.broadcast_shapes(*(v.shape[:-2] for v in values))
        a, b, c, d = (wide(np.broadcast_to(v, (*lead, *v.shape[-2:]))) for v in values)
        of, vectors = _eigenvectors(np.concatenate([np.concatenate([a, b], -1), np.concatenate([c, d], -1)], -2), "L")
        rows, half = np.conj(vectors.swapaxes(-1, -2)), a.shape[-1]
        found = of[..., :half], of[..., half:]
        found += tuple(part[..., at] for part in np.split(rows, [half], -2) for at in (slice(half), slice(half, None)))
        return tuple(part.astype(v.dtype) for part, v in zip(found, (values[0].real,) * 2 + (values[0],) * 4))

    return run


def _eigen(name: str, instruction: Instruction, machine) -> Callable:
    """Eigenvectors and eigenvalues of a Hermitian matrix of which one half is read, in ascending order."""
    said = re.search(r'backend_config="([01]),', instruction.attributes) or re.search(
        r"\blower = (true|false)", instruction.attributes
    )
    if said is None:
        raise NotInterpreted(f"{instruction.name}, which does not say which half of a matrix it reads")
    half: Half = "L" if said[1] in ("1", "true") else "U"
    of_cuda = name.startswith("cu")

    def run(values, team) -> Value:
        of, vectors = _eigenvectors(wide(values[0]), half)
        vectors, of = vectors.astype(values[0].dtype), of.astype(values[0].real.dtype)
        return (vectors, of, _well(values[0])) if of_cuda else (vectors, of)

    return run


def _eigenvectors(x: np.ndarray, half: Half) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues in ascending order, and eigenvectors as columns; NaN where there are none."""
    try:
        of, vectors = np.linalg.eigh(x, half)
    except np.linalg.LinAlgError:
        return np.full(x.shape[:-1], np.nan), np.full(x.shape, np.nan, x.dtype)
    return of, vectors / _sign(vectors)


def _sign(vectors: np.ndarray) -> np.ndarray:
    """The sign of the largest entry of each column."""
    largest = np.take_along_axis(vectors, np.argmax(np.abs(vectors), -2)[..., None, :], -2)
    return np.where(largest == 0, 1, largest / np.where(largest == 0, 1, np.abs(largest)))


def _singular(name: str, instruction: Instruction, machine) -> Callable:
    """What is left of the matrix, singular values, left vectors, and right ones as columns."""

    def run(values, team) -> Value:
        x = wide(values[0])
        _, of, left, right, _ = machine.type(instruction)
        full = left.shape[-1] == x.shape[-2] and right.shape[-1] == x.shape[-1]
        try:
            u, s, v = np.linalg.svd(x, full_matrices=full)
        except np.linalg.LinAlgError:
            u, s, v = (np.full((len(x), *kind.shape), np.nan, x.dtype) for kind in (left, of, right))
        v = np.conj(v.swapaxes(-1, -2))
        sign, count = _sign(u[..., : s.shape[-1]]), s.shape[-1]
        u[..., :count], v[..., :count] = u[..., :count] / sign, v[..., :count] / sign
        kind = values[0].dtype
        return values[0], s.astype(values[0].real.dtype), u.astype(kind), v.astype(kind), _well(values[0])

    return run


def _well(x: np.ndarray) -> np.ndarray:
    """Zero for each matrix: its factors were found."""
    return np.zeros(x.shape[:-2], np.int32)


# By how the call's target begins.
KERNELS: dict[str, Callable] = {
    "LuDecomposition": _factors,
    "LuRealDecompositionBlock": _factors,
    "cusolver_getrf_ffi": _factors,
    "cublas_getrf_batched_ffi": _factors,
    "cu_lu_pivots_to_permutation": _exchanges,
    "QrDecompositionBlock": _reflections,
    "Qr": _reflections,
    "cusolver_geqrf_ffi": _reflections,
    "cublas_geqrf_batched_ffi": _reflections,
    "ProductOfElementaryHouseholderReflectors": _orthogonal,
    "cusolver_orgqr_ffi": _orthogonal,
    "CompactWyHelper": _compact,
    "EighTpu": _quarters,
    "Eigh": _eigen,
    "cusolver_syevd_ffi": _eigen,
    "cusolver_gesvdj_ffi": _singular,
}
