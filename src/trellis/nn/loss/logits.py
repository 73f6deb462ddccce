"""Cross entropy of logits that are held all at once."""

import jax.numpy as jnp

from trellis.named import Axis, NamedArray, logsumexp, one_hot


def cross_entropy(logits: NamedArray, targets: NamedArray, over: str = "vocab") -> NamedArray:
    """The cross entropy of each target in nats, one float32 number for each.

    The logits of a language model's whole batch take most memory: `next_token_loss` never holds them all at once.

    Names: those of `logits` but `over`.
    Gradient: the softmax less the target; nothing moves.
    Moves: an all-reduce if the name in `over` is sliced.

    >>> logits = tr.zeros({"batch": 2, "pos": 3, "vocab": 4})
    >>> cross_entropy(logits, tr.zeros({"batch": 2, "pos": 3}, jnp.int32)).mean("pos")
    f32[batch=2]
    [1.3862944 1.3862944]

    Args:
        logits: `"... vocab"`, before the softmax.
        targets: `i32["..."]`, positions along `over`.
        over: the name of the choices.
    """
    logits = logits.astype(jnp.float32)
    hot = one_hot(targets, Axis(over, logits.shape[over]))
    return logsumexp(logits, over) - (hot * logits).sum(over)
