"""One training step: a pure function from a state and a batch to the next state and metrics.

    parameters at rest -> cast -> loss of each microbatch -> gradients -> update

Everything that moves between devices follows from the layout in force.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from trellis.mesh.layout import current_layout
from trellis.mesh.reshard import place
from trellis.named import Keep, NamedArray, is_named, named
from trellis.named.reshape import split_axis, transpose
from trellis.nn.loss import TokenLoss, next_token_loss
from trellis.nn.moe import Routed, summary
from trellis.notation import spec_of
from trellis.notation.state import mode_of, state_of
from trellis.optim.averaging import average as moving_average
from trellis.train.state import State, cast

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a step computes, besides the model and the optimizer.

    Attributes:
        compute: the type of activations and of parameters in use.
        exceptions: pairs of a part of a parameter's name and the type that it is used in instead.
        microbatches: parts of a batch, one after the other.
        accumulation: "pending" gathers parameters and sums gradients over devices once a step, however many
            microbatches; "sharded" once a microbatch, which needs less memory.
        policy: what each layer keeps for the backward pass.
        z_loss: weight of the squared log-normalizer in the loss.
        ema: decay of the moving average of the parameters.
        chunk_bytes: what the float32 logits of a chunk of the loss take; None for what suits the device.
    """

    compute: str = "float32"
    exceptions: tuple[tuple[str, str], ...] = ()
    microbatches: int = 1
    accumulation: str = "pending"
    policy: Keep | None = None
    z_loss: float = 0.0
    ema: float | None = None
    chunk_bytes: int | None = None


def batch_loss(model, batch, recipe: Recipe, key=None) -> TokenLoss:
    """Summed loss of a batch and what is reported beside it: the first result of `measured_loss`."""
    return measured_loss(model, batch, recipe, key)[0]


def measured_loss(model, batch, recipe: Recipe, key=None, shares: NamedArray | None = None):
    """Summed loss of a batch in the parameters' type, and what is measured of its routing.

    A model with experts adds its routers' losses to what is minimized.

    Args:
        model: parameters in the type they are used in.
        batch: named arrays `tokens`, `targets`, `loss_mask`, `segment_ids` and `positions`, the last two or None,
            each `"batch pos"`.
        recipe: what is computed.
        key: for dropout; None for none.
        shares: `f32["layers routes"]`, experts' shares of the tokens of the whole batch, where this is a part of it.

    Returns:
        `TokenLoss`, and `Routed` or, of a model without experts, None.
    """
    counted = batch["loss_mask"].astype(jnp.float32)
    options = dict(segment_ids=batch["segment_ids"], positions=batch["positions"], policy=recipe.policy, key=key)
    hidden, routed = _hidden(model, batch["tokens"], counted, shares, options)
    sums = next_token_loss(
        hidden,
        model.unembedding,
        batch["targets"],
        counted,
        bias=model.unembedding_bias,
        vocab_size=model.config.vocab,
        z_loss=recipe.z_loss,
        chunk_bytes=recipe.chunk_bytes,
    )
    return (sums if routed is None else sums._replace(total=sums.total + model.penalty(routed))), routed


def _hidden(model, tokens, counted, shares, options: dict) -> tuple[NamedArray, Routed | None]:
    if not hasattr(model, "routed"):
        return model(tokens, **options), None
    return model.routed(tokens, counted, shares=shares, **options)


