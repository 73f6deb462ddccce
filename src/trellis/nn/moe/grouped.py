"""Products of sorted rows with one weight for each group of them."""

import importlib
from collections.abc import Sequence
from functools import partial

import jax

from trellis.named.backend import platform_of
from trellis.nn.moe.gradients import Apart, gradient_of, kept, read
from trellis.nn.moe.rows import Taken
from trellis.notation.state import sliced_by_compiler

# Modules with `multiply`, `rows_gradient` and `weights_gradient`, imported when they are needed. Other platforms, such
# as CPUs, have a loop over blocks, and so has what a compiler is to slice.
_KERNELS = {"tpu": "mosaic", "cuda": "triton"}
# Those whose kernels read weights whichever dimension lies outermost. A TPU's tiles are of the last two.
_AS_IT_LIES = ("triton",)
# Those whose kernels read rows of another array where they are.
_GATHER = ("triton",)


def gathers(a: jax.Array) -> bool:
    """Whether the kernels of the platform where a value will live gather their rows themselves, as `taken` says."""
    return _kernels(a) in _GATHER


def activates(rows: jax.Array) -> bool:
    """Whether a kernel computes what experts do between their products, `trellis.nn.moe.activations`."""
    return _kernels(rows) == "mosaic"


def _kernels(a: jax.Array) -> str:
    return "blocks" if sliced_by_compiler(a) else _KERNELS.get(platform_of(a), "blocks")


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """The first `sizes[0]` rows times `weights[0]`, the next `sizes[1]` times `weights[1]`, and so on.

    Except to complete a tile, rows past the last group are not multiplied, nor is any row with another group's weight.
    Kernels do this on TPUs and NVIDIA GPUs, a loop over blocks of rows elsewhere.

    Args:
        rows: `rows in`, sorted by group.
        weights: `groups in out`.
        sizes: `i32["groups"]`; together at most the number of rows. Rows after the last group give meaningless rows,
            which may be NaN, and get meaningless gradients.

    Returns:
        `rows out`.

    >>> import jax.numpy as jnp
    >>> rows, weights = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), 2 * jnp.ones((2, 1))])
    >>> grouped_matmul(rows, weights, jnp.array([1, 2])).ravel().tolist()
    [2.0, 4.0, 4.0]
    """
    return grouped_products(rows, (weights,), sizes)[0]


def grouped_products(
    rows: jax.Array,
    weights: Sequence[jax.Array | Apart],
    sizes: jax.Array,
    outer: Sequence[int] = (),
    taken: Taken | None = None,
) -> tuple[jax.Array, ...]:
    """`grouped_matmul` of the same rows with each of several weights: their gradients are summed where they are made.

    Args:
        rows, weights, sizes: as there; if rows are `taken`, the array that they are taken from.
        outer: which dimension of each weight lies outermost in memory, such as the one along which it was gathered;
            none is 0 for all. GPU kernels read the weight, and write its gradient, as it lies; others read rows of
            `out`, group by group, and compilers lay out a weight again before that.
        taken: which rows, if kernels gather them (`gathers`): no copy of them is written, and only kernels read them.
            Their gradient is written sorted, and summed for each row of the array; if no row is taken twice, it is
            written to where they are.
    """
    return _grouped(rows, taken, tuple(weights), sizes, *_platform(rows, outer))


def grouped_sums(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, taken: Taken, outer: Sequence[int] = ()
) -> jax.Array:
    """For each row that was `taken`, the sum of `grouped_matmul`, by kernels that gather (`gathers`): they read the
    gradient where it is, and it is not written for each row.

    Args:
        rows, weights, sizes: as there.
        taken: which row of the result each product is added to.
        outer: of this one weight, as in `grouped_products`.
    """
    return _summed(rows, weights, sizes, taken, *_platform(rows, outer))


def _platform(rows, outer):
    """The platform's kernels, and what they are told of how weights lie."""
    name = _kernels(rows)
    lying = tuple(outer) if any(outer) and name in _AS_IT_LIES else ()
    return importlib.import_module(f"trellis.nn.moe.{name}"), lying


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(rows, taken, weights, sizes, platform, lying):
    told = zip(weights, _each(lying, weights), strict=True)
    return tuple(platform.multiply(rows, read(w), sizes, **how, **_gathered(taken)) for w, how in told)


def _each(lying, weights) -> list[dict[str, int]]:
    """What else a kernel is told of each weight."""
    return [{"outer": outer} for outer in lying] or [{}] * len(weights)


def _gathered(taken, name: str = "sources") -> dict[str, jax.Array]:
    """What a kernel is told of rows that it gathers."""
    return {} if taken is None else {name: taken.index}


def _where_taken(kernel, taken, *given, **how):
    """A kernel's result for sorted rows, at the rows of the array that these were taken from."""
    if taken is None:
        return kernel(*given, **how)
    if taken.copies is None:
        return kernel(*given, **how, targets=taken.index)
    return taken.summed(kernel(*given, **how))


def _forward(rows, taken, weights, sizes, platform, lying):
    # Calls `_grouped`: a kernel by itself would be computed again by JAX even where nothing reads it.
    weights = tuple(map(kept, weights))
    return _grouped(rows, taken, weights, sizes, platform, lying), (rows, taken, weights, sizes)


def _backward(platform, lying, found, d):
    rows, taken, weights, sizes = found
    told = {"outer": lying} if lying else {}
    d_rows = _where_taken(platform.rows_gradient, taken, d, tuple(map(read, weights)), sizes, **told)
    products = zip(d, weights, _each(lying, weights), strict=True)
    of_weights = (
        gradient_of(w, platform.weights_gradient, rows, x, sizes, **how, **_gathered(taken)) for x, w, how in products
    )
    return d_rows, None, tuple(of_weights), None


_grouped.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(rows, weights, sizes, taken, platform, lying):
    return _where_taken(platform.multiply, taken, rows, weights, sizes, **_each(lying, (weights,))[0])


def _summed_forward(rows, weights, sizes, taken, platform, lying):
    return _summed(rows, weights, sizes, taken, platform, lying), (rows, weights, sizes, taken)


def _summed_backward(platform, lying, kept, d):
    rows, weights, sizes, taken = kept
    how, (told,) = {"outer": lying} if lying else {}, _each(lying, (weights,))
    d_rows = platform.rows_gradient((d,), (weights,), sizes, **how, **_gathered(taken))
    d_weights = platform.weights_gradient(rows, d, sizes, weights.dtype, **told, **_gathered(taken, "d_sources"))
    return d_rows, d_weights, None, None


_summed.defvjp(_summed_forward, _summed_backward)
