"""Visits: a device's queries meet keys, in tiles whose program is the same on every device.

Which rows of the queries and which of the keys meet may differ between devices: a start is a number, or is computed
from the device's index. So the work is even without a branch.
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.parts import part_of, with_part
from trellis.nn.attention.sliced.tile import NOTHING, Ids, Kernels, Part, Tile, put_together
from trellis.program.said import kernel_mask, kernel_work

if TYPE_CHECKING:
    from trellis.nn.attention.further import FurtherTiles

Start = int | jax.Array


class Keys(NamedTuple):
    """Keys and values that are here now, in the kernels' order, and the documents of their positions (or None)."""

    k: jax.Array
    v: jax.Array
    ids: jax.Array | None


class Entry(NamedTuple):
    """One pair of rows and keys that meet: their first positions, and whether they do on this device."""

    query: Start
    key: Start
    seen: bool | jax.Array = True


class Visit(NamedTuple):
    """Entries whose tiles are alike and run as one call, one after the other in its batch."""

    tile: Tile
    entries: Sequence[Entry]


class Met(NamedTuple):
    """What some rows of the queries found: the first row, whether they did on this device, and the result."""

    start: Start
    seen: bool | jax.Array
    part: Part

    @property
    def size(self) -> int:
        """How many rows."""
        return self.part.log_sum.shape[2]


class Queries(NamedTuple):
    """A device's queries in the kernels' order, and their documents; in the backward pass also what is known of them.

    Attributes:
        q: the queries.
        ids: `i32["batch pos"]` or None.
        known, log_sum, d_out: what kernels take of the result over all keys, the log of its sums, and its gradient.
    """

    q: jax.Array
    ids: jax.Array | None
    known: jax.Array | None = None
    log_sum: jax.Array | None = None
    d_out: jax.Array | None = None


def visit(kernels: Kernels, tile: Tile, entries: Sequence[Entry], queries: Queries, keys: Keys) -> list[Met]:
    """What the rows of each entry found in its keys."""
    q, k, v, ids = _picked(kernels, tile, entries, queries, keys)
    with said(kernels, tile, q, v):
        outs, logs = kernels.forward(tile, q, k, v, ids)
    count = len(entries)
    parts = map(Part, jnp.split(outs, count), jnp.split(logs, count))
    return [Met(entry.query, entry.seen, part) for entry, part in zip(entries, parts, strict=True)]


def visit_further(further: "FurtherTiles", tile: Tile, entries, queries: Queries, keys: Keys, met) -> list[Met]:
    """What the queries found so far and in the keys of each entry, in place; queries are scaled."""
    (so_far,) = met
    for entry in entries:
        so_far = so_far._replace(part=further.forward(tile, entry, queries, keys, so_far.part))
    return [so_far]


def nothing_met(q: jax.Array, v: jax.Array) -> list[Met]:
    """The result over no keys, `batch heads pos head_dim` in float32."""
    rows = q.shape[:3]
    return [Met(0, True, Part(jnp.zeros((*rows, v.shape[3]), jnp.float32), jnp.full(rows, NOTHING, jnp.float32)))]


def over_all(met: Sequence[Met], size: int, axis: int, dtype=jnp.float32) -> Part:
    """The result of `size` queries over all keys that they met, each row in one pass over what it found.

    Rows are cut where a part begins or ends. One whose start is computed begins at a multiple of its size.
    """
    ends = [
        (each.start, each.start + each.size) if isinstance(each.start, int) else range(0, size, each.size)
        for each in met
    ]
    edges = sorted({0, size}.union(*ends))
    cut = [_of_rows(met, first, last, axis) for first, last in itertools.pairwise(edges)]
    outs, logs = [part.out.astype(dtype) for part in cut], [part.log_sum for part in cut]
    return Part(_joined(outs, axis), _joined(logs, 2))


def _of_rows(met: Sequence[Met], first: int, last: int, axis: int) -> Part:
    """The result of some rows; over no keys, if they met none."""
    parts = [part for each in met if (part := _part_of(each, first, last, axis)) is not None]
    if parts:
        return put_together(parts, axis)
    out, log_sum = (lax.slice_in_dim(x, 0, last - first, axis=d) for x, d in zip(met[0].part, (axis, 2), strict=True))
    return Part(jnp.zeros_like(out, jnp.float32), jnp.full_like(log_sum, NOTHING))


