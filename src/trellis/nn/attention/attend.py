"""Attention of named queries over named keys and values."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trellis.mesh.dealing import deal, undeal
from trellis.mesh.layout import POSITIONS, Layout, current_layout
from trellis.mesh.manual.ops import vary
from trellis.named import NamedArray, NamesError
from trellis.named.array import is_named
from trellis.named.explicitly import explicitly
from trellis.named.operand import operand, refuse_plain, slices_dealt
from trellis.named.placing import move, refuse_slices
from trellis.nn.attention.decode import decode_attention
from trellis.nn.attention.dispatch import dot_product_attention, scale_of
from trellis.nn.attention.sharded import Placement, placement_of
from trellis.nn.rope import QUERY
from trellis.notation.state import state_of
from trellis.notation.typeof import typeof

Axes = tuple[str, ...]
KEY = ("batch", "key_pos", "kv_heads", "head_dim")
KINDS = ("ring", "gather", "exchange")


def attend(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    sinks: NamedArray | None = None,
    window: int | None = None,
    **options,
) -> NamedArray:
    """Causal softmax attention, on any layout.

    Under context parallelism (`pos` mapped to a mesh axis) the layout's `context` says how a device reaches the other
    slices' keys: keys are gathered along the axis and their gradient is scattered back, or keys go around a ring, or
    slices of positions are exchanged for slices of heads, there and back. If only the queries' heads are sliced, each
    device reads the key heads that it needs.

    Names: those of `q`.
    Gradient: probabilities are computed again from queries and keys; a reduce-scatter for keys and values that were
        gathered, an all-reduce for those that are whole where queries are sliced, and permutes back where `pos` is
        sliced.
    Moves: nothing, unless `pos` is sliced: then an all-gather of keys and values, and permutes that share out the
        causal mask; or what the layout's `context` says instead.

    Args:
        q: `"batch pos heads head_dim"`, or, for one example, without `batch`, and so are the others.
        k: `"batch key_pos kv_heads head_dim"`.
        v: like `k`, or with `value_dim` for `head_dim`, a width of its own, which the result then has too.
        segment_ids: `i32["batch pos"]`, the document of each position; a query
            sees only its own document.
        sinks: `"heads"`, a score without a value beside those of the keys, so that weights may add up to less than 1.
        window: a query sees this many keys at most, itself included.
        **options: of `trellis.nn.dot_product_attention`: `causal`, `scale`, which may be a named array without names,
            `logit_softcap`, `upcast`, `implementation`, `save_name`.

    Returns:
        `"batch pos heads head_dim"`, or `value_dim`, without `batch` if the queries have none.

    Raises:
        NamesError: an array's positions are sliced over mesh axes in an order that their kinds do not allow; or, in a
            manual program, arrays are sliced so that a device cannot do its queries' attention by itself.
    """
    refuse_plain([x for x in (q, k, v, segment_ids, sinks) if x is not None], "attend")
    if "batch" not in q.names:
        alone = [None if x is None else _batch_of_one(x) for x in (q, k, v, segment_ids)]
        out = attend(*alone[:3], segment_ids=alone[3], sinks=sinks, window=window, **options)
        return NamedArray(jnp.squeeze(out.array, 0), out.names[1:], out.slices[1:])
    scale = options.pop("scale", None)
    if not is_named(scale):
        options["scale"], scale = scale, None
    run = lambda *arrays: _attended(*arrays, window=window, **options)
    return explicitly(run, q, k, v, segment_ids, sinks, scale)


def _attended(q, k, v, segment_ids, sinks, factor, *, window: int | None, **options) -> NamedArray:
    """`attend` for a batch, where the types say what is sliced."""
    if factor is not None:
        options["scale"] = scale_of(operand(factor, "attend"), "attend")
    q, k, v = q.transpose(QUERY), k.transpose(KEY), v.transpose((*KEY[:3], _width(v)))
    sinks = None if sinks is None else operand(sinks, "attend")
    ordered = options.get("causal", True) or window is not None
    k, v = _own_heads(q, k, v, segment_ids, sinks, ordered=ordered)
    places = _Places.of(current_layout(), q, k, window)
    slices = _dealt_otherwise(q, k, places) if ordered else 0
    if slices and places is not None:  # JAX reverses nothing that is marked as copies, as whole key heads will be
        ways = places.queries, places.keys, places.keys
        q, k, v = (move(x, axes, frozenset()) for x, axes in zip((q, k, v), ways, strict=True))
        q, k, v = (x.with_array(undeal(x.array, slices)) for x in (q, k, v))
    q, k, v = _in_place(q, k, v, places)
    plain = None
    if segment_ids is not None:
        ids = segment_ids.transpose(QUERY[:2])
        if (sizes := (q.shape["pos"], k.shape["key_pos"])) != (ids.shape["pos"],) * 2:
            raise NamesError(
                f"documents are those of queries and of keys, which must have the same positions, got pos={sizes[0]}, "
                f"key_pos={sizes[1]} and segment_ids {typeof(ids)}, in attend: pass the ids of both to "
                "trellis.nn.dot_product_attention"
            )
        of_queries, of_keys = (state_of(x.array).axes[:2] for x in (q, k))
        plain = tuple(move(ids, axes, frozenset()).array for axes in (of_queries, of_keys))
    own = None if sinks is None else _own_sinks(sinks, places, state_of(sinks.array).copied).array
    if plain is not None and slices:
        plain = tuple(undeal(x, slices) for x in plain)
    made = dot_product_attention(q.array, k.array, v.array, segment_ids=plain, sinks=own, window=window, **options)
    out = NamedArray(deal(made, slices) if slices else made, (*QUERY[:3], _width(v)), q.slices)
    return out if places is None else move(out, places.around, frozenset())


def _dealt_otherwise(q: NamedArray, k: NamedArray, places: "_Places | None") -> int:
    """Over how many slices positions are dealt out, where those of queries and keys are whole.

    0 if positions are in natural order, or if their slices are those that they are dealt out over.

    Raises:
        NamesError: positions are in other slices.
    """
    layout = current_layout()
    if places is None or layout is None or layout.axes_dealt in ((), places.queries[1]):
        return 0
    if places.queries[1]:
        raise NamesError(
            f"causal attention needs positions in the slices over which they are dealt out, or whole, got "
            f"'pos/{'/'.join(places.queries[1])}' with dealt={layout.dealt}, in attend: use "
            f"dealt={places.queries[1]} in the layout, or in_order"
        )
    slices_dealt(POSITIONS, k.shape["key_pos"], "attend")  # refuses a length that cannot be dealt out
    return slices_dealt(POSITIONS, q.shape["pos"], "attend")


def _batch_of_one(x: NamedArray) -> NamedArray:
    return NamedArray(jnp.expand_dims(x.array, 0), ("batch", *x.names), ((), *x.slices) if x.slices else ())


def _own_heads(
    q: NamedArray, k: NamedArray, v: NamedArray, segment_ids, sinks, *, ordered: bool
) -> tuple[NamedArray, NamedArray]:
    """In manual mode, the key heads that a device's query heads read; refuses slices that would need others.

    Args:
        q, k, v: in the order of `QUERY` and `KEY`.
        segment_ids, sinks: as in `attend`.
        ordered: whether it matters which positions the queries have.
    """
    refuse_slices((q, k, v, segment_ids, sinks), (), "attend")
    if not (q.slices or k.slices or v.slices):
        return k, v
    (batch, pos, heads, head_dim), *of_keys = (x.slices or ((),) * 4 for x in (q, k, v))

    def refuse(rule: str, fix: str):
        seen = ", ".join(f"{name} {typeof(x)}" for name, x in zip("qkv", (q, k, v)))
        raise NamesError(f"{rule}, got {seen}, in attention in manual mode: {fix}")

    if head_dim or any(axes[3] for axes in of_keys):
        refuse("'head_dim' must be whole, since scores sum over it", "reshard 'head_dim' first")
    if any(axes[1] for axes in of_keys):
        refuse("'key_pos' must be whole, since queries see all keys", "reshard 'key_pos' first")
    if pos and ordered:
        refuse(
            "'pos' must be whole, since a device's queries begin at position 0 of the keys",
            "reshard 'pos' first, or attend with causal=False",
        )
    own = []
    for x, axes in zip((k, v), of_keys):
        kv_heads = axes[2]
        if heads[: len(kv_heads)] != kv_heads:
            refuse("key heads must be sliced like the query heads that read them", "reshard 'kv_heads' first")
        place = Placement(jax.sharding.get_abstract_mesh(), heads=heads, kv_heads=kv_heads)
        part = place.own_heads(vary(x.array, (*batch, *pos, *heads)), q.array.shape[2])
        own.append(NamedArray(part, x.names, (*axes[:2], heads, axes[3])))
    return own[0], own[1]


def _width(v: NamedArray) -> str:
    """What the width of values is called."""
    return "value_dim" if "value_dim" in v.names else "head_dim"


def _own_sinks(sinks: NamedArray, places: "_Places | None", copied: frozenset[str]) -> NamedArray:
    """Sinks, sliced as the queries' heads are."""
    if places is None:
        return sinks
    heads = places.queries[2]
    return move(sinks, (heads,), copied - {*heads})


