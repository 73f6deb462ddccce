"""Attention as the formula reads: what the fast implementations are tested against."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trellis.nn.attention.pattern import Pattern, hidden_score, same_document
from trellis.nn.attention.sinks import weights_beside


def reference_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array] | None,
    *,
    pattern: Pattern,
    scale: float,
    logit_softcap: float | None,
    upcast: bool,
    sinks: jax.Array | None = None,
    save_name: str | None = None,
) -> jax.Array:
    """Softmax attention that holds every score: `batch kv_heads groups pos key_pos` of them.

    Arguments as in `trellis.nn.dot_product_attention`.
    """
    batch, pos, heads, head_dim = q.shape
    key_pos, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, pos, kv_heads, heads // kv_heads, head_dim)
    dtype = jnp.float32 if upcast else q.dtype
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=dtype) * jnp.asarray(scale, dtype)
    if logit_softcap is not None:
        cap = jnp.asarray(logit_softcap, dtype)
        scores = jnp.tanh(scores / cap) * cap
    seen = pattern.visible(jnp.arange(pos), jnp.arange(key_pos))
    if seen is not None:
        scores = jnp.where(seen[None, None, None], scores, hidden_score(dtype))
    if segment_ids is not None:
        scores = jnp.where(same_document(*segment_ids)[:, None, None], scores, hidden_score(dtype))
    softmax = jax.nn.softmax if save_name is None else partial(_marked_softmax, save_name)
    weights = weights_beside(scores, sinks, softmax).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, pos, heads, v.shape[-1])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _marked_softmax(name: str, scores: jax.Array) -> jax.Array:
    """The softmax over the last dimension, which is marked where its derivative reads it: `name` marks a copy."""
    return jax.nn.softmax(scores)


@_marked_softmax.defjvp
def _derivative(name: str, primals, tangents):
    weights = checkpoint_name(jax.nn.softmax(*primals), name)
    (change,) = tangents
    return weights, weights * (change - jnp.sum(weights * change, axis=-1, keepdims=True))
