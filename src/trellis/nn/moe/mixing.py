"""The weighted sum of what a token's experts make of it: several ways, one result."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp

from trellis._compat import mapped_over, maps_around, refuses_copies
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.manual.ops import Axes, mark_pending, vary, varying_axes
from trellis.named import Axis, NamedArray, dot_each, einsum, one_hot, save, settle, silu
from trellis.named.backend import RAGGED, platform_of
from trellis.named.explicitly import explicitly
from trellis.named.operand import operand
from trellis.named.placing import move, refuse_slices
from trellis.nn.gate import ClampedSwiGLU
from trellis.nn.initializers import constant
from trellis.nn.moe.config import EXPERT_WEIGHTS, Dispatch, Way
from trellis.nn.moe.dispatch import as_returned, as_sent
from trellis.nn.moe.exchange import ExpertsError, exchange_each, gather_experts
from trellis.nn.moe.gradients import Apart, gradient_only, rows_to_fill
from trellis.nn.moe.grouped import activates, gathers, grouped_sums
from trellis.nn.moe.hierarchical import hierarchical_each, parts_met
from trellis.nn.moe.narrow import Held, grouped_each, held, narrow_weights, unmarked
from trellis.nn.moe.once import once
from trellis.nn.moe.routing import Choices
from trellis.nn.moe.rows import local_experts
from trellis.nn.moe.tiles import slower_than_a_copy
from trellis.nn.parameters import Bias
from trellis.notation import spec_of
from trellis.notation.state import state_of
from trellis.program.said import laid_out_anew

TOKENS = ("batch", "pos", "embed")
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


class Biases(eqx.Module):
    """What is added to the products of a mixture's experts.

    Attributes:
        gate, up: `"experts mlp"`.
        down: `"routes embed"`, whole on every device.
    """

    gate: Bias
    up: Bias
    down: Bias

    @staticmethod
    def init(embed: Axis, mlp: Axis, experts: Axis) -> "Biases":
        """Zeros."""
        return Biases(
            constant((experts, mlp), 0.0),
            constant((experts, mlp), 0.0),
            constant((experts.alias("routes"), embed), 0.0),
        )


def mix(
    x: NamedArray,
    choices: Choices,
    gate: NamedArray,
    up: NamedArray,
    down: NamedArray,
    *,
    biases: Biases | None = None,
    gated: ClampedSwiGLU | None = None,
    way: Way = "auto",
    slack: float = 1.5,
    groups: tuple[int, int] = (1, 1),
    dispatch: Dispatch | None = None,
) -> NamedArray:
    """Each token's weighted sum of its experts, which are SwiGLU blocks, on any layout.

    `dense`
        Every expert computes every token, and the weights are zero for most: for checking.
    `grouped`
        Tokens are sorted by expert, and each group is multiplied with its expert's weights. Tokens stay where they
        are: if `experts` are sliced, their weights are gathered.
    `gather`
        Each device gets all tokens along the experts' mesh axes, computes its own experts, and the sums are scattered
        back.
    `ragged`
        Tokens go to the devices of their experts, and nothing else travels (`jax.lax.ragged_all_to_all`).
    `slots`
        The same in slots of one size for each pair of devices, for backends without that collective.
    `hierarchical`
        Tokens go once to each part of the experts' first mesh axis where they have experts, and on along the others:
        for a first axis that crosses hosts, while the others lie inside one.
    `auto`
        `grouped` if every device has all experts; `gather` if that moves no more than an exchange, or if tokens are not
        sliced as experts are; otherwise `hierarchical` along several mesh axes, except on TPUs, where all sides of a
        torus work at once in a single exchange; and `ragged` or, on a CPU, `slots` along one.

    If every device has all tokens, as when a text is generated, there is nothing to exchange: `ragged`, `slots` and
    `hierarchical` become `gather`, which then gathers nothing.

    No choice is dropped, whatever the way; `trellis.nn.moe.limit` drops some before. Values and gradients are those of
    `dense`, up to the order of sums.

    Args:
        x: `"batch pos embed"`.
        choices: each token's experts and weights.
        gate, up: `"experts embed mlp"`.
        down: `"experts mlp embed"`.
        biases: what is added to these products.
        gated: combines the first two products, if not SwiGLU.
        way: how.
        slack: room of an exchange's buffers, as a multiple of an even load. What does not fit goes in further rounds.
        groups: how many groups the experts are in, and how many of these a token's come from, as the router limits it
            (`Routing`); buffers of `hierarchical` are made for that.
        dispatch: the numbers in which tokens, and gradients of what comes back, go to experts, in every way; None for
            their own.

    Returns:
        `"batch pos embed"`.

    Raises:
        ExpertsError: the way is not one that the layout or the backend has.
        NamesError: in a manual program, more is sliced than tokens, or these not alike. There `exchange_experts` and
            others bring tokens to the experts' slices.
    """
    how = dict(biases=biases, gated=gated, way=way, slack=slack, groups=groups, dispatch=dispatch)
    return mix_each([(x, choices)], gate, up, down, **how)[0]


def mix_each(
    given: Sequence[tuple[NamedArray, Choices]],
    gate: NamedArray,
    up: NamedArray,
    down: NamedArray,
    *,
    biases: Biases | None,
    gated: ClampedSwiGLU | None,
    way: Way,
    slack: float,
    groups: tuple[int, int],
    dispatch: Dispatch | None,
) -> list[NamedArray]:
    """`mix` for several parts of a batch: weights move once for all, and exchanges follow each other.

    Args:
        given: tokens and choices of each, all of the same sizes.
        gate, up, down, biases, gated, way, slack, groups, dispatch: as there.
    """
    given = [(operand(x, "mix", pending=True), choices) for x, choices in given]
    run = lambda given, gate, up, down, biases: _mixed(
        given, gate, up, down, biases, gated, way, slack, groups, dispatch
    )
    placed = run if maps_around() else partial(explicitly, run)  # what devices do with tokens cannot be mapped
    made = placed(given, gate, up, down, biases)
    if biases is None:
        return made
    return [
        out + _weighted(choices, biases.down).astype(x.dtype) for out, (x, choices) in zip(made, given, strict=True)
    ]


def _mixed(
    given: Sequence[tuple[NamedArray, Choices]],
    gate,
    up,
    down,
    biases: Biases | None,
    gated: ClampedSwiGLU | None,
    way: Way,
    slack: float,
    groups: tuple[int, int],
    dispatch: Dispatch | None,
) -> list[NamedArray]:
    first, choices = given[0]
    places = _places(first)
    chosen = _chosen(way, places, first, choices.ids.shape["choices"])
    if chosen == "dense":
        return [_dense(*each, gate, up, down, biases, gated, dispatch) for each in given]
    kinds, (gate, up, down) = unmarked((gate, up, down))
    experts = gate.axis("experts").size
    given = [
        (x, choices._replace(weights=choices.weights.with_array(once(chosen, *(a.array for a in varied)))))
        for x, choices in given
        for varied in [(choices.weights, x, gate, up, down)]
    ]
    if chosen == "grouped":
        places = dataclasses.replace(places, experts=())
    of_tokens = [  # three arrays for each part of the batch: its tokens, and the ids and weights of their choices
        part.transpose((*TOKENS[:2], last))
        for x, choices in given
        for part, last in ((x, "embed"), (choices.ids, "choices"), (choices.weights, "choices"))
    ]
    gate, up = (w.transpose(("experts", "embed", "mlp")) for w in (gate, up))
    down = down.transpose(("experts", "mlp", "embed"))
    added = () if biases is None else tuple(b.transpose(("experts", "mlp")) for b in (biases.gate, biases.up))
    num_of_tokens, num_added = len(of_tokens), len(added)
    num_narrow = 2 * sum(kind is not None for kind in kinds)  # the numbers of each narrow weight, and their scale
    mesh = jax.typeof(first.array).sharding.mesh
    devices = math.prod(mesh.shape[a] for a in places.experts) if places.experts else 1
    ragged = chosen == "ragged" or (chosen == "hierarchical" and platform_of(first.array) in RAGGED)

    def body(outer, longer, *given):
        used = places.batch + places.pos + places.experts + places.mlp
        given = [vary(a, used) for a in given]
        arrays = iter(given)
        of_tokens, weights, added, rounded = (
            list(itertools.islice(arrays, count)) for count in (num_of_tokens, 3, num_added, num_narrow)
        )
        rooms = arrays  # what is left: for the gradients that have rows to fill
        weights = [Apart(w, next(rooms), longer[n]) if n in longer else w for n, w in enumerate(weights)]
        gate, up, down = held(weights, kinds, rounded)
        rows = [a.reshape(-1, a.shape[-1]) for a in of_tokens]
        parts = list(zip(rows[::3], rows[1::3], rows[2::3], strict=True))
        in_words = dispatch is not None and bool(places.shared)  # which are kept, instead of what they stand for

        def compute(rows, sizes, counted, taken=None):
            rows = rows if in_words else save(rows, "mlp_rows")
            products = grouped_each(rows, (gate, up), sizes, outer[:2], taken)
            if activates(first.array):
                return _activated(products, sizes, counted, added, gated, down)
            hidden = _hidden(products, sizes, counted, added, gated)
            if taken is None:
                return grouped_each(hidden, (down,), sizes, outer[2:])[0]
            return grouped_sums(hidden, down, sizes, taken, outer[2:])

        beside = dict(count=experts // devices, gathers=gathers(first.array) and not any(kinds))
        if chosen in EXCHANGES:
            how = dict(axes=places.experts, ragged=ragged, slack=slack, dispatch=dispatch, **beside)
            if chosen == "hierarchical":
                most = parts_met(mesh.shape[places.experts[0]], *groups)
                made = hierarchical_each(parts, compute, **how, most=most)
            else:
                made = exchange_each(parts, compute, **how)
        elif places.experts:
            how = dict(axes=places.experts, tokens=places.shared, dispatch=dispatch, **beside)
            made = [gather_experts(*part, compute, **how) for part in parts]
        else:
            made = [local_experts(as_sent(x, dispatch), *routed, compute, **beside) for x, *routed in parts]
            made = [as_returned(out, dispatch) for out in made]
        return [out.reshape(x.shape) for out, x in zip(made, of_tokens[::3], strict=True)]

    arrays = (*of_tokens, gate, up, down, *added)
    narrow = narrow_weights((gate, up, down), kinds)
    if state_of(first.array).mode != "explicit":
        # In a manual program a device has its own experts, and its own parts of their products, only.
        refuse_slices(arrays, ("choices", "embed", "experts", "mlp"), "mix")
        own = [a.array for a in (*arrays, *narrow)]
        over = varying_axes(*own)  # so that JAX sums the gradients of weights, of which each has its tokens' share
        made = body((), {}, *(vary(a, over) for a in own))
        return [x.with_array(out) for x, out in zip(of_tokens[::3], made, strict=True)]
    if mapped_over():
        raise _mapped(chosen)
    tokens, summed = (places.batch, places.pos, ()), frozenset(places.partial)
    of_weights = [(places.experts, (), places.mlp)] * 2 + [(places.experts, places.mlp, ())]
    # The numbers of a narrow weight go where it goes, without its gradient; their scale goes nowhere.
    of_narrow = [to for where, kind in zip(of_weights, kinds, strict=True) if kind is not None for to in (where, ())]
    slices = [tokens] * num_of_tokens + of_weights + [(places.experts, places.mlp)] * len(added) + of_narrow
    others = frozenset(places.batch + places.pos) - frozenset(places.experts + places.mlp)
    copied = [summed] * num_of_tokens + [others] * (3 + len(added)) + [frozenset()] * len(narrow)
    on_tpu = platform_of(first.array) == "tpu"

    def brought(a, slices, copied):
        out = move(a, slices, copied).array
        if "experts" not in a.names:
            return out
        slower = slower_than_a_copy(out.shape, *_gathered(a, out), out.dtype.itemsize) if on_tpu else 0.0
        with laid_out_anew(slower):
            return save(out, EXPERT_WEIGHTS, if_named=True)

    # Of a narrow weight only the numbers move. Where more rows are better summed, a weight's gradient goes its own way.
    weights = gate, up, down
    marked = [n for n, kind in enumerate(kinds) if kind is not None]
    filled = {n: rows_to_fill(w.array, of_weights[n]) for n, w in enumerate(weights) if n not in marked}
    longer = {n: rows for n, rows in filled.items() if rows > weights[n].array.shape[1]}

    def only_gradient(n, rows=None):
        w = weights[n]
        return gradient_only(w.array, w.names, of_weights[n], others, rows or w.array.shape[1])

    moved = [  # numbered so that the weights are 0, 1 and 2
        only_gradient(n) if n in marked else brought(_fixed(a) if n in longer else a, *where)
        for n, (a, *where) in enumerate(zip((*arrays, *narrow), slices, copied, strict=True), -num_of_tokens)
    ]
    outer = [_gathered(*pair)[0] for pair in zip(weights, moved[num_of_tokens:])]
    moved += [only_gradient(*each) for each in longer.items()]
    specs = tuple(spec_of(state_of(a).axes, (), state_of(a).copied) for a in moved)
    mix = by_device(
        lambda *a: [mark_pending(out, places.partial) for out in body(outer, longer, *a)],
        mesh=mesh,
        in_specs=specs,
        out_specs=[spec_of(tokens, summed)] * len(given),
    )
    try:
        return [settle(NamedArray(out, TOKENS)) for out in mix(*moved)]
    except Exception as error:
        if not refuses_copies(error):
            raise
        raise _mapped(chosen) from error


def _mapped(way: str) -> ExpertsError:
    """Why JAX does not map what each device does with its tokens."""
    return ExpertsError(
        "A mixture of experts on a mesh cannot be mapped, either by vmap or by a fold over layers in a pipeline.",
        seen=f"the way {way}",
        where="model.routing.way",
        fix="use the dense way, or tr.map instead of vmap, or remove the layers from the layout's compute (the "
        "trainer can run mixtures in a pipeline)",
    )


def _fixed(w: NamedArray) -> NamedArray:
    """A weight without a gradient."""
    return w.with_array(jax.lax.stop_gradient(w.array))


def _gathered(before: NamedArray, after: jax.Array) -> tuple[int, int]:
    """Along which dimension slices of an expert's weights came together last, and how many. It lies outermost."""
    held, has, mesh = state_of(before.array).axes, state_of(after).axes, jax.typeof(after).sharding.mesh
    gone = [[axis for axis in was if axis not in now] for was, now in zip(held, has, strict=True)]
    dimension = next((n for n, axes in enumerate(gone) if axes), 0)
    return dimension, math.prod(mesh.shape[axis] for axis in gone[dimension])


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


