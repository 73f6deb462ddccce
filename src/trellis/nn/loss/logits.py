"""Cross entropy of logits that are there."""

import jax.numpy as jnp

from trellis.named import Axis, NamedArray, logsumexp, one_hot


def cross_entropy(logits: NamedArray, targets: NamedArray, over: str = "vocab") -> NamedArray:
    """Nats of each target: one number wherever there is a target, in float32.

    Of a language model's whole batch the logits take most of the memory: `next_token_loss` never has them all at once.

    Names: those of `logits` but `over`.
    Gradient: the softmax less the target; nothing moves.
    Moves: an all-reduce where the name in `over` is sliced.

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
