"""Delayed scales: the largest elements that narrow products met in earlier steps, as part of the training state.

A scale is made from the largest of them, so that an array can be rounded without being read first (as in Transformer
Engine; Micikevicius et al., 2022, arXiv:2209.05433). They are maxima over the whole array, over all devices and all
microbatches, so they do not depend on the mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp

from trellis.named import NamedArray, zeros
from trellis.named.narrow import FACTORS
from trellis.nn import Precision
from trellis.nn.parameters import parameters

Scales = dict[str, NamedArray]


def no_scales(model: Any, precision: Precision) -> Scales:
    """For each weight whose products have delayed scales, by path: `f32["layers factor history"]`, all zero, which
    makes the scales of the first steps current ones."""
    if not precision.amax_history:
        return {}
    made = {}
    for p in parameters(model):
        if precision.product_of(p) in ("fp8", "int8"):
            counted = {name: p.leaf.shape[name] for name in p.names[: p.counting]}
            made[p.path] = zeros({**counted, "factor": len(FACTORS), "history": precision.amax_history})
    return made


def largest_of(scales: Scales) -> Scales:
    """The elements from which a step makes its scales: `f32["layers factor"]`."""
    return {path: kept.max("history") for path, kept in scales.items()}


def in_range(met: Scales) -> jax.Array:
    """Whether all that a step met is finite, `bool[""]`. What is not may show nowhere else: a delayed scale clips
    infinity, and int8 makes a number of what is none."""
    bad = [jnp.max((~jnp.isfinite(new.array)).astype(jnp.float32)) for new in met.values()]
    return jnp.stack(bad).max() == 0


def rolled(scales: Scales, met: Scales) -> Scales:
    """The scales with what a step met in place of what the oldest step met. If that is not finite, the newest kept
    value is repeated: a scale that is not finite would make every later step so."""

    def one(kept: NamedArray, new: NamedArray) -> NamedArray:
        finite = jnp.where(jnp.isfinite(new.array), new.array, kept.array[..., 0])
        return kept.with_array(jnp.concatenate([finite[..., None], kept.array[..., :-1]], axis=-1))

    return {path: one(kept, met[path]) for path, kept in scales.items()}
