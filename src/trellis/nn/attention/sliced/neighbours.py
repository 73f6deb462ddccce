"""Under a window a device's queries see few pieces of the sequence: those just before its own two (and just after).

Of `N` devices, device `d` holds piece `d` and piece `2 N - 1 - d` (see `dealing.py`), so that the pieces in their
order lie along the devices, there and back:

    device       0   1   2   3
    low piece    0   1   2   3      from left to right
    high piece   7   6   5   4      from right to left

When everything moves one place along this path, low pieces one device to the right, high ones one to the left, each
device holds the pieces before its own, and after `s` moves those `s` before. So the distance of queries and keys is
the same on every device, and with it the tile. At the path's ends a piece turns around on its device: what comes from
the other end is not seen. Of a piece that no later query sees whole, only the part that is seen is sent.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from trellis.mesh.permute import permute
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sliced.tile import Tile
from trellis.nn.attention.sliced.visits import Entry, Visit

Axes = tuple[str, ...]
_LANES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """What a device computes and when; traced in its program.

    Attributes:
        axes: the mesh axes that slice positions.
        queries: positions of a device's queries.
        pattern: with a window.
        back: keys come from later positions instead of earlier ones (if the pattern is not causal).
        whole_lanes: parts of pieces are rounded up to multiples of 128.
    """

    axes: Axes
    queries: int
    pattern: Pattern
    back: bool = False
    whole_lanes: bool = False

    @property
    def piece(self) -> int:
        """Positions of a low or a high piece."""
        return self.queries // 2

    @property
    def reach(self) -> int:
        """How many positions before its own a query sees."""
        assert self.pattern.window is not None  # without one, pieces rotate
        return self.pattern.window - 1

    @property
    def steps(self) -> int:
        """How many pieces before its own a piece sees something of."""
        return min(-(-self.reach // self.piece), 2 * lax.axis_size(self.axes) - 1)

    def needed(self, step: int) -> int:
        """How many positions of a piece are seen from `step` pieces away or further."""
        count = self.reach - (step - 1) * self.piece
        return min(self.piece, -(-count // _LANES) * _LANES if self.whole_lanes else count)

    def own(self) -> Visit:
        """A device's pieces against themselves."""
        return Visit(Tile(self.piece, self.piece, self.pattern), [Entry(0, 0), Entry(self.piece, self.piece)])

    def met(self, step: int) -> Visit:
        """What a device computes of the pieces that have come `step` places: `needed(step)` positions of each."""
        size = self.needed(step)
        distance = step * self.piece - (self.piece - size)
        before = lax.axis_index(self.axes), 2 * lax.axis_size(self.axes) - 1 - lax.axis_index(self.axes)
        if self.back:  # the queries that see them are a piece's last, the keys a piece's first
            tile = Tile(size, size, self.pattern, ahead=-distance)
            rows = self.piece - size, 2 * self.piece - size
            seen = [count + step < 2 * lax.axis_size(self.axes) for count in before]
        else:
            tile = Tile(size, size, self.pattern, ahead=distance)
            rows = 0, self.piece
            seen = [count >= step for count in before]
        return Visit(tile, [Entry(rows[0], 0, seen[0]), Entry(rows[1], size, seen[1])])

    def part(self, x, size: int, dim: int):
        """The positions of both pieces that are seen from afar: the last ones, or the first of later pieces."""
        held = x.shape[dim] // 2
        if size == held:
            return x
        starts = (0, held) if self.back else (held - size, 2 * held - size)
        return jnp.concatenate([lax.slice_in_dim(x, start, start + size, axis=dim) for start in starts], dim)

    def spread(self, x, held: int, dim: int):
        """The gradient of `part` of pieces of `held` positions: zeros where nothing was taken."""
        pads = [(0, 0, 0)] * x.ndim
        missing = held - x.shape[dim] // 2
        pads[dim] = (0, missing, 0) if self.back else (missing, 0, 0)
        zero = jnp.zeros((), x.dtype)
        return jnp.concatenate([lax.pad(half, zero, pads) for half in jnp.split(x, 2, dim)], dim) if missing else x

    def travel(self, x, dim: int):
        """Moves both pieces one place further along the path."""
        return self._moved(x, dim, 1)

    def home(self, x, dim: int):
        """Returns what came `steps` places to its owner."""
        return self._moved(x, dim, -self.steps)

    def _moved(self, x, dim: int, places: int):
        count = lax.axis_size(self.axes)
        places = places * (-1 if self.back else 1)
        here = lambda piece: (piece, 0) if piece < count else (2 * count - 1 - piece, 1)
        routes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for piece in range(2 * count):
            (source, half), (target, to) = here(piece), here((piece + places) % (2 * count))
            routes.setdefault((half, to), []).append((source, target))
        halves, arrived = jnp.split(x, 2, dim), [[], []]
        for (half, to), pairs in sorted(routes.items()):
            arrived[to].append((self._sent(halves[half], pairs), {target for _, target in pairs}))
        return jnp.concatenate([self._either(parts, count) for parts in arrived], dim)

    def _sent(self, x, pairs):
        if all(source == target for source, target in pairs):
            return x
        return permute(x, self.axes, pairs)

    def _either(self, parts, count: int):
        """Of the parts that may have arrived in one place, the one that did on this device."""
        (x, targets), *rest = parts
        for other, others in rest:
            chosen = jnp.array([device in others for device in range(count)])[lax.axis_index(self.axes)]
            x = jnp.where(chosen, other, x)
        return x
