"""How layers are cut into the parts of a pipeline: all of one size, or some with one layer less.

Part `g * stages + s` is group `g` of stage `s`. If the parts do not divide the layers, those with one layer less are
the last (the loss follows it), the first (it follows the embedding), and so on from both ends. Ten layers on four
stages are 2, 3, 3 and 2.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from trellis.mesh.reshard import scope_name
from trellis.named.array import NamedArray
from trellis.named.axis import Axis, NamesError
from trellis.named.placing import move
from trellis.notation import spec_of
from trellis.notation.state import state_of

BATCH = "batch"
"""The name that is cut into microbatches."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts of some layers: for each group, one on each stage.

    >>> parts = Parts(10, stages=4)
    >>> parts.sizes, parts.firsts, parts.most, parts.least
    ((2, 3, 3, 2), (0, 2, 5, 8), 3, 2)
    """

    layers: int
    stages: int
    groups: int = 1

    @staticmethod
    def of(layers: Axis, stages: int, groups: int = 1) -> "Parts":
        """The parts of an axis of layers.

        Raises:
            NamesError: a part would have no layer.
        """
        if layers.size < stages * groups:
            raise NamesError(
                f"every part of a pipeline needs a layer, got {layers.size} '{layers.name}' in {groups} "
                f"{'groups' if groups > 1 else 'group'} on each of {stages} stages: use numbers whose product is "
                f"{layers.size} or less"
            )
        return Parts(layers.size, stages, groups)

    @property
    def count(self) -> int:
        """How many parts there are."""
        return self.stages * self.groups

    @property
    def most(self) -> int:
        """Layer count of the largest parts."""
        return -(-self.layers // self.count)

    @property
    def least(self) -> int:
        """Layer count of the smallest parts."""
        return self.layers // self.count

    @property
    def uneven(self) -> bool:
        """Whether some parts have one layer less."""
        return self.most > self.least

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layer count of each part."""
        ends = [n for pair in zip(range(self.count - 1, -1, -1), range(self.count)) for n in pair]
        short = set(list(dict.fromkeys(ends))[: self.most * self.count - self.layers])
        return tuple(self.most - (part in short) for part in range(self.count))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first layer of each part."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    def rows(self) -> np.ndarray:
        """Which layer is where: for each stage its groups, each of `most`; a short one repeats its last layer.

        >>> Parts(3, stages=2).rows().tolist()
        [0, 1, 2, 2]
        """
        sizes, firsts = self.sizes, self.firsts
        order = [group * self.stages + stage for stage in range(self.stages) for group in range(self.groups)]
        return np.array([firsts[p] + min(row, sizes[p] - 1) for p in order for row in range(self.most)])

    def real(self) -> np.ndarray:
        """Which of these rows are a part's own layers, and which repeat the last one.

        >>> Parts(3, stages=2).real().tolist()
        [True, True, True, False]
        """
        rows = self.rows().reshape(-1, self.most)
        return np.concatenate([[True] + [a != b for a, b in zip(mine, mine[1:])] for mine in rows.tolist()])


def spread(x: NamedArray, layers: str, axis: str, parts: Parts) -> NamedArray:
    """An array `"layers ..."` with each stage's layers on it, in uneven parts: `parts.rows()` of them.

    If the stages slice another dimension, it becomes whole and the layers are sliced: an all-to-all, and so is the
    gradient. If the array is whole along the stages, its layers are taken from what is there.
    """
    state, dim = state_of(x.array), x.index(layers)
    gathered = tuple(() if i == dim else mine for i, mine in enumerate(state.axes))
    copied = state.copied - {axis}
    x = move(x, gathered, copied)
    spec = spec_of(gathered, (), copied)
    rows = parts.rows()

    def chosen(mine):
        if not copied:
            return mine.take(rows, axis=dim)
        # JAX (0.10.2 to 0.12.0) does not take a lookup in copies for copies.
        return jnp.concatenate([jax.lax.slice_in_dim(mine, row, row + 1, axis=dim) for row in rows], dim)

    with jax.named_scope(scope_name(f"{x.type} -> {x.type}")):
        taken = jax.shard_map(chosen, in_specs=spec, out_specs=spec)(x.array)
    here = tuple((axis,) if i == dim else tuple(a for a in mine if a != axis) for i, mine in enumerate(gathered))
    return move(NamedArray(taken, x.names), here, copied)
