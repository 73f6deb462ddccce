"""A product with a weight."""

import equinox as eqx

from trellis.named import NamedArray, dot
from trellis.named.axis import axes_of
from trellis.nn.initializers import constant, weight
from trellis.nn.parameters import Bias, Weight


class Linear(eqx.Module):
    """A product with a weight, plus a bias: it sums the names that go in and has those that come out instead.

    A layer takes and gives as many names as it is asked to.

    >>> layer = Linear.init({"embed": 8}, {"heads": 2, "head_dim": 4}, key=jax.random.key(0))
    >>> layer(tr.ones({"batch": 3, "embed": 8})).shape
    {'batch': 3, 'heads': 2, 'head_dim': 4}

    Attributes:
        weight: the names that go in, then those that come out.
        bias: the names that come out; None for none.
        over: the names that go in.
    """

    weight: Weight
    bias: Bias | None
    over: tuple[str, ...] = eqx.field(static=True)

    @staticmethod
    def init(inputs, outputs, *, key, bias: bool = True, scale: float = 1.0) -> "Linear":
        """A layer whose weight has the deviation `scale / sqrt(size of inputs)`, and whose bias is zeros.

        Args:
            inputs: an `Axis`, several, or a map from names to sizes: what is summed.
            outputs: likewise: what the result has instead.
            key: a PRNG key.
            bias: whether there is one.
            scale: factor on the weight's deviation.
        """
        inputs, outputs = axes_of(inputs), axes_of(outputs)
        over = tuple(axis.name for axis in inputs)
        drawn = weight(key, (*inputs, *outputs), over=over, scale=scale)
        return Linear(drawn, constant(outputs, 0.0) if bias else None, over)

    def __call__(self, x: NamedArray) -> NamedArray:
        out = dot(x, self.weight, over=self.over)
        return out if self.bias is None else out + self.bias
