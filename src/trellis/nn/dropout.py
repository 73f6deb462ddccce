"""Dropout (Srivastava et al., 2014)."""

import equinox as eqx

from trellis.named import NamedArray, random


class Dropout(eqx.Module):
    """Zeros each element with a probability, and scales the others to keep the mean; does nothing without a key.

    The elements are the same on every mesh.

    >>> x = tr.ones({"embed": 8})
    >>> Dropout(0.5)(x, jax.random.key(0))
    f32[embed=8]
    [0. 0. 2. 2. 0. 2. 2. 0.]
    >>> Dropout(0.5)(x, None) is x
    True

    Attributes:
        rate: the probability, at least 0 and below 1.
    """

    rate: float = eqx.field(static=True)

    def __call__(self, x: NamedArray, key) -> NamedArray:
        """`x` after dropout by a PRNG key of this place and step; None for no dropout."""
        return x if key is None else random.dropout(key, x, self.rate)
