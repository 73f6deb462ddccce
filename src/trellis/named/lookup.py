"""Lookups whose collectives are known: each device looks up the rows that it holds."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trellis._compat import is_tracer, refuses_copies
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import current_layout
from trellis.mesh.manual.ops import mark_pending, vary, varying_axes
from trellis.mesh.manual.take import aligned_rows, rows_here, rows_of
from trellis.mesh.reshard import place
from trellis.named.arguments import has_keys
from trellis.named.array import NamedArray
from trellis.named.axis import NamesError
from trellis.named.operand import check_contained, check_sizes, on_one_mesh, types_of, union
from trellis.named.placing import (
    Assignment,
    assign,
    bring,
    from_slices,
    missing_axes,
    move,
    one_axis_one_name,
    outside,
    own_mesh,
    settle_selected,
    whole,
    widen,
)
from trellis.notation import spec_of
from trellis.notation.state import sharding_on, state_of

Words = tuple[str, ...]


def lookup(x: NamedArray, positions: dict[str, NamedArray], what: str) -> NamedArray:
    """The values of `x` at positions along one name or several.

    Names that both `x` and the positions have are aligned: each place looks up its own row. The positions' other names
    stand in the place of the first name that is looked up. Along one sliced name each device looks up the rows that it
    holds, and the partial sums are settled; several names are gathered first.

    Args:
        x: any named array.
        positions: for each name that is looked up, named positions, which broadcast against each other by name.
        what: the operation, for messages.

    Raises:
        NamesError: the positions do not broadcast, or a name has two sizes.
    """
    looked_up, ids = tuple(positions), list(positions.values())
    check_sizes(ids, what)
    check_contained(ids, union(ids), what, 'for all combinations look up one after the other, x["a", ids]["b", others]')
    plan = _Plan(x.names, looked_up, union(ids))
    check_sizes([_renamed(x, plan), *ids], what)
    x, *ids = on_one_mesh([x, *ids], what)
    together = len(looked_up) > 1 or not has_zero(x)
    if together:
        x = whole(x, looked_up, what)
    mode = state_of(x.array).mode
    if mode == "manual":
        return _manual(x, ids, plan, what)
    where = _where(x, ids, plan)
    if where and together:
        where |= dict.fromkeys(plan.renamed, ())
    held = state_of(x.array)
    if where is None or mode == "auto" or not any(where.values()):
        table = x.array
        if mode == "explicit" and plan.aligned:  # mapped over, so both must be in one place
            table, ids = _bring(x, plan, where).array, [i.with_array(bring(i, where).array) for i in ids]
        elif mode == "explicit" and outside(x):  # whole to the mapped program: the compiler would gather it unsaid
            table = _bring(x, plan, where, copies=False).array
        elif mode == "explicit" and held.copied and not held.pending:
            # Nothing is sliced here, so the copies have no other operand to sum their gradients with: whole rows.
            table = place(table, held.axes, (), frozenset(), names=x.names)
        array = plan.rows(table, *(plan.widened(i) for i in ids), where={} if mode == "explicit" else None)
        return settle_selected(NamedArray(array, plan.out), plan.looked_up)
    ids = [NamedArray(bring(i, where).array, i.names) for i in ids]
    pending = () if together else where[plan.renamed[0]]
    layout = current_layout()
    if (layout is not None and layout.mapped) or not all(i.array.size for i in ids):
        # JAX 0.10.2 to 0.12.0 has no gradient of a `shard_map` that is mapped over slices, and 0.12 no pending sum of
        # an empty array: the compiler partitions.
        return _partitioned(x, ids, plan, where)
    arrays = [_bring(x, plan, where).array, *(plan.widened(i) for i in ids)]
    out = spec_of([where[n] for n in plan.out], pending)
    specs = tuple(spec_of(state_of(a).axes, (), state_of(a).copied) for a in arrays)
    try:
        array = _run(x, plan, pending, specs, out, arrays)
    except (NotImplementedError, ValueError) as error:
        # Nor can it map over what begins a pending sum, or over copies, along a name that is whole.
        if isinstance(error, ValueError) and not refuses_copies(error):
            raise
        return _partitioned(x, ids, plan, where)
    return settle_selected(NamedArray(array, plan.out), plan.looked_up)


def has_zero(x: NamedArray) -> bool:
    """Whether devices can give zeros for the rows of others, as scales of narrow numbers (e8m0) and keys have none."""
    return x.dtype != jnp.float8_e8m0fnu and not has_keys(x)


def row(x: NamedArray, name: str, position: int) -> NamedArray:
    """The values at one position of a name that is sliced, in explicit mode: one device's row and the others' zeros are
    partial sums, which are settled. Nothing else moves."""
    axes = dict(zip(x.names, state_of(x.array).axes, strict=True))
    plan = _Plan(x.names, (name,), ())
    others = [axes[n] for n in plan.out]
    specs, out = (spec_of([*axes.values()]), spec_of([])), spec_of(others, axes[name])
    array = _run(x, plan, axes[name], specs, out, [x.array, jnp.int32(position)])
    return NamedArray(place(array, tuple(others), (), frozenset(), names=plan.out), plan.out)


class _Plan:
    """Which dimension goes where in a lookup.

    Attributes:
        names: the table's names.
        looked_up: the names that are removed; in an assignment of mesh axes they are called `renamed`, since positions
            may have a dimension of the same name.
        own: the names that the positions bring.
        aligned: the names that both have, which stay.
        out: the names of the result.
    """

    def __init__(self, names: Words, looked_up: Words, id_names: Words):
        self.names, self.looked_up, self.id_names = names, looked_up, id_names
        rest = tuple(n for n in names if n not in looked_up)
        self.aligned = tuple(n for n in rest if n in id_names)
        self.own = tuple(n for n in id_names if n not in rest)
        first = names[: min(map(names.index, looked_up))]
        before = tuple(n for n in rest if n in first)
        self.out = (*before, *self.own, *(n for n in rest if n not in before))
        self.renamed = tuple(f"{n} looked up" for n in looked_up)

    def widened(self, ids: NamedArray) -> jax.Array:
        """Positions with the names of all positions, in order, of size 1 for names that these lack."""
        return widen(ids, self.id_names)

    def rows(self, table, *ids, where: Assignment | None = None):
        """The values, from what one device has. Positions are whole along the names that are looked up.

        Args:
            where: the mesh axes of the result's names, where JAX asks for them: outside of `shard_map`.
        """
        if len(ids) == 1 and not self.aligned:
            axis = self.names.index(self.looked_up[0])
            if where is None:
                return rows_of(table, ids[0], axis)
            out = sharding_on(table, spec_of([where.get(n, ()) for n in self.out]))
            return rows_of(table, ids[0], axis, out, whole=not any(where.values()))
        free = [n for n in self.names if n not in (*self.aligned, *self.looked_up)]
        inner = None if where is None else spec_of([where.get(n, ()) for n in (*self.own, *free)])
        words = self.names, self.id_names, self.out
        return aligned_rows(table, ids, self.looked_up, words, inner and sharding_on(table, inner))

    def body(self, sliced: Words):
        """Each device's lookup, which gives partial sums over the mesh axes that slice the table's rows."""

        def rows(table, *ids):
            # A copy meets slices: cast before the rows are mapped, since JAX 0.10.2 to 0.12 cannot map over the cast.
            table = vary(table, varying_axes(*ids))
            if not sliced:
                return self.rows(table, *ids)
            axis = self.names.index(self.looked_up[0])
            return mark_pending(rows_here(table, ids[0], axis, sliced, self.rows), sliced)

        return rows


def _run(x: NamedArray, plan: "_Plan", pending: Words, specs, out, arrays) -> jax.Array:
    made = _program if any(is_tracer(a) for a in arrays) else _kept
    mesh = own_mesh(x.array) or jax.sharding.get_abstract_mesh()
    return made(plan.names, plan.looked_up, plan.id_names, pending, mesh, specs, out)(*arrays)


def _program(names: Words, looked_up: Words, id_names: Words, pending: Words, mesh, specs, out) -> Callable:
    """A lookup by each device."""
    return by_device(_Plan(names, looked_up, id_names).body(pending), mesh=mesh, in_specs=specs, out_specs=out)


# Outside of any trace one for all that are alike: JAX compiles each anew. In a trace the ledger names the line of each.
_kept = functools.lru_cache(maxsize=1024)(_program)


def _partitioned(x: NamedArray, ids: list[NamedArray], plan: _Plan, where: Assignment) -> NamedArray:
    """The lookup on whole arrays. Along aligned names it is mapped, which JAX 0.10.2 to 0.12.0 cannot do to copies."""
    table = _bring(x, plan, where, copies=not plan.aligned)
    rows = plan.rows(table.array, *(plan.widened(i) for i in ids), where=where)
    return settle_selected(NamedArray(rows, plan.out), plan.looked_up)


def _renamed(x: NamedArray, plan: _Plan) -> NamedArray:
    """The table, with looked-up names renamed to names that no other array has."""
    names = dict(zip(plan.looked_up, plan.renamed, strict=True))
    return NamedArray(x.array, tuple(names.get(n, n) for n in x.names), x.slices)


def _bring(x: NamedArray, plan: _Plan, where: Assignment, copies: bool = True) -> NamedArray:
    """The table as the lookup wants it (see `trellis.named.placing`), under its own names, which the ledger shows."""
    renamed = _renamed(x, plan)
    copied = missing_axes(renamed, where) if copies else frozenset()
    return move(x, tuple(where[n] for n in renamed.names), copied)


def _where(x: NamedArray, ids: list[NamedArray], plan: _Plan) -> Assignment | None:
    """The mesh axes of every name. The looked-up name's come first: those that it sums over slice nothing else."""
    layout = current_layout()
    if layout is None:
        return assign([_renamed(x, plan), *ids], (*plan.renamed, *plan.out))
    where = assign([x, *ids], (*plan.looked_up, *(n for n in plan.out if n not in plan.looked_up)))
    if where is None:
        return None
    axes = [where.pop(n) for n in plan.looked_up]
    own = {n: () for n in plan.own if n in plan.looked_up}  # positions along the same name are whole on every device
    return {**dict(zip(plan.renamed, axes, strict=True)), **where, **own}


def _manual(x: NamedArray, ids: list[NamedArray], plan: _Plan, what: str) -> NamedArray:
    table = _renamed(x, plan)
    where = from_slices([table, *ids], (*plan.renamed, *plan.out))
    one_axis_one_name(where, [x, *ids], what)
    sliced = where[plan.renamed[0]] if len(ids) == 1 else ()
    array = plan.body(sliced)(table.array, *(plan.widened(i) for i in ids))
    slices = tuple(where[n] for n in plan.out)
    return NamedArray(array, plan.out, slices if any(slices) else ())


def refuse_shared(x: NamedArray, name: str, ids: NamedArray) -> None:
    """Checks a lookup of whole rows: no position has another name of the table's.

    Raises:
        NamesError: they have one; `take_along` looks up in each of its places.
    """
    if clash := [n for n in ids.names if n in x.names and n != name]:
        raise NamesError(
            f"positions cannot share other names with the table, got '{clash[0]}' in {types_of([ids, x])}: rename it, "
            f"or use take_along to look up separately along '{clash[0]}'"
        )
