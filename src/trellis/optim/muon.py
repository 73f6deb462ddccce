"""Muon on sharded arrays: Optax's rule, with whole matrices moved to one device each."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from trellis.errors import UserError
from trellis.mesh.by_device import by_device
from trellis.mesh.route import Axes
from trellis.nn.parameters import Parameter, Role, parameters
from trellis.notation import spec_of, typeof
from trellis.notation.state import state_of
from trellis.optim.config import Muon
from trellis.optim.groups import by_group, moved, path_of, sides


def muon(config: Muon) -> optax.GradientTransformation:
    """Muon's direction for matrices, Adam's for all else: vectors, tables and the unembedding.

    A matrix is a weight of two sides (`trellis.optim.groups.sides`): `embed` and all else, or without it two axes of
    any names, of which heads and their widths count as one.

    Neither includes the learning rate or weight decay.

    Momentum is kept in the parameters' sharding. The Newton-Schulz iteration needs whole matrices, so each update is
    moved there and back. In between its matrices are whole, and sliced by their number: layers and experts stay where
    they are, and go over as many of the other devices as divide them. That is one all-to-all each way, and if there are
    enough matrices no work is done twice.

    Args:
        config: the rule.

    Raises:
        UserError: a weight has more than two sides.

    Source:
        Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/; the scale of updates after Liu et al., 2025,
        arXiv:2502.16982.
    """
    adam = optax.scale_by_adam(config.adam_beta1, config.adam_beta2, config.epsilon)
    momentum = optax.trace(config.beta, nesterov=config.nesterov)

    def rule(tree: Any) -> optax.GradientTransformation:
        """For a tree like the model, which says what its stacks count; a group of its parameters does not."""
        found = {path_of(p): sides(p) for p in parameters(tree)}
        matrices = optax.chain(momentum, _orthogonalize(config, found))
        return by_group(lambda p: "muon" if _is_matrix(p) else "adam", {"muon": matrices, "adam": adam})

    return optax.GradientTransformation(
        lambda params: rule(params).init(params),
        lambda updates, state, params=None: rule(updates).update(updates, state, params),
    )


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


def _orthogonalize(config: Muon, found: Mapping[str, tuple[tuple[int, ...], ...]]) -> optax.GradientTransformation:
    """Replaces each matrix by the nearest orthogonal one, scaled so that its elements have the given size.

    Args:
        config: the rule.
        found: the sides of each parameter, by path.
    """

    # Without momentum Optax's rule is the iteration alone, and the state that it returns is the update again.
    stack = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    rule = scale_by_muon(
        ns_steps=config.iterations, beta=0.0, eps=config.epsilon, nesterov=False, weight_dimension_numbers=stack
    )

    def whole(update: jax.Array, sides: tuple[tuple[int, ...], ...], many: tuple[int, ...]) -> jax.Array:
        order = many + sides[0] + sides[1]
        rows, columns = (math.prod(update.shape[a] for a in side) for side in sides)
        ordered = update.transpose(order)
        # One step at a time: JAX follows a sharding through one merge of axes, not through two.
        matrices = ordered.reshape(*(update.shape[a] for a in many), rows, columns)
        flat = matrices.reshape(-1, rows, columns)
        change: Any = rule.update(flat, rule.init(flat))[0]
        result = change * (config.update_rms * math.sqrt(max(rows, columns)))
        back = result.reshape(matrices.shape).reshape(ordered.shape)
        return back.transpose([order.index(a) for a in range(len(order))])

    def one(update: jax.Array, sides: tuple[tuple[int, ...], ...]) -> jax.Array:
        many = tuple(a for a in range(update.ndim) if a not in sides[0] + sides[1])
        axes = _whole_matrices(update, many)
        each = functools.partial(whole, sides=sides, many=many)
        if any(axes[1:]):  # nor through a merge of axes that are sliced behind the first
            spec = spec_of(axes)
            each = by_device(each, mesh=jax.typeof(update).sharding.mesh, in_specs=spec, out_specs=spec)
        return moved(each(moved(update, axes)), state_of(update).axes)

    def update_fn(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return {path: jax.tree.map(lambda u, p=path: one(u, found[p]), x) for path, x in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def _whole_matrices(x: jax.Array, many: tuple[int, ...]) -> Axes:
    """Whole matrices, sliced by their number: as they are, and over the other mesh axes where one of `many` divides."""
    mesh = jax.typeof(x).sharding.mesh
    sizes, state = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), state_of(x)
    axes = [slices if a in many and state.mode == "explicit" else () for a, slices in enumerate(state.axes)]
    used = {axis for slices in axes for axis in slices}
    free = [a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    over: list[list[str]] = [[] for _ in axes]
    ways = lambda a: math.prod(sizes[axis] for axis in (*axes[a], *over[a]))
    for axis in sorted((a for a in free if a not in used), key=lambda a: -sizes[a]):  # four share what two would repeat
        if (first := next((a for a in many if x.shape[a] % (sizes[axis] * ways(a)) == 0), None)) is not None:
            over[first].append(axis)
    return tuple((*slices, *sorted(more, key=free.index)) for slices, more in zip(axes, over, strict=True))
