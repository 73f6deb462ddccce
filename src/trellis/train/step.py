"""One training step: a pure function from a state and a batch to the next state and metrics.

    parameters at rest -> cast -> loss of each microbatch -> gradients -> update

Everything that moves between devices follows from the layout in force.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from trellis.data.batch import Batch
from trellis.mesh.layout import current_layout
from trellis.mesh.reshard import place
from trellis.named import Keep, NamedArray, is_named
from trellis.named.reshape import split_axis, transpose
from trellis.nn.loss import TokenLoss, next_token_loss
from trellis.nn.moe import Routed, summary
from trellis.nn.positions import dealt
from trellis.notation import spec_of
from trellis.notation.state import mode_of, state_of
from trellis.optim import all_finite, select
from trellis.optim.averaging import average as moving_average
from trellis.run.config import Precision
from trellis.train.state import TrainState, in_use

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step computes, besides the model and the optimizer.

    Attributes:
        precision: the types of activations and of parameters in use.
        microbatches: parts of a batch, one after the other.
        accumulation: "pending" gathers parameters and sums gradients over devices once a step, however many
            microbatches; "sharded" once a microbatch, which needs less memory.
        policy: what each layer keeps for the backward pass.
        z_loss: weight of the squared log-normalizer in the loss.
        ema: decay of the moving average of the parameters.
        chunk_bytes: what the float32 logits of a chunk of the loss take; None for what suits the device.
        skip_nonfinite: leave parameters as they were where the loss or the gradient is not finite.
    """

    precision: Precision = Precision(compute="float32")
    microbatches: int = 1
    accumulation: str = "pending"
    policy: Keep | None = None
    z_loss: float = 0.0
    ema: float | None = None
    chunk_bytes: int | None = None
    skip_nonfinite: bool = False


def batch_loss(model, batch: Batch, options: StepOptions, key=None) -> TokenLoss:
    """Summed loss of a batch and what is reported beside it: the first result of `measured_loss`."""
    return measured_loss(model, batch, options, key)[0]


def measured_loss(model, batch: Batch, options: StepOptions, key=None, shares: NamedArray | None = None):
    """Summed loss of a batch in the parameters' type, and what is measured of its routing.

    A model with experts adds its routers' losses to what is minimized.

    Args:
        model: parameters in the type they are used in.
        batch: named arrays.
        options: how it is computed.
        key: for dropout; None for none.
        shares: `f32["layers routes"]`, experts' shares of the tokens of the whole batch, where this is a part of it.

    Returns:
        `TokenLoss`, and `Routed` or, of a model without experts, None.
    """
    layout, batch = dealt(batch)
    with layout:
        return _measured_loss(model, batch, options, key, shares)


def _measured_loss(model, batch: Batch, options: StepOptions, key, shares):
    counted = batch.loss_mask.astype(jnp.float32)
    about = dict(segment_ids=batch.segment_ids, positions=batch.positions, policy=options.policy, key=key)
    hidden, routed = _hidden(model, batch.tokens, counted, shares, about)
    sums = next_token_loss(
        hidden,
        model.unembedding,
        batch.targets,
        counted,
        bias=model.unembedding_bias,
        vocab_size=model.config.vocab,
        z_loss=options.z_loss,
        chunk_bytes=options.chunk_bytes,
    )
    return (sums if routed is None else sums._replace(total=sums.total + model.penalty(routed))), routed


def _hidden(model, tokens, counted, shares, about: dict) -> tuple[NamedArray, Routed | None]:
    if not hasattr(model, "routed"):
        return model(tokens, **about), None
    return model.routed(tokens, counted, shares=shares, **about)


