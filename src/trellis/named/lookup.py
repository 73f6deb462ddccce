"""Table lookup whose collectives are known: each device looks up the rows that it holds."""

import jax
import jax.numpy as jnp

from trellis.mesh.manual.ops import mark_pending
from trellis.mesh.reshard import place
from trellis.named.array import NamedArray
from trellis.named.placing import assign, bring
from trellis.notation import spec_of
from trellis.notation.state import state_of


def lookup(x: NamedArray, name: str, ids: NamedArray) -> NamedArray:
    """Rows of `x` along `name` at `ids`, with partial sums over the mesh axes that slice `name`."""
    rest = tuple(n for n in x.names if n != name)
    names = (*rest, *ids.names)
    i = x.index(name)
    out_names = (*rest[:i], *ids.names, *rest[i:])
    where = assign([NamedArray(x.array, x.names, x.slices), ids], (name, *names))
    mode = state_of(x.array).mode
    if where is None or mode == "auto" or not any(where.values()):
        table, held = x.array, state_of(x.array)
        if mode == "explicit" and held.copied and not held.pending:
            # Nothing is sliced here, so that the copies have no other operand to sum their gradients with: whole rows.
            table = place(table, held.axes, (), frozenset(), names=x.names)
        return NamedArray(_rows(table, ids.array, i), out_names)
    if mode == "manual":
        return _manual(x, name, ids, where[name], out_names)
    table = bring(x, where)
    ids = bring(ids, where)
    pending = where[name]
    body = _body(i, pending)
    specs = tuple(spec_of(state_of(a.array).axes, (), state_of(a.array).copied) for a in (table, ids))
    out = spec_of([where[n] for n in out_names], pending)
    if not _all_explicit():
        return NamedArray(body(table.array, ids.array), out_names)
    array = jax.shard_map(body, in_specs=specs, out_specs=out)(table.array, ids.array)
    return NamedArray(array, out_names)


def _all_explicit() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


def _rows(table, ids, axis: int):
    return jnp.take(table, ids, axis=axis, mode="fill", fill_value=0)


def _body(axis: int, sliced: tuple[str, ...]):
    def rows(table, ids):
        if not sliced:
            return _rows(table, ids, axis)
        first = jnp.int32(0)
        for mesh_axis in sliced:
            first = first * jax.lax.axis_size(mesh_axis) + jax.lax.axis_index(mesh_axis)
        local = ids.astype(jnp.int32) - first * table.shape[axis]
        # Negative positions count from the end in NumPy: send them out of range instead.
        local = jnp.where(local < 0, table.shape[axis], local)
        return mark_pending(_rows(table, local, axis), sliced)

    return rows


def _manual(x, name, ids, sliced, out_names):
    slices = {**dict(zip(x.names, x.slices, strict=False)), **dict(zip(ids.names, ids.slices, strict=False))}
    array = _body(x.index(name), sliced)(x.array, ids.array)
    return NamedArray(array, out_names, tuple(slices.get(n, ()) for n in out_names) if slices else ())
