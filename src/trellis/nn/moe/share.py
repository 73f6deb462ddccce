"""What one device computes of a mixture: the sums of its tokens over their experts, each way that tokens take there."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trellis.mesh.manual.ops import Axes, vary
from trellis.named import save
from trellis.nn.gate import ClampedSwiGLU
from trellis.nn.moe.config import Dispatch
from trellis.nn.moe.dispatch import as_returned, as_sent
from trellis.nn.moe.exchange import exchange_each, gather_experts
from trellis.nn.moe.gradients import Apart
from trellis.nn.moe.grouped import grouped_sums
from trellis.nn.moe.hierarchical import hierarchical_each
from trellis.nn.moe.narrow import Held, Kinds, grouped_each, held
from trellis.nn.moe.rows import Taken, local_experts

# Ways in which tokens travel to the devices of their experts.
EXCHANGES = ("ragged", "slots", "hierarchical")


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Which mesh axes slice tokens, experts and their widths.

    Attributes:
        batch, pos: of tokens.
        experts, mlp: of the experts' weights.
    """

    batch: Axes = ()
    pos: Axes = ()
    experts: Axes = ()
    mlp: Axes = ()

    @property
    def shared(self) -> Axes:
        """Axes along which tokens have to find their experts."""
        return tuple(a for a in self.experts if a in self.batch + self.pos)

    @property
    def partial(self) -> Axes:
        """Axes along which each device has a part of every token's sum."""
        return self.mlp + tuple(a for a in self.experts if a not in self.shared)


class Operands(NamedTuple):
    """What a mixture reads: named arrays, or a device's part of each.

    Attributes:
        tokens: three arrays for each part of a batch: its tokens, `batch pos embed`, and the ids and the weights of
            their choices, `batch pos choices`.
        weights: of the three products, `experts embed mlp` twice and `experts mlp embed`.
        biases: of the first two products, `experts mlp`; or none.
        narrow: the numbers of each narrow weight, and their scale (`narrow_weights`).
    """

    tokens: Sequence
    weights: Sequence
    biases: Sequence
    narrow: Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """How a device computes its share.

    Attributes:
        way: how tokens travel, "auto" decided; not "dense".
        places: of tokens and experts; none for experts if every device has all of their weights.
        kinds: of the narrow numbers of each weight.
        gated: combines the first two products, if not SwiGLU.
        slack, dispatch: as in `mix`.
        ragged: whether the collective of ragged exchanges is used.
        most: for `hierarchical`, the most parts of the experts' first mesh axis in which one token has experts.
        activates: whether the platform has kernels for what comes between the products.
        gathers: whether its kernels read the rows of their tokens themselves.
    """

    way: str
    places: Places
    kinds: Kinds
    gated: ClampedSwiGLU | None
    slack: float
    dispatch: Dispatch | None
    ragged: bool
    most: int
    activates: bool
    gathers: bool

    def sums(self, own: Operands, rooms: Mapping[int, jax.Array], outer: Sequence[int]) -> list[jax.Array]:
        """The sums of each part of a batch, `batch pos embed`: pending along `places.partial`.

        Args:
            own: the device's parts.
            rooms: for weights, by their place among the three: what their gradient is written into (`Apart`).
            outer: as in `grouped_products`, for each weight; or nothing.
        """
        places = self.places
        used = places.batch + places.pos + places.experts + places.mlp
        own, rooms = jax.tree.map(lambda a: vary(a, used), (own, dict(rooms)))
        apart = [Apart(w, rooms[n], rooms[n].shape[1]) if n in rooms else w for n, w in enumerate(own.weights)]
        compute = partial(self._products, held(apart, self.kinds, own.narrow), own.biases, outer)
        rows = [a.reshape(-1, a.shape[-1]) for a in own.tokens]
        parts = list(zip(rows[::3], rows[1::3], rows[2::3], strict=True))
        made = self._exchanged(parts, compute, own.weights[0].shape[0])
        return [out.reshape(x.shape) for out, x in zip(made, own.tokens[::3], strict=True)]

    def _exchanged(self, parts: list[tuple], compute, count: int) -> list[jax.Array]:
        """The sums of flat tokens, `tokens embed`, which go to `count` experts on each device and come back."""
        places, dispatch = self.places, self.dispatch
        here = dict(count=count, gathers=self.gathers and not any(self.kinds))
        if self.way in EXCHANGES:
            how = dict(axes=places.experts, ragged=self.ragged, slack=self.slack, dispatch=dispatch, **here)
            if self.way == "hierarchical":
                return hierarchical_each(parts, compute, **how, most=self.most)
            return exchange_each(parts, compute, **how)
        if places.experts:
            how = dict(axes=places.experts, tokens=places.shared, dispatch=dispatch, **here)
            return [gather_experts(*part, compute, **how) for part in parts]
        made = [local_experts(as_sent(x, dispatch), *routed, compute, **here) for x, *routed in parts]
        return [as_returned(out, dispatch) for out in made]

    def _products(
        self,
        weights: Sequence[jax.Array | Apart | Held],
        biases: Sequence[jax.Array],
        outer: Sequence[int],
        rows: jax.Array,
        sizes: jax.Array,
        counted: jax.Array,
        taken: Taken | None = None,
    ) -> jax.Array:
        """What experts make of rows sorted by expert, each times how much it counts; of rows that kernels gather
        (`taken`), summed for each token."""
        gate, up, down = weights
        in_words = self.dispatch is not None and bool(self.places.shared)  # kept as these, not as what they stand for
        rows = rows if in_words else save(rows, "mlp_rows")
        products = grouped_each(rows, (gate, up), sizes, outer[:2], taken)
        if self.activates:
            return _activated(products, sizes, counted, biases, self.gated, down)
        hidden = _hidden(products, sizes, counted, biases, self.gated)
        if taken is None:
            return grouped_each(hidden, (down,), sizes, outer[2:])[0]
        return grouped_sums(hidden, down, sizes, taken, outer[2:])


def _activated(products, sizes, counted, added, gated_by: ClampedSwiGLU | None, down: jax.Array | Held) -> jax.Array:
    """The last product by the kernels of a platform that has some for what comes before it."""
    from trellis.nn.moe.activations import activate, activated_product

    given = (*map(save, products, ("mlp_gate", "mlp_up")), counted, tuple(added))
    if not isinstance(down, Held):
        return activated_product(*given, down, sizes, gated_by)
    return grouped_each(activate(*given, sizes, gated_by), (down,), sizes)[0]


def _hidden(products, sizes, counted, added, gated_by: ClampedSwiGLU | None) -> jax.Array:
    """The operand of the last product of a device's experts, for rows sorted by expert, times how much each counts."""
    gated, upped = products
    if added:
        # As a product: its gradient is one too, whose sums over rows are float32.
        group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(counted.shape[0]), side="right")
        own = jax.nn.one_hot(group, sizes.shape[0], dtype=gated.dtype)
        mine = (group < sizes.shape[0])[:, None]  # the others may be NaN, and so may their gradients
        gated, upped = (jnp.where(mine, y + own @ bias, 0) for y, bias in zip((gated, upped), added, strict=True))
    gated, upped = save(gated, "mlp_gate"), save(upped, "mlp_up")
    hidden = jax.nn.silu(gated) * upped if gated_by is None else gated_by(gated, upped)
    return (hidden.astype(jnp.float32) * counted[:, None]).astype(gated.dtype)
