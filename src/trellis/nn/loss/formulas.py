"""The formulas of cross entropy, for chunks of tokens and for chunks of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from trellis.mesh.linear import linear
from trellis.mesh.manual.ops import Axes
from trellis.named.backend import pairs_at_once
from trellis.named.narrow import Kind


class Settings(NamedTuple):
    """How a loss is computed; hashable, for `custom_jvp`.

    Attributes:
        z_loss, logit_softcap, vocab_size, vocab_first: as in `linear_cross_entropy`.
        chunk: tokens a chunk; None for what suits an accelerator.
        total_type: the type in which the gradient of the unembedding is summed over chunks of tokens.
        vocab_axes: mesh axes that slice the vocabulary, none of them the tokens'.
        chunk_bytes: what a chunk's float32 logits take on an accelerator; None for what suits it.
        narrow: the kind of the products, if they are narrow.
        tile: tokens that share scales in a narrow product; chunks are a multiple of it.
    """

    z_loss: float
    logit_softcap: float | None
    vocab_size: int | None
    vocab_first: bool
    chunk: int | None
    total_type: jnp.dtype
    vocab_axes: Axes = ()
    chunk_bytes: int | None = None
    narrow: Kind | None = None
    tile: int = 1


def changes(sums, gradients, tangents, axes: Axes = ()):
    """The tangents of a loss's sums: the total's, by its gradients, which are made together with it; no others.

    Args:
        sums: `(total, its parts)`.
        gradients: of the total, a tree of arrays.
        tangents: a tree like it.
        axes: mesh axes over which the gradients are parts of sums.
    """
    change = _along(gradients, jax.tree.map(lambda d, t: t.astype(d.dtype), gradients, tangents))
    rest = jax.tree.map(jnp.zeros_like, sums[1])
    return lax.psum(change, axes) if axes else change, rest


def instantiated(tree):
    """Tangents or gradients with zeros in the place of JAX's symbols for them."""
    return jax.tree.map(lambda d: jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d, tree)


def changes_of_weights(gradient, tangent):
    """What tangents of the tokens' weights add to those of the total, and of the weights' sum."""
    return _along(gradient, tangent), jnp.sum(tangent)


def _change(gradients, tangents):
    wide = lambda d, t: jnp.sum(d.astype(jnp.float32) * t.astype(jnp.float32))
    return sum(jax.tree.leaves(jax.tree.map(wide, gradients, tangents)))


def times(gradients, d_total):
    """Gradients of a total times that of what is made of it, each rounded once."""
    return jax.tree.map(lambda d: (d.astype(jnp.float32) * d_total).astype(d.dtype), gradients)


_along = linear(_change, times)


def kept_as(dtype) -> jnp.dtype:
    """The type in which the gradient of a total is kept for a parameter of this type: that of a mean is far from the
    end of float16, the sum over all tokens is not."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def capped(logits, softcap: float | None):
    """`softcap * tanh(logits / softcap)` and its slope; the logits and None without a cap."""
    if softcap is None:
        return logits, None
    bent = jnp.tanh(logits / softcap)
    return bent * softcap, 1 - bent * bent


def exponentials(logits, axes: Axes = ()):
    """The largest logit of each token, `exp(logit - largest)`, and their sum.

    Where a reduction of pairs reads its operand once, the largest and the sum are found together (Milakov and
    Gimelshein, 2018, arXiv:1805.02867).

    Args:
        logits: `f32["token vocab"]`.
        axes: mesh axes that slice the vocabulary.
    """
    mine, total = _largest_and_sum(logits) if pairs_at_once(logits) else (jnp.max(logits, axis=1), None)
    largest = lax.stop_gradient(mine)  # any number gives the same loss
    largest = lax.pmax(largest, axes) if axes else largest
    powers = jnp.exp(logits - largest[:, None])
    total = jnp.sum(powers, axis=1) if total is None else total * jnp.exp(mine - largest)
    return largest, powers, lax.psum(total, axes) if axes else total


def _largest_and_sum(logits):
    """The largest of each row, and the sum of its `exp(logit - largest)`; of a row of minus infinities their number."""

    def joined(one, other):
        (m, s), (n, t) = one, other
        less = jnp.where(m == n, 1.0, jnp.exp(-jnp.abs(m - n)))
        return jnp.maximum(m, n), jnp.where(m >= n, s + t * less, s * less + t)

    ones = lax.clamp(1.0, logits, 1.0)  # of constant ones JAX cannot take the derivative
    return lax.reduce((logits, ones), (jnp.float32(-jnp.inf), jnp.float32(0)), joined, (1,))


def weighed(largest, total, hit, targets, weights, z_loss: float):
    """`(total, its parts)` of the loss; what `exp(logit - largest)` weighs in its gradient, and the gradient by each
    weight, both of each token.

    Args:
        largest: the largest logit.
        total: sum of `exp(logit - largest)`.
        hit: the target's logit; 0 if it is no word.
        targets: the words, or -1 for none.
        weights: how much each token counts.
        z_loss: weight of the squared log-normalizer.
    """
    log_sum = largest + jnp.log(total)
    entropy, z_sum = jnp.sum(weights * (log_sum - hit)), jnp.sum(weights * (z_loss * log_sum * log_sum))
    # The target's logit is compared with the largest one, which saves a search for the largest one's place.
    correct = jnp.sum(jnp.where((targets >= 0) & (hit >= largest), weights, 0.0))
    sums = entropy + z_sum, (entropy, z_sum, correct, jnp.sum(weights))
    return sums, weights * (1 + 2 * z_loss * log_sum) / total, log_sum - hit + z_loss * log_sum * log_sum
