"""The loss of a language model, by name."""

from trellis.mesh.layout import current_layout
from trellis.named import NamedArray
from trellis.named.placing import move
from trellis.nn.loss import TokenLoss, cross_entropy
from trellis.notation.state import state_of

_NAMES = ("batch", "pos", "vocab", "embed")


def next_token_loss(
    hidden: NamedArray,
    unembedding: NamedArray,
    targets: NamedArray,
    weights: NamedArray | None = None,
    *,
    bias: NamedArray | None = None,
    vocab_size: int | None = None,
    **options,
) -> TokenLoss:
    """Summed cross entropy of `hidden` times `unembedding`, on any layout; the logits never exist all at once.

    With `vocab` mapped to a mesh axis it is vocabulary parallel: devices share
    three numbers a token.

    Args:
        hidden: `"batch pos embed"`.
        unembedding: `"vocab embed"`.
        targets: `i32["batch pos"]`.
        weights: `f32["batch pos"]`, what each token counts.
        bias: `"vocab"`, added to the logits.
        vocab_size: the true size of a padded vocabulary.
        **options: of `trellis.nn.loss.cross_entropy`.
    """
    tokens = ("batch", "pos")
    hidden, unembedding = hidden.transpose((*tokens, "embed")), unembedding.transpose(("vocab", "embed"))
    targets = targets.transpose(tokens)
    weights = None if weights is None else weights.transpose(tokens)
    layout = current_layout()
    if layout is not None and state_of(hidden.array).mode == "explicit":
        batch, pos, vocab, _ = layout.assign(_NAMES)
        hidden = move(hidden, (batch, pos, ()), frozenset(vocab))
        unembedding = move(unembedding, (vocab, ()), frozenset(batch + pos))
        bias = None if bias is None else move(bias, (vocab,), frozenset(batch + pos))
        targets = move(targets, (batch, pos), frozenset())
        weights = None if weights is None else move(weights, (batch, pos), frozenset())
    plain = None if weights is None else weights.array
    if vocab_size == unembedding.shape["vocab"]:
        vocab_size = None
    options |= {"vocab_size": vocab_size, "bias": None if bias is None else bias.array}
    return cross_entropy(hidden.array, unembedding.array, targets.array, plain, vocab_first=True, **options)