def _part_of(met: Met, first: int, last: int, axis: int) -> Part | None:
    """The part of a result that is for these rows, on this device or another."""
    start, seen, (out, log_sum) = met
    if not isinstance(start, int):
        hidden = lax.broadcast(jnp.float32(NOTHING), log_sum.shape)
        mine = lax.broadcast(start == first, log_sum.shape)
        return Part(out, lax.select(mine, log_sum, hidden)) if met.size == last - first else None
    if first < start or start + met.size < last:
        return None
    if seen is not True:
        out, log_sum = jnp.where(seen, out, 0), jnp.where(seen, log_sum, NOTHING)
    return Part(*(lax.slice_in_dim(x, first - start, last - start, axis=d) for x, d in ((out, axis), (log_sum, 2))))


def visit_back(kernels: Kernels, tile: Tile, entries: Sequence[Entry], queries: Queries, keys: Keys, d_q, d_keys):
    """The gradients so far plus those of this visit: `d_q` of the queries, `d_keys` a pair for keys and values."""
    q, k, v, ids = _picked(kernels, tile, entries, queries, keys)
    rows = [
        _joined([_cut(x, e.query, tile.queries, dim) for e in entries])
        for x, dim in ((queries.known, kernels.axis), (queries.log_sum, 2), (queries.d_out, kernels.axis))
    ]
    with said(kernels, tile, q, v):
        found = kernels.backward(tile, q, k, v, ids, *rows)
    d_k, d_v = d_keys
    for entry, *more in zip(entries, *(jnp.split(x, len(entries)) for x in found), strict=True):
        if entry.seen is not True:
            more = [jnp.where(entry.seen, x, 0) for x in more]
        d_q = _add(d_q, more[0], entry.query, kernels.axis)
        d_k, d_v = (_add(x, y, entry.key, kernels.axis) for x, y in zip((d_k, d_v), more[1:], strict=True))
    return d_q, (d_k, d_v)


def visit_back_further(further: "FurtherTiles", tile: Tile, entries, queries: Queries, keys: Keys, d_q, d_keys):
    """The gradients so far plus those of this visit, in place; queries are scaled, and `d_q` is of these."""
    for entry in entries:
        d_q, d_keys = further.backward(tile, entry, queries, keys, d_q, d_keys)
    return d_q, d_keys


def said(kernels: Kernels, tile: Tile, q, v) -> contextlib.AbstractContextManager:
    """What the call computes, for the planner; chunks say it themselves, as products."""
    return said_work(tile, q.shape[0] * q.shape[3 - kernels.axis], q, v) if kernels.opaque else contextlib.nullcontext()


def said_work(tile: Tile, heads: int, q, v) -> contextlib.AbstractContextManager:
    """The scope of a kernel that computes a tile of so many heads, of all sequences."""
    return kernel_work("attention", 2.0 * heads * tile.pairs * (q.shape[3] + v.shape[3]))


def said_mask(tile: Tile) -> contextlib.AbstractContextManager:
    """The scope in which a kernel says a tile's mask."""
    if tile.full:
        return contextlib.nullcontext()
    near = tile.keys if tile.pattern.window is None else tile.pattern.window - 1
    return kernel_mask(near, 0 if tile.pattern.causal else near, tile.ahead)


def _picked(
    kernels: Kernels, tile: Tile, entries, queries: Queries, keys: Keys
) -> tuple[jax.Array, jax.Array, jax.Array, Ids]:
    pick = lambda x, which, size, dim: _joined([_cut(x, getattr(e, which), size, dim) for e in entries])
    q = pick(queries.q, "query", tile.queries, kernels.axis)
    k, v = (pick(x, "key", tile.keys, kernels.axis) for x in (keys.k, keys.v))
    if keys.ids is None:
        return q, k, v, None
    return q, k, v, (pick(queries.ids, "query", tile.queries, 1), pick(keys.ids, "key", tile.keys, 1))


def _joined(parts, dim: int = 0):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)


def _cut(x, start: Start, size: int, dim: int):
    if x.shape[dim] == size:
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return part_of(x, start, size, dim)


def _put(x, rows, start: Start, dim: int):
    return rows if x.shape == rows.shape else with_part(x, rows, start, dim)


def _add(x, more, start: Start, dim: int):
    return _put(x, _cut(x, start, more.shape[dim], dim) + more.astype(x.dtype), start, dim)