def make_step(
    optimizer: optax.GradientTransformation, options: StepOptions, learning_rate: Callable | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step, to be compiled under a layout with the state donated.

    Args:
        optimizer: gets gradients and parameters as the state keeps them.
        options: how it is computed.
        learning_rate: from a step's number to its learning rate, for the metrics.

    Returns:
        `step(state, batch) -> (state, metrics)`; metrics are float32 scalars: `loss` (nats a token), `z_loss`,
        `accuracy`, `grad_norm`, `tokens`, and `learning_rate`; of a model with experts also those of
        `trellis.nn.moe.summary`.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        sums, routed, gradients = measured_gradients(state.model, batch.named(), options, key)
        with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to integer powers
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        if routed is not None:
            model = model.balanced(routed.load)
        average = state.average
        if options.ema is not None:
            average = moving_average(average, model, options.ema, state.step)
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
        new = model, optimizer_state, average
        if options.skip_nonfinite:
            good = all_finite(metrics["loss"], metrics["grad_norm"])
            new = select(good, new, (state.model, state.optimizer, state.average))
        return TrainState(state.step + 1, *new, state.key), metrics

    return step


def loss_and_gradients(model, batch: Batch, options: StepOptions, key=None):
    """Sums of the loss over a batch, and the gradient of its mean over all counted tokens.

    Microbatches are weighted by their tokens: each one's sum is divided by the count of the whole batch. With
    "pending" accumulation the gradients of all microbatches are added up as partial sums on each device, and summed
    over devices once.
    """
    sums, _, gradients = measured_gradients(model, batch, options, key)
    return sums, gradients


def measured_gradients(model, batch: Batch, options: StepOptions, key=None):
    """`loss_and_gradients`, and between the two what is measured of the batch's routing (None without experts)."""
    tokens = batch.loss_mask.astype(jnp.float32).sum().array
    scale = 1.0 / jnp.maximum(tokens, 1.0)

    def mean_loss(params, part, key, shares=None):
        sums, routed = measured_loss(params, part, options, key, shares)
        return sums.total * scale, (sums, routed)

    to_use = lambda params: in_use(params, options.precision)
    if options.microbatches == 1:
        (_, found), gradients = jax.value_and_grad(lambda p: mean_loss(to_use(p), batch, key), has_aux=True)(model)
        return *found, gradients
    if options.accumulation == "pending":
        use, pull = jax.vjp(lambda params: _copied(to_use(params)), model)
    else:
        use, pull = jax.vjp(to_use, model)
    parts = _parts(batch, options.microbatches)
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
        (_, (more, routed)), new = value_and_grad(params, arrays.named(), mine, shares)
        gradients = jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradients, new)
        return (jax.tree.map(jnp.add, sums, more), gradients), routed

    zero = jnp.zeros((), jnp.float32)
    start = TokenLoss(zero, zero, zero, zero, zero)
    (sums, gradients), routed = jax.lax.scan(body, (start, zeros), parts)
    return sums, jax.tree.map(lambda x: x.sum(0), routed), gradients


def _shares(params, parts) -> NamedArray:
    """`f32["layers routes"]`: experts' shares of the tokens of all microbatches, by a forward pass over them."""

    def body(_, part):
        layout, one = dealt(part[1].named())
        about = dict(segment_ids=one.segment_ids, positions=one.positions)
        with layout:
            return None, params.routed(one.tokens, one.loss_mask.astype(jnp.float32), **about)[1].load

    _, loads = jax.lax.scan(body, None, parts)
    load = jax.tree.map(lambda x: x.sum(0), loads)
    return load / load.sum("routes")


def _parts(batch: Batch, count: int) -> tuple[jax.Array, Batch]:
    """Microbatches one after the other: their numbers, and their arrays `"part batch pos"`, without names for a loop.

    Every device's rows are dealt out in turn, and nothing moves.
    """

    def cut(x: NamedArray) -> jax.Array:
        rows = split_axis(x, "batch", {"batch": x.shape["batch"] // count, "part": count})
        return transpose(rows, ("part", "batch", "pos")).array

    return jnp.arange(count), jax.tree.map(cut, batch, is_leaf=is_named)


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
