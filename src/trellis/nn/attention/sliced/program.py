"""Attention of one device's queries over keys that other devices hold: the program of a device, and its gradient.

    keys                here                          on the way
    whole               all of a group's              -
    ring                one group's at a time         the next group's, beside the kernels
    window              the pieces before its own     the ones before those

The gradient goes the same way again: keys and values travel, and with them the sums of their gradients, to which each
device adds its share. So a device never holds more than two groups' keys at once.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from trellis.mesh.dealing import deal_slices, gather_slices, undeal
from trellis.mesh.parts import own_part
from trellis.nn.attention.pattern import Pattern
from trellis.nn.attention.sliced.neighbours import Neighbours
from trellis.nn.attention.sliced.rotation import Rotation
from trellis.nn.attention.sliced.tile import Kernels, Part, turned
from trellis.nn.attention.sliced.visits import (
    Keys,
    Met,
    Queries,
    nothing_met,
    over_all,
    visit,
    visit_back,
    visit_back_further,
    visit_further,
)

Axes = tuple[str, ...]

_UNROLLED = 8
"""Steps of a ring that are unrolled; more of them run as a loop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sliced:
    """How a device's queries meet keys that others hold.

    Attributes:
        kernels: what computes a tile.
        pattern: which keys a query may see.
        ring: mesh axes of positions along which keys are sliced too.
        whole: mesh axes of positions along which keys are whole; minor to those of the ring.
        dealt: whether positions are dealt out over all of them already.
        text: the type of keys, for the ledger.
    """

    kernels: Kernels
    pattern: Pattern
    ring: Axes
    whole: Axes
    dealt: bool
    text: str

    @property
    def axes(self) -> Axes:
        """The mesh axes of positions."""
        return (*self.ring, *self.whole)

    def forward(self, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
        """The result, `batch pos heads head_dim`, and the log of the sums, `f32["batch heads pos"]`."""
        queries, keys = self._enter(q, k, v, ids)
        run = self._near if self.pattern.window is not None else self._around
        total = self._over_all(queries, run(queries, keys), q.dtype)
        out, log_sum = self._leave(total.out, self.kernels.axis), self._leave(total.log_sum, 2)
        return turned(out, self.kernels.axis), log_sum

    def backward(self, q, k, v, ids, out, log_sum, d_out):
        """The gradients of `q`, `k` and `v`; those of keys that are whole are this device's part of a sum."""
        queries, keys = self._enter(q, k, v, ids)
        axis = self.kernels.axis
        out, d_out = (self._dealt(turned(x, axis), axis) for x in (out, d_out))
        known = self.kernels.known(out, d_out)
        queries = queries._replace(known=known, log_sum=self._dealt(log_sum, 2), d_out=d_out)
        run = self._near_back if self.pattern.window is not None else self._around_back
        d_q, d_k, d_v = run(queries, keys)
        back = lambda d, x: self._keys_leave(d, axis, turned(x, axis))
        leaving = self._leave(d_q, axis), back(d_k, k), back(d_v, v)
        return tuple(turned(d, axis).astype(x.dtype) for d, x in zip(leaving, (q, k, v), strict=True))

    # Positions in natural order are dealt out on the way in, and back on the way out.

    def _enter(self, q, k, v, ids) -> tuple[Queries, Keys]:
        axis = self.kernels.axis
        q, k, v = (turned(x, axis) for x in (q, k, v))
        query_ids, key_ids = ids if ids is not None else (None, None)
        queries = Queries(self._dealt(q, axis), None if ids is None else self._dealt(query_ids, 1))
        keys = Keys(*(None if x is None else self._keys_enter(x, d) for x, d in ((k, axis), (v, axis), (key_ids, 1))))
        return queries, keys

    @property
    def _deals(self) -> bool:
        ordered = self.pattern.causal or self.pattern.window is not None
        return ordered and not self.dealt

    def _dealt(self, x, dim: int):
        return deal_slices(x, self.axes, dim) if self._deals else x

    def _leave(self, x, dim: int):
        return gather_slices(x, self.axes, dim) if self._deals else x

    def _keys_enter(self, x, dim: int):
        """Keys as a group's low and high block; under a window, as a device's own two pieces."""
        if self.pattern.window is not None:
            return self._dealt(self._own(x, dim), dim)
        if self._deals:
            return deal_slices(x, self.ring, dim) if self.ring else x
        # Gathered, they are the low and the high piece of each member in turn.
        return undeal(x, lax.axis_size(self.whole), dim) if self.pattern.causal and self.whole else x

    def _keys_leave(self, x, dim: int, like):
        """The gradient of what `_keys_enter` took."""
        struct = jax.ShapeDtypeStruct(like.shape, x.dtype)
        if self.pattern.window is not None:
            (whole,) = jax.linear_transpose(lambda y: self._own(y, dim), struct)(self._leave(x, dim))
            return whole
        if self._deals:
            return gather_slices(x, self.ring, dim) if self.ring else x
        (gathered,) = jax.linear_transpose(lambda y: self._keys_enter(y, dim), struct)(x)
        return gathered

    def _own(self, x, dim: int):
        """A device's own slice of keys that its group holds whole."""
        return own_part(x, dim, self.whole) if self.whole else x

    # Keys go around.

    def _around(self, queries: Queries, keys: Keys) -> list[Met]:
        rotation = self._rotation(queries)
        meet = lambda visit_, keys, met: met + visit(self.kernels, *visit_, queries, keys)
        met: list[Met] = []
        if (further := self.kernels.further) is not None:
            queries = queries._replace(q=further.scaled(queries.q))
            meet = lambda visit_, keys, met: visit_further(further, *visit_, queries, keys, met)
            met = nothing_met(queries.q, keys.v)
        groups = rotation.groups
        coming = self._sent(rotation.travel, keys) if groups > 1 else None
        for first in rotation.own_first():
            met = meet(first, keys, met)
        others = lambda i, coming, met: (coming, meet(rotation.own_rest(i), keys, met))
        coming, met = self._each(0, rotation.others, others, queries, coming, met)

        def step(number, coming, met, *, last: bool = False):
            # What is sent next leaves now, beside the kernels.
            here, logs = lax.optimization_barrier((coming, [each.part.log_sum for each in met]))
            met = [Met(start, seen, Part(part.out, log)) for (start, seen, part), log in zip(met, logs, strict=True)]
            coming = None if last else self._sent(rotation.travel, here)
            return coming, meet(rotation.met(number), here, met)

        if groups > 1:
            _, met = step(groups - 1, *self._each(1, groups - 1, step, queries, coming, met), last=True)
        for rest in rotation.own_last():
            met = meet(rest, keys, met)
        return met

    def _each(self, start: int, stop: int, body: Callable, queries: Queries, coming, met: list[Met]):
        """`for i in range(start, stop): coming, met = body(i, coming, met)`; a loop carries the result so far."""
        if stop - start <= _UNROLLED:
            for i in range(start, stop):
                coming, met = body(i, coming, met)
            return coming, met

        def turn(carry, i):
            coming, met = body(i, carry[0], [Met(0, True, carry[1])])
            return (coming, self._over_all(queries, met)), None

        (coming, total), _ = lax.scan(turn, (coming, self._over_all(queries, met)), jnp.arange(start, stop))
        return coming, [Met(0, True, total)]

    def _over_all(self, queries: Queries, met: list[Met], dtype=jnp.float32) -> Part:
        axis = self.kernels.axis
        return over_all(met, queries.q.shape[axis], axis, dtype)

    def _around_back(self, queries: Queries, keys: Keys):
        rotation = self._rotation(queries)
        meet = lambda visit_, keys, *sums: visit_back(self.kernels, *visit_, queries, keys, *sums)
        if (further := self.kernels.further) is not None:
            queries = queries._replace(q=further.scaled(queries.q))
            meet = lambda visit_, keys, *sums: visit_back_further(further, *visit_, queries, keys, *sums)
        groups = rotation.groups
        d_q, *own = _zeros(queries.q, keys.k, keys.v)
        coming = self._sent(rotation.travel, keys) if groups > 1 else None
        for first in rotation.own_first():
            d_q, own = meet(first, keys, d_q, own)
        others = lambda i, sums: meet(rotation.own_rest(i), keys, *sums)
        d_q, own = _repeat(0, rotation.others, others, (d_q, tuple(own)))

        def step(number, carry, *, first: bool = False, last: bool = False):
            here, d_q, d_keys = carry
            here, d_q = lax.optimization_barrier((here, d_q))
            coming = None if last else self._sent(rotation.travel, here)
            d_keys = d_keys if first else self._sent(rotation.travel, d_keys)
            return coming, *meet(rotation.met(number), here, d_q, d_keys)

        if groups > 1:
            # Sums travel in the type of keys, as those of a reduce-scatter do.
            carry = coming, d_q, tuple(jnp.zeros_like(x) for x in (keys.k, keys.v))
            carry = step(1, carry, first=True, last=groups == 2)
            if groups > 2:
                carry = step(groups - 1, _repeat(2, groups - 1, step, carry), last=True)
            _, d_q, d_keys = carry
            d_keys = self._sent(rotation.home, d_keys)
        for rest in rotation.own_last():
            d_q, own = meet(rest, keys, d_q, own)
        if groups > 1:
            own = tuple(x + y.astype(x.dtype) for x, y in zip(own, d_keys, strict=True))
        return d_q if further is None else d_q * further.scale, *own

    def _rotation(self, queries: Queries) -> Rotation:
        return Rotation(self.ring, self.whole, queries.q.shape[self.kernels.axis], self.pattern)

    # Under a window keys go to their neighbours.

    def _near(self, queries: Queries, keys: Keys) -> list[Met]:
        ways = self._ways(queries)
        met = visit(self.kernels, *ways[0].own(), queries, keys)
        for way in ways:
            here = keys
            for number in range(1, way.steps + 1):
                here = self._next(way, number, here)
                met += visit(self.kernels, *way.met(number), queries, here)
        return met

    def _near_back(self, queries: Queries, keys: Keys):
        d_q, *own = _zeros(queries.q, keys.k, keys.v)
        ways = self._ways(queries)
        for way in ways:
            d_q, more = self._one_way_back(way, queries, keys, d_q)
            own = [x + y for x, y in zip(own, more, strict=True)]
        d_q, own = visit_back(self.kernels, *ways[0].own(), queries, keys, d_q, own)
        return d_q, *own

    def _one_way_back(self, way: Neighbours, queries: Queries, keys: Keys, d_q):
        """The gradient of queries so far, and that of a device's own keys that others see."""
        axis = self.kernels.axis
        here, d_keys = keys, None
        add = lambda x, y: x + way.spread(y.astype(x.dtype), x.shape[axis] // 2, axis)
        both = lambda how, tree: self._sent(lambda tree: tuple(how(x, axis) for x in tree), tree)
        for number in range(1, way.steps + 1):
            here = self._next(way, number, here)
            d_q, new = visit_back(self.kernels, *way.met(number), queries, here, d_q, _zeros(here.k, here.v))
            if d_keys is None:
                d_keys = tuple(x.astype(keys.k.dtype) for x in new)
            else:
                d_keys = tuple(add(x, y) for x, y in zip(both(way.travel, d_keys), new, strict=True))
        own = _zeros(keys.k, keys.v)
        return d_q, own if d_keys is None else [add(x, y) for x, y in zip(own, both(way.home, d_keys), strict=True)]

    def _ways(self, queries: Queries) -> list[Neighbours]:
        """From which neighbours keys come: those before, and if the pattern is not causal those after."""
        both = (False,) if self.pattern.causal else (False, True)
        size = queries.q.shape[self.kernels.axis]
        return [Neighbours(self.axes, size, self.pattern, back, self.kernels.whole_lanes) for back in both]

    def _next(self, way: Neighbours, number: int, here: Keys) -> Keys:
        size, axis = way.needed(number), self.kernels.axis
        move = lambda x, dim: None if x is None else way.travel(way.part(x, size, dim), dim)
        return self._sent(lambda keys: Keys(move(keys.k, axis), move(keys.v, axis), move(keys.ids, 1)), here)

    def _sent(self, how: Callable, tree):
        # The ledger reads the names off this scope.
        with jax.named_scope(f"ring[{self.text} -> {self.text}]"):
            return how(tree)


def _repeat(start: int, stop: int, body: Callable, carry):
    """`for i in range(start, stop): carry = body(i, carry)`, unrolled if that is short."""
    if stop - start <= _UNROLLED:
        for i in range(start, stop):
            carry = body(i, carry)
        return carry
    return lax.scan(lambda carry, i: (body(i, carry), None), carry, jnp.arange(start, stop))[0]


def _zeros(*arrays) -> tuple[jax.Array, ...]:
    """Zeros to which gradients are added, in float32."""
    return tuple(jnp.zeros(x.shape, jnp.float32) for x in arrays)
