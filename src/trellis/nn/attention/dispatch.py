"""The attention function: checks its arguments, picks an implementation, runs it on each device's part."""

import jax
import jax.numpy as jnp

from trellis.choices import is_count
from trellis.errors import TrellisError
from trellis.mesh.layout import current_layout
from trellis.mesh.platform import device_kind_of, platform_of
from trellis.named.arguments import cap_of, numbers_of
from trellis.named.operand import refuse_named
from trellis.nn.attention.chunked import ChunkedTiles, chunked_attention
from trellis.nn.attention.cudnn import CudnnTiles, cudnn_refuses
from trellis.nn.attention.further import FurtherTiles, units_of
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.reference import reference_attention
from trellis.nn.attention.sharded import Placement, meeting_slices, placement_of
from trellis.nn.attention.sliced.attention import tiled_attention
from trellis.nn.attention.sliced.program import Sliced
from trellis.nn.attention.sliced.whole import Whole
from trellis.nn.attention.splash import SplashTiles, splash_refuses, widest_blocks
from trellis.notation import Dim, Shape, spec_of
from trellis.notation.state import sliced_by_compiler, state_of
from trellis.program.said import kernel_refused

IMPLEMENTATIONS = ("auto", "reference", "chunked", "cudnn", "splash")


class AttentionError(TrellisError, ValueError):
    """Arguments that no implementation of attention, or not the chosen one, can take."""


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    logit_softcap: float | None = None,
    upcast: bool = True,
    implementation: str = "auto",
    save_name: str | None = None,
) -> jax.Array:
    """Softmax attention of queries over keys, with grouped heads, causal, windowed and document masks.

    Query head `h` reads key head `h // (heads / kv_heads)`; keys and values are not repeated, except on a
    mesh whose slices of query heads do not fall on the groups of key heads. Every query must see at least one key.

    On a mesh in explicit mode the arrays may be sharded: `batch` alike in all of them, `heads` and `kv_heads` alike
    (or `heads` alone: a device reads the key heads that its query heads need). Keys and values may be in the `~` state,
    so that their gradient arrives as a pending sum. If positions are whole, nothing moves inside.

    `pos` may be sliced too (context parallelism). Along a mesh axis along which keys are whole, each device's queries
    see them here; along one that slices `key_pos` too, keys go around a ring, beside the kernels, or under a window to
    the neighbours that see them. Under a causal mask all devices have the same amount to do: each works on one piece
    from the front and one from the back of the sequence. Under a layout with `dealt` positions the pieces are there;
    otherwise they are exchanged first, and results are exchanged back.

    Args:
        q: `batch pos heads head_dim`.
        k: `batch key_pos kv_heads head_dim`.
        v: like `k`; its heads may have another width, which the result then has too.
        causal: a query sees no later key. Position 0 of `pos` and of `key_pos` is the same place.
        window: a query sees this many keys at most, itself included (and as many ahead if not causal).
        segment_ids: `i32["batch pos"]` and `i32["batch key_pos"]`: a query sees only keys of its own document.
        sinks: `heads`, a score without a value beside those of the keys, so that weights add up to less than 1.
        scale: multiplies the scores; `head_dim ** -0.5` if None. An array (a scalar that depends on the layer, say)
            is multiplied into the queries.
        logit_softcap: scores become `cap * tanh(scores / cap)`.
        upcast: take sums and softmax of scores in float32 whatever the arrays' dtype. Accelerators' kernels always do.
        implementation: "auto" takes cuDNN's on NVIDIA GPUs and splash on TPUs if these can compute what is asked,
            and "chunked" elsewhere, in evaluation through a pipeline's stages and along mesh axes in auto mode, where
            `attend` under a layout has kernels too; "reference", "chunked", "cudnn" and "splash" insist.
        save_name: the name under which `jax.checkpoint` policies can save what the backward pass needs, so that the
            kernel does not run again.

    Returns:
        `batch pos heads head_dim`, with the width of values, sharded like `q`.

    Raises:
        AttentionError: shapes or shardings do not agree, or the implementation cannot compute this.

    >>> import jax.numpy as jnp
    >>> q, kv = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 1, 8))
    >>> dot_product_attention(q, kv, kv).shape
    (1, 4, 2, 8)
    """
    _check(q, k, v, window, segment_ids, sinks, implementation)
    scale = scale_of(scale, "dot_product_attention")
    logit_softcap = cap_of(logit_softcap, "attention", "pass a Python number; scale may be an array")
    if not q.shape[1]:  # sums over the width have the sharding of the result
        return jnp.broadcast_to(jnp.sum(q, -1, keepdims=True), (*q.shape[:3], v.shape[3]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(scale, jax.Array):
        q, scale = q * scale.astype(q.dtype), 1.0
    farthest = max(q.shape[1], k.shape[1])  # with more queries than keys, the last ones are behind all keys
    pattern = Pattern(causal=causal, window=window if window is None or window < farthest else None)
    q, k, v, sinks = meeting_slices(q, k, v, sinks)
    place = placement_of(q, k, v)
    chosen, refused = _choose(q, k, v, place, pattern, logit_softcap, upcast, implementation)
    scores = dict(pattern=pattern, scale=float(scale), logit_softcap=logit_softcap, upcast=upcast)
    with kernel_refused(refused):
        return _computed(chosen, place, q, k, v, segment_ids, sinks, save_name, **scores)


def _computed(chosen: str, place: Placement, q, k, v, segment_ids, sinks, save_name, *, pattern: Pattern, **scores):
    arrays = (q, k, v, *(segment_ids or ()))
    if place.pos:
        program = _sliced(place, q, k, chosen, pattern=pattern, **scores)
        return tiled_attention(place, program, q, k, v, segment_ids, sinks, save_name=save_name)
    if chosen in ("splash", "cudnn") or (sinks is not None and chosen == "chunked"):
        whole = Whole(_tiles(chosen, q, **scores), pattern)
        return tiled_attention(place, whole, q, k, v, segment_ids, sinks, save_name=save_name)
    scores = dict(pattern=pattern, save_name=save_name, **scores)
    if chosen == "chunked":
        return place.run(lambda q, k, v, ids: chunked_attention(q, k, v, ids, **scores), arrays)
    own = () if sinks is None else (sinks,)
    kernel = lambda q, k, v, ids, *own: reference_attention(q, k, v, ids, sinks=own[0] if own else None, **scores)
    return place.run(kernel, arrays, own, tuple(spec_of([place.heads], (), state_of(x).copied) for x in own))


def _sliced(place: Placement, q, k, chosen: str, *, pattern: Pattern, scale, logit_softcap, upcast) -> Sliced:
    """The program of a device that holds a slice of the positions."""
    pieces = 2 * place.shards(place.pos)
    if q.shape[1] != k.shape[1]:
        raise AttentionError(
            f"sliced queries and keys must have the same number of positions, got pos={q.shape[1]} and "
            f"key_pos={k.shape[1]} over {'/'.join(place.pos)}, in attention: exchange positions for heads (the "
            "layout's context, exchange), or leave pos whole"
        )
    if q.shape[1] % pieces:
        raise AttentionError(
            "positions in slices must divide into two pieces a device, the same for queries and keys, got "
            f"pos={q.shape[1]} and key_pos={k.shape[1]} over {'/'.join(place.pos)}, {pieces} pieces, in attention: "
            f"use a length that is divisible by {pieces}"
        )
    kernels = _tiles(chosen, q, scale=scale, logit_softcap=logit_softcap, upcast=upcast)
    layout = current_layout()
    dims = ("batch", place.batch), ("key_pos", place.key_pos), ("kv_heads", place.kv_heads), ("head_dim", ())
    order = (0, 1, 2, 3) if kernels.axis == 1 else (0, 2, 1, 3)
    text = str(Shape(tuple(Dim(*dims[i]) for i in order)))
    whole = place.pos[len(place.key_pos) :]
    return Sliced(kernels, pattern, place.key_pos, whole, layout is not None and layout.axes_dealt == place.pos, text)


def _tiles(chosen: str, q, *, scale: float, logit_softcap: float | None, upcast: bool):
    """What computes a tile."""
    if chosen == "splash":
        kind = device_kind_of(q)
        given = dict(
            scale=scale, logit_softcap=logit_softcap, widest=widest_blocks(kind, capped=logit_softcap is not None)
        )
        units = units_of(kind)
        return SplashTiles(**given, further=None if units is None else FurtherTiles(**given, units=units))
    if chosen == "cudnn":
        return CudnnTiles(scale=scale)
    chunk = q.shape[1] if chosen == "reference" else None
    return ChunkedTiles(scale=scale, logit_softcap=logit_softcap, upcast=upcast, chunk=chunk)


def _choose(q, k, v, place, pattern, logit_softcap, upcast, implementation) -> tuple[str, str]:
    """The implementation, and why it is not the platform's kernel, if it was to be."""
    if implementation not in ("auto", "cudnn", "splash"):
        return implementation, ""
    asked = dict(upcast=upcast, pieces=2 * place.shards(place.pos) if place.pos else 1)
    refuses = {
        "cudnn": lambda: cudnn_refuses(q, k, v, pattern=pattern, logit_softcap=logit_softcap, **asked),
        "splash": lambda: splash_refuses(q, k, **asked),
    }
    layout = current_layout()
    if layout is not None and layout.mapped:  # as of JAX 0.10.2
        why = "kernels cannot run mapped over mesh axes, as in evaluation through a pipeline's stages"
        refuses = dict.fromkeys(refuses, lambda: why)
    elif sliced_by_compiler(q):
        why = "compilers cannot slice a kernel, and along mesh axes in auto mode they have to"
        refuses = dict.fromkeys(refuses, lambda: why)
    if implementation != "auto":
        if reason := refuses[implementation]():
            raise AttentionError(
                f"an implementation must support the attention it is asked for, got {implementation!r}: {reason}, in "
                f"attention(implementation={implementation!r}): use implementation='auto'"
            )
        return implementation, ""
    best = {"cuda": "cudnn", "tpu": "splash"}.get(platform_of(q))
    refused = refuses[best]() if best else None
    return (best, "") if best and refused is None else ("chunked", refused or "")


def _check(q, k, v, window, segment_ids, sinks, implementation) -> None:
    where = "in attention"
    refuse_named((q, k, v, *(segment_ids or ()), sinks), "dot_product_attention", "attend")
    if implementation not in IMPLEMENTATIONS:
        raise AttentionError(
            f"the implementation of attention must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}, "
            f"{where}: use one of them"
        )
    check(q, k, v, window, sinks, where)
    if not q.dtype == k.dtype == v.dtype:
        raise AttentionError(
            f"q, k and v must have the same dtype, got {q.dtype}, {k.dtype}, {v.dtype}, {where}: cast them to one"
        )
    if segment_ids is not None:
        shapes = tuple(ids.shape for ids in segment_ids)
        if shapes != (q.shape[:2], k.shape[:2]):
            raise AttentionError(
                f"segment_ids must be a pair of 'batch pos' and 'batch key_pos', got shapes {shapes} for q {q.shape} "
                f"and k {k.shape}, {where}: pass (query_ids, key_ids)"
            )


def scale_of(scale, what: str):
    """A factor of scores, or None: one number, which may be a value of the program.

    Args:
        scale: a number, a plain or a named array.
        what: the function, for messages.

    Raises:
        NamesError: it has several numbers.
    """
    if scale is None:
        return None
    return numbers_of(what, "multiply the queries by what has several", scale=scale)[0]


def check(q, k, v, window, sinks, where: str, *, queries: str = "batch pos heads head_dim") -> None:
    """Checks what all attention requires.

    Args:
        q, k, v, window, sinks: as in `dot_product_attention`.
        where: of the function, for messages.
        queries: the dimensions of `q`.

    Raises:
        AttentionError: shapes do not agree, or the window has no key.
    """
    ranks = q.ndim, k.ndim, v.ndim
    if (
        ranks != (len(queries.split()), 4, 4)
        or k.shape[:3] != v.shape[:3]
        or q.shape[0] != k.shape[0]
        or q.shape[-1] != k.shape[3]
    ):
        raise AttentionError(
            f"q must be '{queries}', k and v 'batch key_pos kv_heads head_dim', got shapes {q.shape}, {k.shape}, "
            f"{v.shape}, {where}: reshape or reorder the dimensions"
        )
    heads, kv_heads = q.shape[-2], k.shape[2]
    if heads % kv_heads:
        raise AttentionError(
            f"each key head must serve the same number of query heads, got heads={heads}, kv_heads={kv_heads}, "
            f"{where}: make heads a multiple of kv_heads"
        )
    if q.size and not k.shape[1]:
        raise AttentionError(
            f"every query must see a key, got q {q.shape} and no keys, k {k.shape}, {where}: pass one key or more"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise AttentionError(
            f"sinks must be one score per head, got shape {sinks.shape} for heads={heads}, {where}: pass 'heads'"
        )
    if window is not None and not is_count(window):
        raise AttentionError(
            f"a window must be a whole number of keys, from 1 on, got window={window}, {where}: use 1 or more, or None"
        )
