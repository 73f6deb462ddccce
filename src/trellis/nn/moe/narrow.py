"""Experts' products in narrow numbers (`tr.Narrow`): rows and weights rounded, with one scale each.

Weights are rounded where they are and then moved; rows are rounded where they are sorted by expert, and their scale is
made from the largest element of all devices' rows. No kernel of grouped products takes numbers of eight bits, so they
are multiplied in bfloat16, which represents them exactly: only what moves is narrow.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.manual.ops import varying_axes
from trellis.named import NamedArray, NamesError
from trellis.named.narrow import TYPES, Kind, Narrow, not_again, rounded, with_one_scale
from trellis.nn.moe.grouped import grouped_matmul, grouped_products
from trellis.nn.moe.rows import Taken

Kinds = tuple[Kind | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A device's part of the weights of a narrow product.

    Attributes:
        weight: `experts in out`; only its type is used, and it gets the gradient.
        values, scale: the narrow numbers, in a type that kernels multiply.
        kind: which.
    """

    weight: jax.Array
    values: jax.Array
    scale: jax.Array
    kind: Kind


def unmarked(weights: Sequence[NamedArray | Narrow]) -> tuple[Kinds, list[NamedArray]]:
    """The kinds of narrow products that weights ask for, and the weights without their marks.

    Raises:
        NamesError: a kind in which experts' products are not made.
    """
    kinds = tuple(w.kind if isinstance(w, Narrow) else None for w in weights)
    if wrong := [kind for kind in kinds if kind is not None and (kind not in TYPES or TYPES[kind].in_blocks)]:
        able = " or ".join(kind for kind, types in TYPES.items() if not types.in_blocks)
        raise NamesError(f"narrow products of experts must be in {able}, got '{wrong[0]}', in mix: write one of these")
    return kinds, [w.weight if isinstance(w, Narrow) else w for w in weights]


def narrow_weights(weights: Sequence[NamedArray], kinds: Kinds) -> list[NamedArray]:
    """The narrow numbers of the weights that have some, each followed by its scale."""
    found = []
    for weight, kind in zip(weights, kinds, strict=True):
        if kind is not None:
            values, scale, *_ = rounded(weight.array, kind, ())
            found += [NamedArray(values, weight.names), NamedArray(scale, ())]
    return found


def held(weights: Sequence[jax.Array], kinds: Kinds, narrow: Sequence[jax.Array]) -> list[jax.Array | Held]:
    """A device's weights with their narrow numbers, which are in the order of `narrow_weights`."""
    left = iter(narrow)
    return [
        w if kind is None else Held(w, next(left).astype(_exact(w.dtype)), next(left), kind)
        for w, kind in zip(weights, kinds, strict=True)
    ]


def grouped_each(
    rows: jax.Array,
    weights: Sequence[jax.Array | Held],
    sizes: jax.Array,
    outer: Sequence[int] = (),
    taken: Taken | None = None,
) -> list[jax.Array]:
    """`grouped_matmul` of rows with several weights; rows are rounded once for all weights of one kind.

    Args:
        rows, weights, sizes: as there.
        outer, taken: as in `grouped_products`, if no weight is narrow.
    """
    kinds = {w.kind for w in weights if isinstance(w, Held)}
    narrow = {kind: _rounded_rows(lax.stop_gradient(rows), sizes, kind, gradient=False) for kind in kinds}
    wide = [w for w in weights if not isinstance(w, Held)]
    made = iter(grouped_products(rows, wide, sizes, () if kinds else outer, taken) if wide else ())
    return [
        _multiply(rows, w.weight, (*narrow[w.kind], w.values, w.scale), sizes, w.kind, (rows.dtype, w.weight.dtype))
        if isinstance(w, Held)
        else next(made)
        for w in weights
    ]


def _rounded_rows(rows: jax.Array, sizes: jax.Array, kind: Kind, *, gradient: bool) -> tuple[jax.Array, jax.Array]:
    """Rows in narrow numbers; those after the last group, which may be any number, are zeros."""
    own = (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]
    wide = jnp.where(own, rows, jnp.zeros((), rows.dtype)).astype(jnp.float32)
    return with_one_scale(wide, kind, gradient=gradient, over=tuple(varying_axes(wide)), widened=True)


# Of the exact rows and weights only the types are used, so nothing moves them.
@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _multiply(rows, weights, narrow, sizes, kind: Kind, types):
    values, scale, weight_values, weight_scale = narrow
    out = grouped_matmul(values.astype(weight_values.dtype), weight_values, sizes)
    return (out.astype(jnp.float32) * (scale * weight_scale)).astype(types[0])


def _forward(rows, weights, narrow, sizes, kind: Kind, types):
    return _multiply(rows, weights, narrow, sizes, kind, types), (narrow, sizes)


def _backward(kind: Kind, types, kept, d):
    (values, scale, weight_values, weight_scale), sizes = kept
    narrow, d_scale = _rounded_rows(d, sizes, kind, gradient=True)
    d_scale = not_again(d_scale, d)
    rows, narrow = (x.astype(weight_values.dtype) for x in (values, narrow))
    _, of_rows = jax.vjp(lambda rows: grouped_matmul(rows, weight_values, sizes), rows)
    _, of_weights = jax.vjp(lambda weights: grouped_matmul(rows, weights, sizes), weight_values)
    scales = [d_scale * weight_scale, d_scale * scale]
    if TYPES[kind].whole_sums:
        summed, scales[1] = d.astype(weight_values.dtype), scale
    else:
        summed = narrow
    gradients = zip((*of_rows(narrow), *of_weights(summed)), scales, types, strict=True)
    return *((g.astype(jnp.float32) * s).astype(dtype) for g, s, dtype in gradients), None, None


_multiply.defvjp(_forward, _backward)


def _exact(dtype) -> jnp.dtype:
    """A type that holds narrow numbers as they are, and for which there are kernels."""
    return jnp.dtype("float32") if dtype == jnp.float32 else jnp.dtype("bfloat16")
