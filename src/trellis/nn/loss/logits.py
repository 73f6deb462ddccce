"""Cross entropy of logits that are held all at once."""

import jax.numpy as jnp

from trellis.named import NamedArray, logsumexp, one_hot, where


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
        logits: `"... vocab"`, before the softmax. Those that are minus infinity are no choice.
        targets: `i32["..."]`, positions along `over`. One that is no position, such as the -100 of PyTorch's labels or
            an id that only a tokenizer has, has no logit, and its number is `logsumexp(logits)`: give it the weight 0.
        over: the name of the choices.

    Raises:
        NamesError: `logits` lacks that name, or `targets` has it.
    """
    logits = logits.astype(jnp.float32)
    hit = one_hot(targets, logits.axis(over), jnp.bool_)
    return logsumexp(logits, over) - where(hit, logits, 0.0).sum(over)  # a product would make NaN of a masked -inf