def _weighted(choices: Choices, of_expert: NamedArray) -> NamedArray:
    """The weighted sum of what each of a token's experts has, `"routes embed"`."""
    hot = one_hot(choices.ids, of_expert.axis("routes"))
    weights = einsum("... choices routes, ... choices -> ... routes", hot, choices.weights).astype(of_expert.dtype)
    return einsum("... routes, routes embed -> ... embed", weights, of_expert)


def _dense(x, choices: Choices, gate, up, down, biases: Biases | None, gated_by: ClampedSwiGLU | None, dispatch):
    """By definition: all experts for all tokens."""
    if dispatch is not None:
        x = settle(x).transpose(TOKENS)
        x = x.with_array(as_sent(x.array, dispatch))
    experts = unmarked((gate,))[1][0].axis("experts")
    hot = one_hot(choices.ids, Axis("experts", experts.size))
    weights = einsum("... choices experts, ... choices -> ... experts", hot, choices.weights).astype(x.dtype)
    gated, upped = dot_each(x, (gate, up), over="embed")  # "batch pos experts mlp"
    if biases is not None:
        gated, upped = gated + biases.gate, upped + biases.up
    hidden = silu(gated) * upped if gated_by is None else gated_by(gated, upped)
    made = einsum("batch pos experts mlp, experts mlp embed -> batch pos embed", hidden * weights, down)
    return made if dispatch is None else made.with_array(as_returned(settle(made).array, dispatch))