def make_step(
    optimizer: optax.GradientTransformation, recipe: Recipe, learning_rate: Callable | None = None
) -> Callable[[State, dict], tuple[State, Metrics]]:
    """The step, to be compiled under a layout with the state donated.

    Args:
        optimizer: gets gradients and parameters as the state keeps them.
        recipe: what is computed.
        learning_rate: from a step's number to its learning rate, for the metrics.

    Returns:
        `step(state, batch) -> (state, metrics)`; metrics are float32 scalars: `loss` (nats a token), `z_loss`,
        `accuracy`, `grad_norm`, `tokens`, and `learning_rate`; of a model with experts also those of
        `trellis.nn.moe.summary`.
    """

    def step(state: State, batch: dict) -> tuple[State, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        sums, routed, gradients = measured_gradients(state.model, by_name(batch), recipe, key)
        with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to integer powers
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        if routed is not None:
            model = model.balanced(routed.load)
        average = state.average
        if recipe.ema is not None:
            average = moving_average(average, model, recipe.ema, state.step)
        metrics = {
            "loss": sums.cross_entropy / sums.tokens,
            "z_loss": sums.z_loss / sums.tokens,
            "accuracy": sums.correct / sums.tokens,
            "grad_norm": optax.tree.norm(gradients),
            "tokens": sums.tokens,
        }
        if routed is not None:
            metrics |= summary(routed, sums.tokens)
        if learning_rate is not None:
            metrics["learning_rate"] = jnp.asarray(learning_rate(state.step), jnp.float32)
        return State(state.step + 1, model, optimizer_state, average, state.key), metrics

    return step


def by_name(batch) -> dict[str, NamedArray | None]:
    """The arrays of a batch with their names, from a dict or a dataclass of arrays."""
    fields = ("tokens", "targets", "loss_mask", "segment_ids", "positions")
    get = batch.get if isinstance(batch, dict) else lambda f: getattr(batch, f, None)
    found = {f: get(f) for f in fields}
    return {f: x if x is None or is_named(x) else named(x, "batch pos") for f, x in found.items()}


def loss_and_gradients(model, batch: dict, recipe: Recipe, key=None):
    """Sums of the loss over a batch, and the gradient of its mean over all counted tokens.

    Microbatches are weighted by their tokens: each one's sum is divided by the count of the whole batch. With
    "pending" accumulation the gradients of all microbatches are added up as partial sums on each device, and summed
    over devices once.
    """
    sums, _, gradients = measured_gradients(model, batch, recipe, key)
    return sums, gradients


def measured_gradients(model, batch: dict, recipe: Recipe, key=None):
    """`loss_and_gradients`, and between the two what is measured of the batch's routing (None without experts)."""
    tokens = batch["loss_mask"].astype(jnp.float32).sum().array
    scale = 1.0 / jnp.maximum(tokens, 1.0)

    def mean_loss(params, part, key, shares=None):
        sums, routed = measured_loss(params, part, recipe, key, shares)
        return sums.total * scale, (sums, routed)

    to_use = lambda params: cast(params, recipe.compute, recipe.exceptions)
    if recipe.microbatches == 1:
        (_, found), gradients = jax.value_and_grad(lambda p: mean_loss(to_use(p), batch, key), has_aux=True)(model)
        return *found, gradients
    if recipe.accumulation == "pending":
        use, pull = jax.vjp(lambda params: _copied(to_use(params)), model)
    else:
        use, pull = jax.vjp(to_use, model)
    parts = _parts(batch, recipe.microbatches)
    shares = _shares(use, parts) if getattr(model, "shares_wanted", False) else None
    sums, routed, total = _accumulate(jax.value_and_grad(mean_loss, has_aux=True), use, parts, key, shares)
    (gradients,) = pull(jax.tree.map(lambda g, p: g.astype(p.dtype), total, use))
    return sums, routed, gradients


def _accumulate(value_and_grad, params, parts, key, shares):
    """Sums over microbatches of the loss, the routing and float32 gradients; partial sums stay partial."""
    zeros = jax.tree.map(_zero_gradient, params)

    def body(carry, part):
        sums, gradients = carry
        index, arrays = part
        mine = None if key is None else jax.random.fold_in(key, index)
        (_, (more, routed)), new = value_and_grad(params, _one(arrays), mine, shares)
        gradients = jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradients, new)
        return (jax.tree.map(jnp.add, sums, more), gradients), routed

    zero = jnp.zeros((), jnp.float32)
    start = TokenLoss(zero, zero, zero, zero, zero)
    (sums, gradients), routed = jax.lax.scan(body, (start, zeros), parts)
    return sums, jax.tree.map(lambda x: x.sum(0), routed), gradients


def _shares(params, parts) -> NamedArray:
    """`f32["layers routes"]`: experts' shares of the tokens of all microbatches, by a forward pass over them."""

    def body(_, part):
        one = _one(part[1])
        options = dict(segment_ids=one["segment_ids"], positions=one["positions"])
        return None, params.routed(one["tokens"], one["loss_mask"].astype(jnp.float32), **options)[1].load

    _, loads = jax.lax.scan(body, None, parts)
    load = jax.tree.map(lambda x: x.sum(0), loads)
    return load / load.sum("routes")


def _parts(batch, count: int):
    """Microbatches one after the other: their numbers, and their arrays."""
    return jnp.arange(count), {f: None if x is None else _cut(x, count).array for f, x in batch.items()}


def _one(arrays) -> dict[str, NamedArray | None]:
    return {f: None if x is None else named(x, "batch pos") for f, x in arrays.items()}


def _cut(x: NamedArray, count: int) -> NamedArray:
    """`"batch pos"` as `"part batch pos"`: every device's rows are dealt out in turn, and nothing moves."""
    size = x.shape["batch"]
    return transpose(split_axis(x, "batch", {"batch": size // count, "part": count}), ("part", "batch", "pos"))


def _copied(params):
    """Parameters gathered for use, as copies whose gradients are partial sums over the batch's mesh axes."""
    layout = current_layout()
    if layout is None or mode_of(layout.mesh) != "explicit":
        return params

    (over,) = layout.assign(("batch",))

    def leaf(x):
        axes = layout.assign(x.names)
        own = {axis for mine in axes for axis in mine}
        return x.with_array(place(x.array, axes, (), frozenset(over) - own, names=x.names))

    return jax.tree.map(leaf, params, is_leaf=is_named)


def _zero_gradient(param: jax.Array) -> jax.Array:
    """Float32 zeros in the type of the parameter's gradient: copies have partial sums."""
    state = state_of(param)
    spec = spec_of(list(state.axes), state.copied) if state.mode == "explicit" else None
    return jax.lax.broadcast_in_dim(jnp.float32(0), param.shape, (), out_sharding=spec)
