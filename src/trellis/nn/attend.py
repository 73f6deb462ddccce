"""Attention of named queries over named keys and values."""

from trellis.mesh.layout import current_layout
from trellis.named import NamedArray
from trellis.named.placing import move
from trellis.nn.attention import attention
from trellis.notation.state import state_of

QUERY = ("batch", "pos", "heads", "head_dim")
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
        **options: of `trellis.nn.attention.attention`: `causal`, `window`,
            `scale`, `logit_softcap`, `upcast`, `implementation`, `save_name`.

    Returns:
        `"batch pos heads head_dim"`.
    """
    q, k, v = q.transpose(QUERY), k.transpose(KEY), v.transpose(KEY)
    ids = () if segment_ids is None else (segment_ids.transpose(QUERY[:2]),) * 2
    layout = current_layout()
    if layout is not None and state_of(q.array).mode == "explicit":
        own, kept = layout.assign(QUERY), layout.assign(KEY)
        key_axes = (own[0], (), kept[2], ())
        foreign = frozenset(own[1] + own[2]) - frozenset(kept[2])
        q = move(q, own, frozenset())
        k, v = (move(x, key_axes, foreign) for x in (k, v))
        ids = tuple(move(i, axes, frozenset()) for i, axes in zip(ids, (own[:2], (own[0], ())), strict=False))
    plain = tuple(i.array for i in ids) or None
    return NamedArray(attention(q.array, k.array, v.array, segment_ids=plain, **options), QUERY)