def attend_cached(
    q: NamedArray, k: NamedArray, v: NamedArray, length, *, sinks: NamedArray | None = None, **options
) -> NamedArray:
    """Attention of one new position over what a cache holds, the new position included, on any layout.

    Names: those of `q`.
    Gradient: that of attention to what is filled; nothing moves.
    Moves: nothing, if the cache lies as the layout says.

    Args:
        q: `"batch pos heads head_dim"` with one position.
        k: `"batch key_pos kv_heads head_dim"`.
        v: like `k`, or with `value_dim` for `head_dim`.
        length: `i32[""]`, named or plain, how many positions of the cache are filled.
        sinks: `"heads"`, as in `attend`.
        **options: of `trellis.nn.attention.decode.decode_attention`: `window`,
            `scale`, `logit_softcap`, `upcast`.

    Returns:
        `"batch pos heads head_dim"` or `value_dim`, with one position.

    Raises:
        NamesError: the queries have several positions.
    """
    refuse_plain([x for x in (q, k, v, sinks) if x is not None], "attend_cached")
    if q.shape.get("pos") != 1:
        raise NamesError(
            f"attention to a cache takes one new position at a time, got q {typeof(q)}, in attend_cached: use attend "
            "for several, or keep a dimension 'pos' of size 1"
        )
    q, k, v = q.transpose(QUERY), k.transpose(KEY), v.transpose((*KEY[:3], _width(v)))
    sinks = None if sinks is None else operand(sinks, "attend_cached")
    length = operand(length, "attend_cached").array if is_named(length) else length
    scale = options.get("scale")
    scale = scale_of(operand(scale, "attend_cached") if is_named(scale) else scale, "attend_cached")
    if isinstance(scale, jax.Array):  # not from around what each device does
        q, options["scale"] = q.with_array(q.array * scale.astype(q.array.dtype)), 1.0
    k, v = _own_heads(q, k, v, None, sinks, ordered=True)
    places = _Places.of(current_layout(), q, k, None)
    q, k, v = _in_place(q, k, v, places)

    def one(q, k, v, ids, length, *own):
        lengths = jnp.full(q.shape[0], length)
        return decode_attention(q[:, 0], k, v, lengths, sinks=own[0] if own else None, **options)[:, None]

    place = placement_of(q.array, k.array, v.array)
    own = () if sinks is None else (_own_sinks(sinks, places, frozenset()).array,)
    specs = (PartitionSpec(), *(PartitionSpec(place.heads or None) for _ in own))
    out = place.run(one, (q.array, k.array, v.array), (length, *own), specs, check=False)
    return NamedArray(out, (*QUERY[:3], _width(v)), q.slices)


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Mesh axes of queries and of keys in attention, and of queries and results around it.

    Keys are exchanged first, then gathered: from both at once a compiler makes a gather of everything.
    """

    queries: tuple[Axes, ...]
    first: tuple[Axes, ...]
    keys: tuple[Axes, ...]
    around: tuple[Axes, ...]

    @staticmethod
    def of(layout: Layout | None, q: NamedArray, k: NamedArray, window: int | None) -> "_Places | None":
        if layout is None or state_of(q.array).mode != "explicit":
            return None
        (batch, pos, heads, head_dim), of_keys = layout.assign(QUERY), layout.assign(KEY)[2]
        kv_heads = tuple(axis for axis in of_keys if axis not in pos)  # which also slice the positions of keys
        kinds = dict(layout.context)
        by_kind = {kind: tuple(a for a in pos if kinds.get(a, "gather") == kind) for kind in KINDS}
        if tuple(a for axes in by_kind.values() for a in axes) != pos:
            seen = ", ".join(f"{a}: {kinds.get(a, 'gather')}" for a in pos)
            raise NamesError(
                "positions must be sliced over axes of a ring first, then over those that gather, then over those "
                f"that exchange, got 'pos/{'/'.join(pos)}' with {seen}, in attend: write them in this order in the "
                "layout's compute"
            )
        near = window is not None and window < k.shape["key_pos"]
        key_pos = by_kind["ring"] + (by_kind["gather"] if near else ())  # neighbours see all that a window shows
        exchanged = by_kind["exchange"]
        count = math.prod(layout.mesh.shape[a] for a in (*kv_heads, *exchanged))
        # Key heads that are too few to slice, or that are whole beside slices of query heads: all of their positions
        # are gathered instead.
        kv_heads += exchanged if kv_heads == heads and k.shape["kv_heads"] % count == 0 else ()
        rest = tuple(a for a in pos if a not in exchanged)
        first = batch, rest, kv_heads, head_dim
        queries = batch, rest, (*heads, *exchanged), head_dim
        return _Places(queries, first, (batch, key_pos, kv_heads, head_dim), (batch, pos, heads, head_dim))


def _in_place(q: NamedArray, k: NamedArray, v: NamedArray, places: _Places | None):
    """Queries, keys and values where attention wants them."""
    if places is None:
        return q, k, v
    foreign = frozenset(a for axes in places.queries for a in axes) - {a for axes in places.keys for a in axes}
    if set(places.queries[2]) & set(places.keys[2]) - set(places.around[2]):
        k, v = (move(x, places.first, frozenset()) for x in (k, v))
    return move(q, places.queries, frozenset()), *(move(x, places.keys, foreign) for x in (k, v))
