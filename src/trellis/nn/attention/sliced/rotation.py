"""Keys and values go around a ring of devices (Liu et al., 2023, arXiv:2310.01889), under a causal mask shared evenly.

Of `N` devices each holds two of `2 N` pieces of the sequence, device `d` piece `d` and piece `2 N - 1 - d` (see
`dealing.py`), a low one and a high one. If `m` neighbours have gathered each other's keys, `n = N / m` groups are
left on the ring, and a group's keys are a low block and a high block of `m` pieces each. In step `r` the keys of group
`i - r` are with group `i`, and of the four pairs of blocks two are visible, whole, on every device:

    high queries see the low block;
    behind the owner's group (i >= r) low queries see the low block, else high queries see the high block.

In its own group a device's pieces see themselves under the causal mask, and `2 m - 1` other pieces whole. Together that
is the same amount on every device, in every step.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.permute import permute
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sliced.tile import Tile
from trellis.nn.attention.sliced.visits import Entry, Visit

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """What a device computes and when; traced in its program.

    Attributes:
        ring: mesh axes along which keys go around.
        whole: mesh axes along which they were gathered; minor to the ring's.
        queries: positions of a device's queries.
        pattern: causal, or neither causal nor windowed.
    """

    ring: Axes
    whole: Axes
    queries: int
    pattern: Pattern

    @property
    def groups(self) -> int:
        """Groups on the ring."""
        return lax.axis_size(self.ring) if self.ring else 1

    @property
    def members(self) -> int:
        """Devices of a group, which hold the same keys."""
        return lax.axis_size(self.whole) if self.whole else 1

    @property
    def others(self) -> int:
        """How many more pieces of its group's blocks a device sees, beside those of `own_first` and `own_last`."""
        return self.members - 1 if self.pattern.causal else 0

    @property
    def piece(self) -> int:
        """Positions of a low or a high piece."""
        return self.queries // 2

    def own_first(self) -> Iterator[Visit]:
        """What a device computes of its own group's keys while the first keys travel."""
        if not self.pattern.causal:
            yield self._everything()
            return
        block = self.members * self.piece
        yield Visit(self._seen(self.piece, block), [Entry(self.piece, 0)])

    def own_rest(self, count: int | jax.Array) -> Visit:
        """One of `members - 1` other pieces of the group's own blocks that a device sees.

        The low piece of member `j` sees `j` pieces of the low block, the high one `m - 1 - j` of the high block.
        """
        here, block = lax.axis_index(self.whole), self.members * self.piece
        low = count < here
        key = jnp.where(low, count * self.piece, block + (count - here) * self.piece)
        return Visit(self._seen(self.piece, self.piece), [Entry(jnp.where(low, 0, self.piece), key)])

    def own_last(self) -> Iterator[Visit]:
        """What it computes of its own pieces while the last gradients travel."""
        if not self.pattern.causal:
            return
        tile = Tile(self.piece, self.piece, self.pattern)
        if self.members == 1:
            yield Visit(tile, [Entry(0, 0), Entry(self.piece, self.piece)])
            return
        here, block = lax.axis_index(self.whole), self.members * self.piece
        high = block + (self.members - 1 - here) * self.piece
        yield Visit(tile, [Entry(0, here * self.piece), Entry(self.piece, high)])

    def met(self, step: int | jax.Array) -> Visit:
        """What a device computes of the keys that have come `step` places."""
        if not self.pattern.causal:
            return self._everything()
        block = self.members * self.piece
        behind = lax.axis_index(self.ring) >= step
        chosen = Entry(jnp.where(behind, 0, self.piece), jnp.where(behind, 0, block))
        return Visit(self._seen(self.piece, block), [Entry(self.piece, 0), chosen])

    def travel(self, tree):
        """Moves everything one place further along the ring."""
        count = self.groups
        return jax.tree.map(lambda x: permute(x, self.ring, [(i, (i + 1) % count) for i in range(count)]), tree)

    def home(self, tree):
        """Returns what travelled with keys in all steps to their owner: one place further."""
        return self.travel(tree)

    def _everything(self) -> Visit:
        return Visit(self._seen(self.queries, self.members * self.queries), [Entry(0, 0)])

    def _seen(self, queries: int, keys: int) -> Tile:
        return Tile(queries, keys, Pattern(causal=False))
