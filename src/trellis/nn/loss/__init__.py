"""The losses of a language model."""

from trellis.nn.loss.linear import LossError, TokenLoss, linear_cross_entropy
from trellis.nn.loss.logits import cross_entropy
from trellis.nn.loss.next_token import next_token_loss, tied

__all__ = ["LossError", "TokenLoss", "cross_entropy", "linear_cross_entropy", "next_token_loss", "tied"]
