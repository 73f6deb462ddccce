"""Muon on sharded arrays: Optax's rule, with whole matrices moved to one device each."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from .config import Muon
from .groups import Parameter, label


def muon(config: Muon, exclude: Sequence[str] = ("vocab", "pos")) -> optax.GradientTransformation:
    """Muon's direction for matrices, Adam's for all else; neither has a learning rate or weight decay yet.

    Momentum is kept in the parameters' sharding. The Newton-Schulz iteration needs whole matrices: each update is moved
    so that the leading axis, the layers, is sliced over as many devices as divide it and its matrices are whole, and
    moved back. That is one all-to-all each way, and no device does another's work where the layers suffice.

    Args:
        config: the rule.
        exclude: matrices with one of these in their path or among their axes are left to Adam.

    Source:
        Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; the scale of updates after Liu et al., 2025,
        arXiv:2502.16982.
    """
    adam = optax.scale_by_adam(config.adam_beta1, config.adam_beta2, config.epsilon)
    matrices = optax.chain(
        optax.trace(config.beta, nesterov=config.nesterov), _orthogonalize(config.iterations, config.update_rms)
    )

    def labels(params: Any) -> Any:
        return label(params, lambda p: "muon" if _is_matrix(p) and not p.matches(exclude) else "adam")

    return optax.partition({"muon": matrices, "adam": adam}, labels)


def _is_matrix(p: Parameter) -> bool:
    return p.ndim - p.counting >= 2


def _dimensions(p: Parameter) -> MuonDimensionNumbers:
    """The two sides of a matrix: `embed` against all else where that is an axis, so heads are one side together."""
    axes = range(p.counting, p.ndim) if p.names else range(p.ndim - 2, p.ndim)
    first = p.names.index("embed") if "embed" in p.names[p.counting :] else axes[0]
    return MuonDimensionNumbers((first,), tuple(a for a in axes if a != first))


def _orthogonalize(iterations: int, update_rms: float) -> optax.GradientTransformation:
    """Replaces each matrix by the nearest orthogonal one, scaled so that its elements have the given size."""

    def one(update: jax.Array, dimensions: MuonDimensionNumbers) -> jax.Array:
        # Without momentum Optax's rule is the iteration alone, and the state that it returns is the update again.
        rule = scale_by_muon(ns_steps=iterations, beta=0.0, nesterov=False, weight_dimension_numbers=dimensions)
        before = jax.typeof(update).sharding
        whole = _reshard(update, _whole_matrices(update))
        result, _ = rule.update(whole, rule.init(whole))
        sides = [jnp.prod(jnp.asarray([update.shape[a] for a in side])) for side in dimensions]
        scale = update_rms * jnp.sqrt(jnp.maximum(*sides).astype(update.dtype))
        return _reshard(result * scale, before)

    def update_fn(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        dimensions = label(updates, _dimensions)
        is_dimensions = lambda x: isinstance(x, MuonDimensionNumbers)
        return jax.tree.map(lambda d, u: one(u, d), dimensions, updates, is_leaf=is_dimensions), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def _reshard(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    return x if sharding is None or jax.typeof(x).sharding == sharding else jax.reshard(x, sharding)


def _whole_matrices(x: jax.Array) -> NamedSharding:
    """The leading axis over as many mesh axes as divide it, and nothing else sliced."""
    mesh = jax.typeof(x).sharding.mesh
    axes, parts = [], 1
    for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        if x.ndim > 2 and kind == AxisType.Explicit and x.shape[0] % (parts * size) == 0:
            axes.append(axis)
            parts *= size
    return NamedSharding(mesh, PartitionSpec(*([tuple(axes) or None] + [None] * (x.ndim - 1))))
