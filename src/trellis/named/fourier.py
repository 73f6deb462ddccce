"""Fourier transforms on slices: each device transforms whole rows of its own.

XLA (JAX 0.10.2) partitions a transform wrongly: some programs do not compile, some do not run, and if slices along the
transformed dimension are shorter than the number of devices, the process ends (docs/published-bugs.md, 45). So a
transform is lowered as a program of one device, on rows that are gathered first where their own dimension is sliced.
Types say what is sliced; along mesh axes that the compiler slices by, every device transforms everything, as XLA does.
"""

import functools
from collections.abc import Callable

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core.primitives import fft_p
from jax.interpreters import mlir
from jax.sharding import AxisType

from trellis._compat import lower_by


def transform_own_rows() -> None:
    """Lowers Fourier transforms in this way, also those of plain arrays and in gradients."""
    lower_by((fft_p,), _by_rows)


def _by_rows(rule: Callable) -> Callable:
    """A rule of lowering for a transform, by JAX's own for whole arrays."""

    def lowered(ctx, x, **params):
        mesh = ctx.avals_in[0].sharding.mesh
        free = {a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Manual}
        if not any(mesh.shape[a] > 1 for a in free):
            alone = mesh.size == 1 or "cpu" not in (ctx.platforms or ctx.module_context.platforms)
            return rule(ctx, x, **params) if alone else _in_rows(rule, ctx, x, **params)
        (before,), (after,) = ([aval.sharding.spec for aval in avals] for avals in (ctx.avals_in, ctx.avals_out))
        kept = len(before) - len(params["fft_lengths"])
        rows = jax.P(*before[:kept], *[None] * len(params["fft_lengths"]))
        local = jax.shard_map(
            functools.partial(fft_p.bind, **params), mesh=mesh, in_specs=rows, out_specs=rows, axis_names=free
        )

        def transformed(x):
            return jax.reshard(local(jax.reshard(x, rows)), after)

        with jax.sharding.use_abstract_mesh(mesh):
            return mlir.lower_fun(transformed, multiple_results=False)(ctx, x)

    return lowered


def _in_rows(rule: Callable, ctx, x, **params):
    """A device's own transform, of an array that lies in memory row by row to one that does.

    The CPU's kernel takes no other, and XLA lays both out as an all-gather beside them would like it.
    """
    as_rows = mlir.lower_fun(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), multiple_results=False)
    (x,) = as_rows(ctx.replace(avals_out=ctx.avals_in), x)
    return as_rows(ctx.replace(avals_in=ctx.avals_out), *rule(ctx, x, **params))
