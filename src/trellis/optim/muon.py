"""Muon on sharded arrays: Optax's rule, with whole matrices moved to one device each."""

import dataclasses
import math
from typing import Any

import jax
import optax
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from trellis.errors import UserError
from trellis.mesh.route import Axes
from trellis.nn.parameters import Parameter, Role
from trellis.notation import typeof
from trellis.notation.state import state_of
from trellis.optim.config import Muon
from trellis.optim.groups import by_group, label, moved, sides


def muon(config: Muon) -> optax.GradientTransformation:
    """Muon's direction for matrices, Adam's for all else: vectors, tables and the unembedding.

    A matrix is a weight of two sides (`trellis.optim.groups.sides`): `embed` and all else, or without it two axes of
    any names, of which heads and their widths count as one.

    Neither includes the learning rate or weight decay.

    Momentum is kept in the parameters' sharding. The Newton-Schulz iteration needs whole matrices, so each update is
    moved there and back. In between, its leading axis, the layers, is sliced over as many devices as divide it, and its
    matrices are whole. That is one all-to-all each way, and if there are enough layers no work is done twice.

    Args:
        config: the rule.

    Raises:
        UserError: a weight has more than two sides.

    Source:
        Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; the scale of updates after Liu et al., 2025,
        arXiv:2502.16982.
    """
    adam = optax.scale_by_adam(config.adam_beta1, config.adam_beta2, config.epsilon)
    matrices = optax.chain(
        optax.trace(config.beta, nesterov=config.nesterov), _orthogonalize(config.iterations, config.update_rms)
    )

    return by_group(lambda p: "muon" if _is_matrix(p) else "adam", {"muon": matrices, "adam": adam})


def _is_matrix(p: Parameter) -> bool:
    if p.role != Role.WEIGHT or "vocab" in p.names:
        return False
    if len(sides(p)) > 2:
        raise UserError(
            "A matrix has two sides for Muon: `embed` and all else, or two axes, heads and their widths being one.",
            seen=f"{typeof(p.leaf)} at `{p.path}`",
            where="the tree given to the optimizer",
            fix="name the width of the model `embed`, or give the weight to another rule with optax.partition",
        )
    return len(sides(p)) == 2


@dataclasses.dataclass(frozen=True)
class _Sides:
    """The result of `sides`, as a leaf of a tree."""

    axes: tuple[tuple[int, ...], ...]


def _orthogonalize(iterations: int, update_rms: float) -> optax.GradientTransformation:
    """Replaces each matrix by the nearest orthogonal one, scaled so that its elements have the given size."""

    # Without momentum Optax's rule is the iteration alone, and the state that it returns is the update again.
    stack = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    rule = scale_by_muon(ns_steps=iterations, beta=0.0, nesterov=False, weight_dimension_numbers=stack)

    def one(update: jax.Array, sides: tuple[tuple[int, ...], ...]) -> jax.Array:
        many = tuple(a for a in range(update.ndim) if a not in sides[0] + sides[1])
        order = many + sides[0] + sides[1]
        rows, columns = (math.prod(update.shape[a] for a in side) for side in sides)
        ordered = moved(update, _whole_matrices(update, sliced=many[:1] == (0,))).transpose(order)
        # One step at a time: JAX follows a sharding through one merge of axes, not through two.
        matrices = ordered.reshape(*(update.shape[a] for a in many), rows, columns)
        flat = matrices.reshape(-1, rows, columns)
        change: Any = rule.update(flat, rule.init(flat))[0]
        result = change * (update_rms * math.sqrt(max(rows, columns)))
        back = result.reshape(matrices.shape).reshape(ordered.shape)
        back = back.transpose([order.index(a) for a in range(len(order))])
        return moved(back, state_of(update).axes)

    def update_fn(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        found = label(updates, lambda p: _Sides(sides(p)))
        return jax.tree.map(lambda s, u: one(u, s.axes), found, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def _whole_matrices(x: jax.Array, *, sliced: bool) -> Axes:
    """Slices the leading axis, if it may be `sliced`, over as many mesh axes as divide it, and nothing else."""
    mesh = jax.typeof(x).sharding.mesh
    axes, parts = [], 1
    for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
        if sliced and kind == AxisType.Explicit and x.shape[0] % (parts * size) == 0:
            axes.append(axis)
            parts *= size
    return (tuple(axes), *[()] * (x.ndim - 1))
