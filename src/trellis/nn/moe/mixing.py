"""The weighted sum of what a token's experts make of it: several ways, one result."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import equinox as eqx
import jax

from trellis._compat import mapped_over, maps_around, refuses_copies
from trellis.mesh.by_device import by_device
from trellis.mesh.layout import Layout, current_layout
from trellis.mesh.manual.ops import mark_pending, vary, varying_axes
from trellis.named import Axis, NamedArray, dot_each, einsum, is_named, one_hot, save, settle, silu
from trellis.named.backend import RAGGED, platform_of
from trellis.named.explicitly import explicitly
from trellis.named.operand import operand
from trellis.named.placing import move, refuse_slices
from trellis.nn.gate import ClampedSwiGLU
from trellis.nn.initializers import constant
from trellis.nn.moe.config import EXPERT_WEIGHTS, Dispatch, Way
from trellis.nn.moe.dispatch import as_returned, as_sent
from trellis.nn.moe.exchange import ExpertsError
from trellis.nn.moe.gradients import gradient_only, rows_to_fill
from trellis.nn.moe.grouped import activates, gathers
from trellis.nn.moe.hierarchical import parts_met
from trellis.nn.moe.narrow import Kinds, narrow_weights, unmarked
from trellis.nn.moe.once import once
from trellis.nn.moe.routing import Choices
from trellis.nn.moe.share import EXCHANGES, Operands, Places, Share
from trellis.nn.moe.tiles import slower_than_a_copy
from trellis.nn.parameters import Bias
from trellis.notation import spec_of
from trellis.notation.state import state_of
from trellis.program.said import laid_out_anew

TOKENS = ("batch", "pos", "embed")


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
    kinds, weights = unmarked((gate, up, down))
    operands = _operands(chosen, given, weights, kinds, biases)
    mesh, platform = jax.typeof(first.array).sharding.mesh, platform_of(first.array)
    share = Share(
        way=chosen,
        places=dataclasses.replace(places, experts=()) if chosen == "grouped" else places,
        kinds=kinds,
        gated=gated,
        slack=slack,
        dispatch=dispatch,
        ragged=chosen == "ragged" or (chosen == "hierarchical" and platform in RAGGED),
        most=parts_met(mesh.shape[places.experts[0]], *groups) if chosen == "hierarchical" else 1,
        activates=activates(first.array),
        gathers=gathers(first.array),
    )
    if state_of(first.array).mode != "explicit":
        return _by_hand(share, operands)
    if mapped_over():
        raise _mapped(chosen)
    return _on_mesh(share, operands, on_tpu=platform == "tpu")


def _operands(way: str, given, weights: Sequence[NamedArray], kinds: Kinds, biases: Biases | None) -> Operands:
    """What a mixture reads, each with its dimensions in order."""
    tokens = []
    for x, choices in given:
        counts = choices.weights.with_array(once(way, *(a.array for a in (choices.weights, x, *weights))))
        pairs = ((x, "embed"), (choices.ids, "choices"), (counts, "choices"))
        tokens += [part.transpose((*TOKENS[:2], last)) for part, last in pairs]
    orders = [("experts", "embed", "mlp")] * 2 + [("experts", "mlp", "embed")]
    weights = [w.transpose(order) for w, order in zip(weights, orders, strict=True)]
    added = [] if biases is None else [b.transpose(("experts", "mlp")) for b in (biases.gate, biases.up)]
    return Operands(tokens, weights, added, narrow_weights(weights, kinds))


def _by_hand(share: Share, operands: Operands) -> list[NamedArray]:
    """In a manual program, where a device has its own experts, and its own parts of their products, only."""
    given = (*operands.tokens, *operands.weights, *operands.biases)
    refuse_slices(given, ("choices", "embed", "experts", "mlp"), "mix")
    own = jax.tree.map(lambda a: a.array, operands, is_leaf=is_named)
    over = varying_axes(*jax.tree.leaves(own))  # so that JAX sums the gradients of weights: each has its tokens' share
    made = share.sums(jax.tree.map(lambda a: vary(a, over), own), {}, ())
    return [x.with_array(out) for x, out in zip(operands.tokens[::3], made, strict=True)]


def _on_mesh(share: Share, operands: Operands, on_tpu: bool) -> list[NamedArray]:
    """In explicit mode: what a device needs is moved to it, and what it makes is summed."""
    places, kinds = share.places, share.kinds
    mesh = jax.typeof(operands.tokens[0].array).sharding.mesh
    tokens, summed = (places.batch, places.pos, ()), frozenset(places.partial)
    of_weights = [(places.experts, (), places.mlp)] * 2 + [(places.experts, places.mlp, ())]
    others = frozenset(places.batch + places.pos) - frozenset(places.experts + places.mlp)
    # Where more rows are better summed, a weight's gradient goes its own way; so does that of a narrow weight, of which
    # only the numbers move. They go where it goes, without a gradient, and their scale goes nowhere.
    marked = [n for n, kind in enumerate(kinds) if kind is not None]
    of_narrow = [to for n in marked for to in (of_weights[n], ())]
    rows = {n: rows_to_fill(w.array, of_weights[n]) for n, w in enumerate(operands.weights) if n not in marked}
    longer = {n: count for n, count in rows.items() if count > operands.weights[n].array.shape[1]}

    def brought(a: NamedArray, slices: tuple, copied: frozenset[str]) -> jax.Array:
        out = move(a, slices, copied).array
        if "experts" not in a.names:
            return out
        slower = slower_than_a_copy(out.shape, *_gathered(a, out), out.dtype.itemsize) if on_tpu else 0.0
        with laid_out_anew(slower):
            return save(out, EXPERT_WEIGHTS, if_named=True)

    def only_gradient(n: int, rows: int | None = None) -> jax.Array:
        w = operands.weights[n]
        return gradient_only(w.array, w.names, of_weights[n], others, rows or w.array.shape[1])

    moved = Operands(
        [brought(x, tokens, summed) for x in operands.tokens],
        [
            only_gradient(n) if n in marked else brought(_fixed(w) if n in longer else w, of_weights[n], others)
            for n, w in enumerate(operands.weights)
        ],
        [brought(b, (places.experts, places.mlp), others) for b in operands.biases],
        [brought(a, to, frozenset()) for a, to in zip(operands.narrow, of_narrow, strict=True)],
    )
    rooms = {n: only_gradient(n, count) for n, count in longer.items()}
    outer = [_gathered(*pair)[0] for pair in zip(operands.weights, moved.weights, strict=True)]
    arrays, structure = jax.tree.flatten((moved, rooms))

    def device(*arrays):
        made = share.sums(*jax.tree.unflatten(structure, arrays), outer)
        return [mark_pending(out, places.partial) for out in made]

    specs = tuple(spec_of(state_of(a).axes, (), state_of(a).copied) for a in arrays)
    to = [spec_of(tokens, summed)] * (len(moved.tokens) // 3)
    try:
        made = by_device(device, mesh=mesh, in_specs=specs, out_specs=to)(*arrays)
        return [settle(NamedArray(out, TOKENS)) for out in made]
    except Exception as error:
        if not refuses_copies(error):
            raise
        raise _mapped(share.way) from error


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
