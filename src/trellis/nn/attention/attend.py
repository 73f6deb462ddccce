"""Attention of named queries over named keys and values."""

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trellis.mesh.layout import current_layout
from trellis.named import NamedArray
from trellis.named.placing import move
from trellis.nn.attention.decode import decode_attention
from trellis.nn.attention.dispatch import dot_product_attention
from trellis.nn.attention.sharded import placement_of
from trellis.nn.rope import QUERY
from trellis.notation.state import state_of

KEY = ("batch", "key_pos", "kv_heads", "head_dim")


def attend(
    q: NamedArray, k: NamedArray, v: NamedArray, *, segment_ids: NamedArray | None = None, **options
) -> NamedArray:
    """Causal softmax attention, on any layout.

    Under context parallelism (`pos` mapped to a mesh axis) keys and values are
    gathered along it, and their gradient is scattered back. Where only the
    queries' heads are sliced, each device reads the key heads that it needs.

    Args:
        q: `"batch pos heads head_dim"`.
        k: `"batch key_pos kv_heads head_dim"`.
        v: like `k`.
        segment_ids: `i32["batch pos"]`, the document of each position; a query
            sees only its own document.
        **options: of `trellis.nn.dot_product_attention`: `causal`, `window`,
            `scale`, `logit_softcap`, `upcast`, `implementation`, `save_name`.

    Returns:
        `"batch pos heads head_dim"`.
    """
    q, k, v = _in_place(q, k, v)
    plain = None
    if segment_ids is not None:
        ids = segment_ids.transpose(QUERY[:2])
        batch, pos = state_of(q.array).axes[:2]
        plain = tuple(move(ids, axes, frozenset()).array for axes in ((batch, pos), (batch, ())))
    return NamedArray(dot_product_attention(q.array, k.array, v.array, segment_ids=plain, **options), QUERY)


def attend_cached(q: NamedArray, k: NamedArray, v: NamedArray, length, **options) -> NamedArray:
    """Attention of one new position over what a cache holds, the new position included, on any layout.

    Args:
        q: `"batch pos heads head_dim"` with one position.
        k: `"batch key_pos kv_heads head_dim"`.
        v: like `k`.
        length: `i32[""]`, how many positions of the cache are filled.
        **options: of `trellis.nn.attention.decode.decode_attention`: `window`,
            `scale`, `logit_softcap`, `upcast`.

    Returns:
        `"batch pos heads head_dim"` with one position.
    """
    q, k, v = _in_place(q, k, v)

    def one(q, k, v, ids, offset, length):
        lengths = jnp.full(q.shape[0], length)
        return decode_attention(q[:, 0], k, v, lengths, **options)[:, None]

    place = placement_of(q.array, k.array, v.array, None)
    out = place.run(one, (q.array, k.array, v.array), (length,), (PartitionSpec(),), check=False)
    return NamedArray(out, QUERY)


def _in_place(q: NamedArray, k: NamedArray, v: NamedArray):
    """Queries, keys and values in the kernels' order, where the layout in force wants them."""
    q, k, v = q.transpose(QUERY), k.transpose(KEY), v.transpose(KEY)
    layout = current_layout()
    if layout is None or state_of(q.array).mode != "explicit":
        return q, k, v
    own, kept = layout.assign(QUERY), layout.assign(KEY)
    foreign = frozenset(own[1] + own[2]) - frozenset(kept[2])
    keys = (move(x, (own[0], (), kept[2], ()), foreign) for x in (k, v))
    return move(q, own, frozenset()), *keys
