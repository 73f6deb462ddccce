"""A mixture of experts as a layer, and how its tokens are routed."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis.named import Axis, NamedArray, dot_each, einsum, save
from trellis.nn.gate import ClampedSwiGLU, swiglu
from trellis.nn.initializers import constant, weight
from trellis.nn.moe.config import Routing
from trellis.nn.moe.interleave import for_each_part
from trellis.nn.moe.measures import Routed, measure_each
from trellis.nn.moe.mixing import Biases, mix_each
from trellis.nn.moe.routing import PLAIN, Choices, choose, limit, score
from trellis.nn.parameters import Bias, Picking, Weight
from trellis.nn.precision import in_one_type, in_type_of


class Shared(eqx.Module):
    """A SwiGLU block that every token goes through, beside the experts that it picks (DeepSeekMoE, Dai et al., 2024,
    arXiv:2401.06066).

    Attributes:
        gate, up: `"embed mlp"`.
        down: `"mlp embed"`.
    """

    gate: Weight
    up: Weight
    down: Weight

    @staticmethod
    def init(embed: Axis, mlp: Axis, *, key, out_scale: float = 1.0) -> "Shared":
        """A fresh block, of its own width."""
        keys = jax.random.split(key, 3)
        return Shared(
            gate=weight(keys[0], (embed, mlp), over="embed"),
            up=weight(keys[1], (embed, mlp), over="embed"),
            down=weight(keys[2], (mlp, embed), over="mlp", scale=out_scale),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        gate, up = dot_each(x, (self.gate, self.up), over="embed")  # "batch pos mlp"
        hidden = swiglu(*in_one_type(save(gate, "mlp_gate"), save(up, "mlp_up")))
        out = einsum("batch pos mlp, mlp embed -> batch pos embed", hidden, self.down)
        return in_type_of(out, x)


class Experts(eqx.Module):
    """A mixture of gated blocks: each token goes to the few that its router picks, and gets their weighted sum.

    >>> axes = [tr.Axis("embed", 8), tr.Axis("mlp", 16), tr.Axis("experts", 4)]
    >>> layer = Experts.init(*axes, per_token=2, key=jax.random.key(0))
    >>> x = tr.random.normal(jax.random.key(1), {"batch": 2, "pos": 6, "embed": 8})
    >>> out, routed = layer.measured(x, tr.ones({"batch": 2, "pos": 6}))
    >>> out.shape, float(routed.load.sum().array)
    ({'batch': 2, 'pos': 6, 'embed': 8}, 24.0)

    Attributes:
        router: `"embed routes"`; `routes` are the experts as the router sees them, whole on every device.
        bias: `"routes"`, added when experts are picked; None without `routing.bias_rate`.
        gate, up: `"experts embed mlp"`.
        down: `"experts mlp embed"`.
        shared: a block for all tokens; None without one.
        biases: of the experts' products; None without.
        router_bias: `"routes"`, added to the router's scores; None without.
        per_token: how many experts each token goes to.
        routing: how tokens are kept evenly over experts, and how they get to them.
        gated: combines an expert's first two products; None for SwiGLU.
    """

    router: Weight
    bias: Picking | None
    gate: Weight
    up: Weight
    down: Weight
    shared: Shared | None
    biases: Biases | None
    router_bias: Bias | None
    per_token: int = eqx.field(static=True)
    routing: Routing = eqx.field(static=True)
    gated: ClampedSwiGLU | None = eqx.field(static=True, default=None)

    @staticmethod
    def init(
        embed: Axis,
        mlp: Axis,
        experts: Axis,
        per_token: int,
        routing: Routing = PLAIN,
        *,
        key,
        out_scale: float = 1.0,
        shared: Axis | None = None,
        biases: bool = False,
        router_bias: bool = False,
        gated: ClampedSwiGLU | None = None,
    ) -> "Experts":
        """Fresh experts.

        Args:
            embed: what goes in and comes out.
            mlp: the width of one expert.
            experts: how many there are.
            per_token: how many each token goes to.
            routing: how tokens are kept evenly over experts, and how they get to them.
            key: a PRNG key.
            out_scale: factor on the deviation of the weights that lead out.
            shared: the width of a block for all tokens, named as the experts' is.
            biases: whether the experts' products have them.
            router_bias: whether the router's scores have one.
            gated: combines an expert's first two products; None for SwiGLU.
        """
        routes, keys = experts.alias("routes"), jax.random.split(key, 4)
        beside = (
            None if shared is None else Shared.init(embed, shared, key=jax.random.fold_in(key, 4), out_scale=out_scale)
        )
        return Experts(
            router=weight(keys[0], (embed, routes), over="embed"),
            bias=None if routing.bias_rate is None else constant(routes, 0.0),
            gate=weight(keys[1], (experts, embed, mlp), over="embed"),
            up=weight(keys[2], (experts, embed, mlp), over="embed"),
            down=weight(keys[3], (experts, mlp, embed), over="mlp", scale=out_scale),
            shared=beside,
            biases=Biases.init(embed, mlp, experts) if biases else None,
            router_bias=constant(routes, 0.0) if router_bias else None,
            per_token=per_token,
            routing=routing,
            gated=gated,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        _, choices = self.routed(x)
        return self._mixed([(x, choices)])[0]

    def routed(self, x: NamedArray) -> tuple[NamedArray, Choices]:
        """Scores `f32["batch pos routes"]` of each token, and the experts that it goes to."""
        scores = self._scores(x)
        return scores, choose(scores, self.per_token, self.routing, bias=self.bias)

    def measured(
        self, x: NamedArray, counted: NamedArray, shares: NamedArray | None = None
    ) -> tuple[NamedArray, Routed]:
        """The result, and what is measured of the routing.

        Args:
            x: `"batch pos embed"`.
            counted, shares: as in `measure`.
        """
        (made,), routed = self.measured_each([(x, *self.routed(x))], [counted], shares)
        return made, routed

    def measured_each(
        self,
        parts: Sequence[tuple[NamedArray, NamedArray, Choices]],
        counted: Sequence[NamedArray],
        shares: NamedArray | None = None,
    ) -> tuple[list[NamedArray], Routed]:
        """The results of several parts of a batch, of the same size, and what is measured of them together.

        Args:
            parts: `"batch pos embed"`, and what `routed` makes of it.
            counted: of each, as in `measure`.
            shares: as in `measure`.
        """
        made = self._mixed([(x, choices) for x, _, choices in parts])
        measured = [(scores, choices, mine) for (_, scores, choices), mine in zip(parts, counted, strict=True)]
        return made, measure_each(measured, self.routing, shares)

    def _scores(self, x: NamedArray) -> NamedArray:
        scores = score(x, self.router)
        return scores if self.router_bias is None else scores + self.router_bias.astype(jnp.float32)

    def _mixed(self, given: list[tuple[NamedArray, Choices]]) -> list[NamedArray]:
        routing, streams = self.routing, [x for x, _ in given]
        if routing.capacity is not None:
            given = [(x, limit(choices, self.router.shape["routes"], routing.capacity)) for x, choices in given]
        added = () if self.biases is None else (self.biases.gate, self.biases.up, self.biases.down)
        gate, up, down, *rest = in_one_type(self.gate, self.up, self.down, *added, *streams)
        biases, rows = Biases(*rest[: len(added)]) if added else None, rest[len(added) :]
        given = [(x, choices) for x, (_, choices) in zip(rows, given, strict=True)]
        own = dict(biases=biases, gated=self.gated, groups=(routing.groups, routing.groups_per_token))
        made = mix_each(given, gate, up, down, **own, way=routing.way, slack=routing.slack, dispatch=routing.dispatch)
        made = [in_type_of(out, x) for out, x in zip(made, streams, strict=True)]
        if self.shared is None:
            return made
        shared = for_each_part(self.shared, len(streams))
        return [out + own(x) for own, out, x in zip(shared, made, streams, strict=True)]
