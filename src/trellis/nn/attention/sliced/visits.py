"""Visits: a device's queries meet keys, in tiles of which the program is the same on every device.

Which rows of the queries and which of the keys meet may differ between devices: a start is a number, or one that is
computed from the device's index. So the work is even without a branch.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trellis.nn.attention.sliced.tile import NOTHING, Ids, Kernels, Part, Tile, together
from trellis.program.said import kernel_work

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


def visit(kernels: Kernels, tile: Tile, entries: Sequence[Entry], queries: Queries, keys: Keys, total: Part) -> Part:
    """The result so far, and of these keys."""
    q, k, v, ids = _picked(kernels, tile, entries, queries, keys)
    with said(kernels, tile, q, v):
        outs, logs = kernels.forward(tile, q, k, v, ids)
    count = len(entries)
    for entry, out, log_sum in zip(entries, jnp.split(outs, count), jnp.split(logs, count), strict=True):
        if entry.seen is not True:
            log_sum = jnp.where(entry.seen, log_sum, NOTHING)
            out = jnp.where(entry.seen, out, 0)
        rows = Part(*(_cut(x, entry.query, tile.queries, d) for x, d in zip(total, (kernels.axis, 2), strict=True)))
        rows = together(rows, Part(out, log_sum), kernels.axis)
        total = Part(*(_put(x, y, entry.query, d) for x, y, d in zip(total, rows, (kernels.axis, 2), strict=True)))
    return total


def visit_back(kernels: Kernels, tile: Tile, entries: Sequence[Entry], queries: Queries, keys: Keys, d_q, d_keys):
    """The gradients so far, and of this visit: `d_q` of the queries, `d_keys` a pair for keys and values."""
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


def said(kernels: Kernels, tile: Tile, q, v) -> contextlib.AbstractContextManager:
    """What the call computes, for the planner; chunks say it themselves, as products."""
    if not kernels.opaque:
        return contextlib.nullcontext()
    return kernel_work(
        "attention", 2.0 * q.shape[0] * q.shape[3 - kernels.axis] * tile.pairs * (q.shape[3] + v.shape[3])
    )


def _picked(
    kernels: Kernels, tile: Tile, entries, queries: Queries, keys: Keys
) -> tuple[jax.Array, jax.Array, jax.Array, Ids]:
    pick = lambda x, which, size, dim: _joined([_cut(x, getattr(e, which), size, dim) for e in entries])
    q = pick(queries.q, "query", tile.queries, kernels.axis)
    k, v = (pick(x, "key", tile.keys, kernels.axis) for x in (keys.k, keys.v))
    if keys.ids is None:
        return q, k, v, None
    return q, k, v, (pick(queries.ids, "query", tile.queries, 1), pick(keys.ids, "key", tile.keys, 1))


def _joined(parts):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _cut(x, start: Start, size: int, dim: int):
    if x.shape[dim] == size:
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _put(x, rows, start: Start, dim: int):
    return rows if x.shape == rows.shape else lax.dynamic_update_slice_in_dim(x, rows, start, axis=dim)


def _add(x, more, start: Start, dim: int):
    return _put(x, _cut(x, start, more.shape[dim], dim) + more.astype(x.dtype), start, dim)
