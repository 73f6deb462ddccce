"""Grouped products of experts: against float32 on the CPU, and alone against what their operations take at least."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from alone import bound_of, say
from checks import KERNEL_ERROR, difference, hold
from timing import products_dtype, seconds_of

from trellis.nn.moe import grouped_matmul

WORKS = ("check_grouped", "grouped_alone")


def loads(rows: int, groups: int) -> dict[str, np.ndarray]:
    """How many rows each group has: as even as can be, drawn, one with most of them and some with none, not all rows.

    >>> {name: sizes.tolist() for name, sizes in loads(10, 3).items() if name != "drawn"}
    {'even': [4, 3, 3], 'one group': [0, 10, 0], 'few rows': [1, 1, 1]}
    """
    drawn = np.random.default_rng(0)
    even = np.full(groups, rows // groups) + (np.arange(groups) < rows % groups)
    found = {"even": even, "drawn": drawn.multinomial(rows, drawn.dirichlet(np.ones(groups)))}
    found["one group"] = np.where(np.arange(groups) == groups // 2, rows, 0)
    return found | {"few rows": np.full(groups, max(1, rows // groups // 3))}


def check_grouped(findings: Any, *, shapes: list[tuple[int, int, int, int]]) -> None:
    """Products of sorted rows and both gradients, for several loads, against those of the CPU in float32.

    Args:
        findings: where it goes.
        shapes: rows, inner, columns, groups.
    """
    device, host, errors = jax.devices()[0], jax.devices("cpu")[0], {}
    for rows, inner, columns, groups in shapes:
        arrays = _arrays(rows, inner, columns, groups)
        for load, sizes in loads(rows, groups).items():
            there = int(sizes.sum())
            right = _all_three(host, [a.astype(jnp.float32) for a in arrays], sizes)
            got = _all_three(device, arrays, sizes)
            for what, one, other in zip(("out", "d rows", "d weights"), got, right):
                kept = slice(None) if what == "d weights" else slice(there)
                errors[f"{rows} rows, {groups} groups, {load}, {what}"] = difference(one[kept], other[kept])
    findings.tell(errors=errors)
    hold(findings, {name: (error, KERNEL_ERROR) for name, error in errors.items()})


def _arrays(rows: int, inner: int, columns: int, groups: int) -> list[jax.Array]:
    """Rows, weights and the gradient of the result."""
    shapes = (rows, inner), (groups, inner, columns), (rows, columns)
    scaled = lambda n, shape: (jax.random.normal(jax.random.key(n), shape) / inner**0.5).astype(products_dtype())
    return [scaled(n, shape) for n, shape in enumerate(shapes)]


def _products(rows, weights, d, sizes):
    """The product and the gradients of rows and weights."""
    made, pull = jax.vjp(lambda rows, weights: grouped_matmul(rows, weights, sizes), rows, weights)
    return made, *pull(d)


def _all_three(device, arrays: list, sizes: np.ndarray) -> tuple:
    with jax.default_device(device):  # which kernels are chosen by
        return jax.jit(_products)(*jax.device_put((*arrays, jnp.asarray(sizes, jnp.int32)), device))


def grouped_alone(findings: Any, *, shapes: list[tuple[int, int, int, int]], at_least: float) -> None:
    """The three products in bfloat16 for an even load and for a drawn one, each measured for so many seconds."""
    rows = []
    only = {  # each result alone: XLA leaves out what is not read
        "forward": lambda *given: _products(*given)[0],
        "d rows": lambda *given: _products(*given)[1],
        "d weights": lambda *given: _products(*given)[2],
    }
    for count, inner, columns, groups in shapes:
        x, weights, d = _arrays(count, inner, columns, groups)
        flops, moved = 2.0 * count * inner * columns, x.nbytes + weights.nbytes + d.nbytes
        for load in ("even", "drawn"):
            sizes = jnp.asarray(loads(count, groups)[load], jnp.int32)
            for which, fn in only.items():
                seconds = seconds_of(jax.jit(fn), x, weights, d, sizes, at_least=at_least)
                what = f"{count} rows, {inner} to {columns}, {groups} groups, {load}, {which}"
                rows.append({"what": what, **bound_of(flops, moved, seconds)})
                findings.tell(rows=rows)
    say(findings)