def _places(x: NamedArray) -> Places:
    """The places that the layout in force gives."""
    layout = current_layout()
    return Places() if layout is None or state_of(x.array).mode != "explicit" else places_of(layout)


def places_of(layout: Layout) -> Places:
    """The places that a layout gives; tokens are whole along the axes that slice the experts' widths."""
    batch, pos, _ = layout.assign(TOKENS)
    experts, _, mlp = layout.assign(("experts", "embed", "mlp"))
    batch, pos = (tuple(a for a in axes if a not in mlp) for axes in (batch, pos))
    return Places(batch, pos, experts, mlp)


def check_way(way: Way, places: Places, platform: str) -> None:
    """Refuses a way in which tokens cannot reach their experts.

    Args:
        way: as it was asked for.
        places: of tokens and experts.
        platform: of the devices, as `trellis.mesh.platform` has it.

    Raises:
        ExpertsError: it is an exchange, and mesh axes slice experts but not tokens, or the platform has none.
    """
    if places.experts and way in EXCHANGES and places.shared != places.experts:
        raise ExpertsError(
            "Tokens can be exchanged only along mesh axes that slice both experts and tokens.",
            seen=f"{way}: experts/{'/'.join(places.experts)}, tokens/{'/'.join(places.batch + places.pos) or 'none'}",
            where="model.routing.way",
            fix="use gather or auto, or slice the batch over these axes too",
        )
    if way == "hierarchical" and len(places.experts) == 1:
        raise ExpertsError(
            "A hierarchical exchange needs experts sliced over two mesh axes or more, the slowest first.",
            seen=f"hierarchical: experts/{places.experts[0]}",
            where="model.routing.way",
            fix="use ragged or auto, or set mesh.expert_y to the number of hosts that experts are sliced over and "
            "mesh.expert to the number of devices on each",
        )
    if places.experts and way == "ragged" and platform not in RAGGED:
        raise ExpertsError(
            "A ragged exchange needs a backend that supports it.",
            seen=f"way='ragged' on {platform}",
            where="model.routing.way",
            fix=f"use slots or auto here; {' and '.join(RAGGED)} support it",
        )


def _chosen(way: Way, places: Places, x: NamedArray, choices: int) -> str:
    """The way that tokens take to their experts."""
    platform = platform_of(x.array)
    if places.experts and way in EXCHANGES and not places.batch + places.pos:
        return "gather"
    check_way(way, places, platform)
    if not places.experts:
        return "dense" if way == "dense" else "grouped"
    if way != "auto":
        return way
    sizes = jax.typeof(x.array).sharding.mesh.shape
    # An exchange sends a token to at most as many devices as it has choices; a gather to all of them.
    if places.shared != places.experts or math.prod(sizes[a] for a in places.experts) <= choices:
        return "gather"
    if len(places.experts) > 1 and platform != "tpu":
        return "hierarchical"
    return "ragged" if platform in RAGGED else "slots"
