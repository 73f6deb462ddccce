"""Products of sorted rows with one weight for each group of them."""

import importlib
from collections.abc import Sequence
from functools import partial

import jax

from trellis.named.backend import platform_of

# Modules with `multiply`, `rows_gradient` and `weights_gradient`, imported where they are needed. On other platforms,
# as on a CPU, a loop over blocks.
_KERNELS = {"tpu": "mosaic", "cuda": "triton"}
# Of these, whose kernels read weights whichever dimension lies outermost. A TPU's tiles are of the last two.
_AS_IT_LIES = ("triton",)


def grouped_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """The first `sizes[0]` rows times `weights[0]`, the next `sizes[1]` times `weights[1]`, and so on.

    Rows past the last group are not multiplied, nor any row with another group's weight, but for what completes a
    tile: by kernels on TPUs and NVIDIA GPUs, by a loop over blocks of rows elsewhere.

    Args:
        rows: `rows in`, sorted by group.
        weights: `groups in out`.
        sizes: `i32["groups"]`; together at most the number of rows. Rows after the last group give rows of no meaning,
            any number or none, and get gradients of no meaning.

    Returns:
        `rows out`.

    >>> import jax.numpy as jnp
    >>> rows, weights = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), 2 * jnp.ones((2, 1))])
    >>> grouped_matmul(rows, weights, jnp.array([1, 2])).ravel().tolist()
    [2.0, 4.0, 4.0]
    """
    return grouped_products(rows, (weights,), sizes)[0]


def grouped_products(
    rows: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array, outer: Sequence[int] = ()
) -> tuple[jax.Array, ...]:
    """The same rows with several weights, `grouped_matmul` of each: their gradients are summed where they are made.

    Args:
        rows, weights, sizes: as there.
        outer: of each weight, which of its dimensions lies outermost in memory, as the one does along which it was
            gathered; none is 0 for all. Kernels for GPUs read it, and write its gradient, as it lies; others read rows
            of `out`, group by group, and compilers lay a weight out anew before that.
    """
    name = _KERNELS.get(platform_of(rows), "blocks")
    lying = tuple(outer) if any(outer) and name in _AS_IT_LIES else ()
    return _grouped(rows, tuple(weights), sizes, importlib.import_module(f"trellis.nn.moe.{name}"), lying)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(rows, weights, sizes, platform, lying):
    return tuple(platform.multiply(rows, w, sizes, **how) for w, how in zip(weights, _each(lying, weights)))


def _each(lying, weights) -> list[dict[str, int]]:
    """Of each weight, what a kernel is told besides."""
    return [{"outer": outer} for outer in lying] or [{}] * len(weights)


def _forward(rows, weights, sizes, platform, lying):
    # A call again: a kernel that stood here by itself JAX would compute anew where nothing reads it.
    return _grouped(rows, weights, sizes, platform, lying), (rows, weights, sizes)


def _backward(platform, lying, kept, d):
    rows, weights, sizes = kept
    d_rows = platform.rows_gradient(d, weights, sizes, **({"outer": lying} if lying else {}))
    products = zip(d, weights, _each(lying, weights), strict=True)
    return d_rows, tuple(platform.weights_gradient(rows, x, sizes, w.dtype, **how) for x, w, how in products), None


_grouped.defvjp(_forward, _backward)
