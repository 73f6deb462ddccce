"""Lookups in the notation, of plain arrays: `take("vocab/m embed, batch/d -> batch/d embed +m", table, ids)`."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from trellis.mesh.linear import linear
from trellis.mesh.manual.einsum import one_axis_one_name, parse_einsum
from trellis.mesh.manual.ops import mark_pending, vary, varying_axes
from trellis.mesh.manual.reshard import check_slice, known_axes, refuse_left
from trellis.mesh.manual.row_sums import row_sums
from trellis.mesh.platform import adds_in_any_order
from trellis.notation import NotationError, Shape, spec_of
from trellis.notation.binding import bind_shape, left_axes, live, real_axes
from trellis.notation.state import mesh_of, mode_of, state_of

Names = tuple[str, ...]


def take_plain(text: str, table, ids):
    """Rows of a table, written with names and shardings.

    Each device looks up its own positions in the rows that it has, and nothing is moved: the rows are partial sums
    over the mesh axes that slice the dimension looked up. Negative positions count from the end; those out of range
    read zeros. Names that both have are aligned: `"batch/d vocab/m, batch/d -> batch/d +m"` is one value of each row.

    Args:
        text: the table's shape, the positions' shape, `->`, and the result's: the names that only the positions have
            stand in the place of the one that is looked up.
        table: a plain array.
        ids: a plain array of whole numbers.

    Raises:
        NotationError: the text is not such a lookup; says what it is to be.
        TypeMismatch: an array is not what the text says.
    """
    where = f"take('{text}')"
    lefts, result = parse_einsum(text, "take")
    if len(lefts) != 2:
        raise NotationError(f"a lookup takes a table and positions, got {len(lefts)} shapes, in {where}: write two")
    mesh = jax.sharding.get_abstract_mesh()
    mesh = None if mesh.empty else mesh
    if mesh is not None:
        known_axes((*lefts, result), mesh, where)
    for shape, x in zip(lefts, (table, ids), strict=True):
        bind_shape(shape, x, where, live())
    if mesh is not None:
        lefts, result = [real_axes(shape, mesh) for shape in lefts], real_axes(result, mesh)
        refuse_left((*lefts, result), where)
    rows, positions = lefts
    gone = [dim for dim in rows.dims if dim.name not in result.names]
    if len(gone) != 1:
        raise NotationError(
            "a lookup must remove exactly one name of its table, got "
            f"{', '.join(str(d.name) for d in gone) or 'none'}, in {where}: leave out the looked-up name on the right"
        )
    (name,) = gone
    i = rows.dims.index(name)
    rest = (*rows.dims[:i], *rows.dims[i + 1 :])
    aligned = tuple(dim for dim in rest if dim.name in positions.names)
    for dim in aligned:
        if dim not in positions.dims:
            raise NotationError(
                f"a name that the table and the positions share must be sliced the same way, got '{dim}' and "
                f"'{positions.dims[positions.names.index(dim.name)]}', in {where}: reshard one of them"
            )
    if left := left_axes().intersection(name.axes):
        raise NotationError(
            f"a lookup cannot move rows, got '{name}' looked up, where '{sorted(left)[0]}' is left to the surrounding "
            f"program, in {where}: take the rows outside, or add '{sorted(left)[0]}' to the axes of shard_map"
        )
    own = tuple(dim for dim in positions.dims if dim not in aligned)
    right = Shape((*rows.dims[:i], *own, *rows.dims[i + 1 :]), tuple(sorted(name.axes)))
    if right != result:
        raise NotationError(
            "a lookup's result must keep every slice and be pending over the axes that slice the looked-up name, got "
            f"'{result}' on the right, in {where}: write '-> {right}'"
        )
    one_axis_one_name(lefts, where)
    if name.axes and mode_of(mesh) == "explicit":
        raise NotationError(
            f"a lookup in a sliced dimension needs manual mode, got '{rows}' outside it, in {where}: call it in a "
            f"function under @shard_map, or name the arrays, as in take(named(table, '{rows.bare()}'), ...)"
        )
    if mesh is not None and state_of(table).mode == "manual":
        mentioned = {a for s in (*lefts, result) for a in (*s.mesh_axes, *s.pending, *s.copied)}
        table, ids = (check_slice(x, s, where, mentioned=mentioned) for x, s in zip((table, ids), lefts, strict=True))
        # A copy meets slices: from here on it differs along that axis, and its gradient is summed there.
        table = vary(table, tuple(a for a in rows.copied if a in positions.mesh_axes))
    lookup = functools.partial(rows_of, axis=i)
    if aligned:
        words = rows.names, positions.names, right.names
        lookup = lambda table, ids: aligned_rows(table, [_wide(ids)], (name.name,), words)
    if left_axes() and AxisType.Explicit in mesh.axis_types:
        lookup = _on_left(lookup, (rows.names, positions.names, right.names))
    if not name.axes or mode_of(mesh) != "manual":
        return lookup(table, ids)
    return mark_pending(rows_here(table, ids, i, name.axes, lookup), name.axes, result)


def _on_left(lookup, words: tuple[Names, Names, Names]):
    """A lookup by each device along the mesh axes that are left to the surrounding program.

    JAX (0.10.2) differentiates neither its own gather there nor a `shard_map` in another: the gradient is written out.
    """

    def on(table, ids):
        axes = [state_of(x).axes for x in (table, ids)]
        lie = [dict(zip(names, each, strict=True)) for names, each in zip(words, axes)]
        lie.append({name: lie[0].get(name) or lie[1].get(name, ()) for name in words[2]})
        specs = [spec_of([each[name] for name in names], (), ()) for names, each in zip(words, lie)]
        mapped = functools.partial(jax.shard_map, axis_names=left_axes())

        def back(table, ids, gradient):
            return jax.vjp(lambda table: lookup(table, ids), table)[1](gradient)

        run = mapped(lambda table, ids: lookup(table, ids), in_specs=tuple(specs[:2]), out_specs=specs[2])
        pull = mapped(back, in_specs=tuple(specs), out_specs=(specs[0],))
        fixed = jax.lax.stop_gradient(table), ids
        return linear(lambda fixed, table: run(table, fixed[1]), lambda fixed, g: pull(*fixed, g)[0])(fixed, table)

    return on


def rows_here(table, ids, axis: int, sliced: tuple[str, ...], lookup=None):
    """The rows that this device has, zeros for those of other devices.

    Args:
        table: one device's slice along `axis`, over the mesh axes `sliced`.
        ids: positions in the whole table.
        axis: the dimension looked up.
        sliced: the mesh axes, major to minor.
        lookup: `lookup(table, ids)`, where it is not rows along `axis`.
    """
    count = table.shape[axis]
    local = from_start(ids, count * jax.lax.axis_size(sliced)) - jax.lax.axis_index(sliced) * count
    # Rows of other devices are out of range here, and so are positions before this device's first.
    local = jnp.where(local < 0, count, local)
    rows = functools.partial(rows_of, axis=axis) if lookup is None else lookup
    if local.size != 1:
        return rows(table, local)
    # JAX 0.10.2's XLA does not drop a single update out of range, but writes it over another row, if what it is added
    # to is a slice itself (docs/published-bugs.md). So the gradient of a single position is scattered within range.
    here = local < count
    found = rows(table, jnp.where(here, local, 0))
    return jnp.where(here.reshape(()), found, jnp.zeros((), found.dtype))


def aligned_rows(table, ids, looked_up: Names, words: tuple[Names, Names, Names], sharding=None):
    """Looks up values along names, separately in each place of the names that the table and the positions share.

    Args:
        table: any array.
        ids: arrays of positions that are broadcast together, one for each name that is looked up.
        looked_up: these names.
        words: the names of the table, the positions and the result.
        sharding: of the values in one such place, the positions' own names first, where JAX asks for it.
    """
    names, id_names, out = words
    rest = [n for n in names if n not in looked_up]
    aligned = [n for n in rest if n in id_names]
    own = [n for n in id_names if n not in aligned]
    free = [n for n in rest if n not in aligned]
    table = _with_a_row(table, [names.index(n) for n in looked_up])
    table = jnp.transpose(table, [names.index(n) for n in (*aligned, *looked_up, *free)])
    shape = jnp.broadcast_shapes(*(i.shape for i in ids))
    ids = [jnp.transpose(jnp.broadcast_to(i, shape), [id_names.index(n) for n in (*aligned, *own)]) for i in ids]
    at = lambda table, *ids: table.at[ids].get(mode="fill", fill_value=0, out_sharding=sharding)
    for _ in aligned:
        at = jax.vmap(at)
    made = (*aligned, *own, *free)
    return jnp.transpose(summed_wide(at, table, *ids), [made.index(n) for n in out])


def is_narrow(x: Any) -> bool:
    """Whether something is an array of floats with 16 bits, in which a long sum ends before its end."""
    return getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)


def summed_wide(lookup, table, *ids):
    """A lookup, whose gradient is summed in float32 if the table's type is narrower.

    In eight bits of mantissa a sum of ones ends at 256: the gradient of a row that is read more often would be lost.

    Args:
        lookup: `lookup(table, *ids)`, linear in the table.
        table: any array.
        ids: arrays.
    """
    if not is_narrow(table):
        return lookup(table, *ids)
    like = jax.typeof(table)

    def back(ids, gradient):
        wide = like.update(dtype=jnp.dtype(jnp.float32), weak_type=False)
        (summed,) = jax.linear_transpose(lambda table: lookup(table, *ids), wide)(gradient.astype(jnp.float32))
        return summed.astype(like.dtype)

    def mapped(ids, table, dims):
        over = jax.vmap(lookup, in_axes=(dims[1], *dims[0]))
        return summed_wide(over, table, *ids)

    return linear(lambda ids, table: lookup(table, *ids), back, mapped=mapped)(ids, table)


def from_start(ids, size: int):
    """Positions counted from 0, as 32-bit integers; those out of range at either end become `size`."""
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        return jnp.minimum(ids.astype(jnp.uint32), jnp.uint32(size)).astype(jnp.int32)
    ids = ids.astype(jnp.int32)
    ids = jnp.where(ids < 0, ids + size, ids)
    return jnp.where((ids < 0) | (ids >= size), size, ids)


def rows_of(table, ids, axis: int, sharding=None, *, whole: bool = True):
    """The rows at positions, zeros for those out of range, from what one device has.

    Their gradient is summed in one order also where scattered rows are added as they come (see `row_sums`).

    Args:
        table: any array.
        ids: whole numbers.
        axis: the dimension looked up.
        sharding: of the rows, where JAX asks for it.
        whole: whether this device has all that it looks up. If not, the compiler adds up the gradient.
    """
    before, table = (slice(None),) * axis, _with_a_row(table, [axis])
    if sharding is None:
        at = lambda table, ids: jnp.take(table, ids, axis=axis, mode="fill", fill_value=0)
    else:
        at = lambda table, ids: table.at[(*before, ids)].get(mode="fill", fill_value=0, out_sharding=sharding)
    real = jnp.issubdtype(table.dtype, jnp.floating)
    if not (whole and adds_in_any_order(table) and real and ids.size > 1 and table.size):
        return summed_wide(at, table, _wide(ids))
    table = vary(table, varying_axes(ids))
    in_order = _in_order(at, axis, jax.typeof(table), placed=sharding is not None)
    return in_order(from_start(ids, table.shape[axis]), table)


def _with_a_row(table, axes: Sequence[int]):
    """A table that has a row of zeros along these dimensions if it has none, in each slice: JAX looks nothing up in
    such a one."""
    if all(table.shape[i] for i in axes):
        return table
    parts = [math.prod(mesh_of(table).shape[axis] for axis in mine) for mine in state_of(table).axes]
    more = [(0, parts[i] if i in axes and not size else 0, 0) for i, size in enumerate(table.shape)]
    return jax.lax.pad(table, jnp.zeros((), table.dtype), more)


def _in_order(at, axis: int, like, *, placed: bool):
    """A lookup in a table of a type, whose gradient is summed by `row_sums`, and placed as the table is if asked."""

    def back(ids, gradient):
        inner = tuple(range(axis, axis + ids.ndim))
        rows = jnp.moveaxis(gradient, inner, tuple(range(ids.ndim)))
        rest = rows.shape[ids.ndim :]
        sums = row_sums(ids.reshape(-1), rows.reshape(ids.size, -1), like.shape[axis])
        sums = jnp.moveaxis(sums.astype(like.dtype).reshape(-1, *rest), 0, axis)
        return jax.reshard(sums, like.sharding) if placed else sums

    def mapped(ids, table, dims):
        of_ids, of_table = dims
        if of_table is None:  # more positions in one table
            found = _in_order(at, axis, like, placed=placed)(jnp.moveaxis(ids, of_ids, 0), table)
            return jnp.moveaxis(found, axis, 0)
        over = jax.vmap(at, in_axes=(of_table, of_ids))
        pull = jax.vmap(back, in_axes=(of_ids, 0), out_axes=of_table)
        return linear(lambda ids, table: over(table, ids), pull)(ids, table)

    again = linear(back, lambda ids, gradient: at(gradient.astype(like.dtype), ids))
    return linear(lambda ids, table: at(table, ids), again, mapped=mapped)


def _wide(ids):
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
