"""A table of rows that are looked up."""

import equinox as eqx

from trellis.named import NamedArray, take
from trellis.named.axis import axes_of
from trellis.nn.initializers import normal
from trellis.nn.parameters import Table


class Embedding(eqx.Module):
    """Looks up rows of a table by their numbers.

    >>> tokens = tr.named(jnp.array([[3, 1, 4]]), "batch pos")
    >>> layer = Embedding.init({"vocab": 16}, {"embed": 8}, key=jax.random.key(0))
    >>> layer(tokens).shape
    {'batch': 1, 'pos': 3, 'embed': 8}

    Attributes:
        table: the name of the rows, then the names of a row. A language model's table may be its unembedding too:
            `next_token_loss(hidden, layer.table, targets)`; `tied` moves it once for both.
    """

    table: Table

    @staticmethod
    def init(rows, row, *, key, deviation: float = 1.0) -> "Embedding":
        """A table of normally distributed numbers.

        Args:
            rows: an `Axis`, or a map with one name: how many rows there are.
            row: an `Axis`, several, or a map: the shape of a row.
            key: a PRNG key.
            deviation: of the numbers. The inverse root of a row's size makes logits of size 1, if the table is the
                unembedding.
        """
        return Embedding(normal(key, (*axes_of(rows), *axes_of(row)), deviation=deviation))

    def __call__(self, ids: NamedArray) -> NamedArray:
        return take(self.table, self.table.names[0], ids)
