"""One training step: a pure function from a state and a batch to the next state and metrics.

    parameters at rest -> cast -> loss of each microbatch -> gradients -> update

Everything that moves between devices follows from the layout in force.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from trellis.data.batch import Batch
from trellis.mesh.layout import current_layout
from trellis.models import LanguageModel, Measured
from trellis.named import Keep, NamedArray, Narrow, gathered, is_named, named
from trellis.named.backend import loop_over
from trellis.named.pipeline.pieces import cut_batch
from trellis.named.reshape import split_axis, transpose
from trellis.named.rounding import exponent_of, power_of_two
from trellis.named.stacked import taken_apart
from trellis.named.tuned import Tuned, tuned_for
from trellis.nn import Precision, TokenLoss, next_token_loss, tied
from trellis.nn.positions import dealt
from trellis.nn.precision import with_keys, with_largest
from trellis.notation import spec_of
from trellis.notation.state import mode_of, state_of
from trellis.optim import all_finite, select
from trellis.optim.averaging import average as moving_average
from trellis.optim.optimizer import left_out
from trellis.optim.updated import in_float32, kept_like, moved, updated
from trellis.train.out_of_range import first_out_of_range
from trellis.train.scales import Scales, in_range, largest_of, rolled
from trellis.train.stages import (
    apart,
    around_loss,
    dealt_out,
    for_loss,
    head_of,
    in_stages,
    pipelined,
    put_head,
    schedule_of,
    stages_of,
)
from trellis.train.state import TrainState

Metrics = dict[str, jax.Array]

# Names of the tokens of a microbatch: along their mesh axes its gradient of a parameter is a partial sum.
_TOKENS = ("batch", "pos")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step computes, besides the model and the optimizer.

    Attributes:
        precision: the types of activations and of parameters in use.
        microbatches: parts of a batch that are computed one after the other.
        accumulation: "pending" gathers parameters and sums gradients over devices once a step, however many
            microbatches there are; "sharded" does so once a microbatch, which needs less memory.
        policy: what each layer keeps for the backward pass.
        z_loss: weight of the squared log-normalizer in the loss.
        ema: decay of the moving average of the parameters.
        tuned: whether layers are a loop, and how a CPU's kernels are cut into parts.
        chunk_bytes: the bytes of the float32 logits of a chunk of the loss; None for what suits the device.
        skip_nonfinite: leave parameters as they were if the loss or the gradient is not finite.
        names_tensors: whether a step finds its first weight or gradient that is not finite.
    """

    precision: Precision = Precision(compute="float32")
    microbatches: int = 1
    accumulation: str = "pending"
    policy: Keep | None = None
    z_loss: float = 0.0
    ema: float | None = None
    tuned: Tuned = Tuned()
    chunk_bytes: int | None = None
    skip_nonfinite: bool = False
    names_tensors: bool = False


def batch_loss(
    model: LanguageModel, batch: Batch, options: StepOptions, key=None, ahead=None, *, part: bool = False
) -> tuple[TokenLoss, Measured]:
    """The summed loss of a batch in the parameters' type, and what else the model measured.

    Args:
        model: parameters in the type they are used in.
        batch: named arrays.
        options: how it is computed.
        key: for dropout; None for none.
        ahead: for a model that looks ahead: the sum of `measured.ahead` over the batch that this is a part of.
        part: whether this is a microbatch of the batch: the model may then not mix its sequences.
    """
    layout, batch = dealt(batch)
    with layout, tuned_for(options.tuned):
        return _measured_loss(model, batch, options, key, ahead, part)


def _measured_loss(model, batch: Batch, options: StepOptions, key, ahead, part: bool):
    counted, kind = batch.loss_mask.astype(jnp.float32), options.precision.loss_product(model)
    if model.config.tie_embeddings:
        model = eqx.tree_at(lambda m: m.unembedding, model, tied(model.unembedding, batch.tokens, kind))
    with cut_batch(sums=True) if part else contextlib.nullcontext():
        hidden, measured = model(
            batch.tokens,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            policy=options.policy,
            key=key,
            counted=counted,
            ahead=ahead,
        )
    sums = next_token_loss(
        hidden,
        Narrow(model.unembedding, kind) if kind else model.unembedding,
        batch.targets,
        counted,
        bias=model.unembedding_bias,
        vocab_size=model.config.vocab,
        z_loss=options.z_loss,
        chunk_bytes=options.chunk_bytes,
    )
    return sums.plus(measured.penalty), measured


def make_step(
    optimizer: optax.GradientTransformation, options: StepOptions, learning_rate: Callable | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step, to be compiled under a layout with the state donated.

    Args:
        optimizer: gets gradients and parameters as the state keeps them.
        options: how it is computed.
        learning_rate: gives the learning rate of a step by its number, for the metrics.

    Returns:
        `step(state, batch) -> (state, metrics)`; metrics are float32 scalars: `loss` (nats a token), `z_loss`,
        `accuracy`, `grad_norm`, `tokens`, `learning_rate`, what the model itself measures, and on request
        `out_of_range`, by `first_out_of_range`.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        with tuned_for(options.tuned):  # the backward pass is traced after `batch_loss`
            sums, measured, gradients, met = loss_gradients_and_met(
                state.model, largest_of(state.scales), batch.named(), options, key
            )
        with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to integer powers
            updates, kept = optimizer.update(*in_float32((gradients, state.optimizer, state.model)))
        optimizer_state = kept_like(kept, state.optimizer, key)
        at_random = key if options.precision.updates == "random" else None
        model = moved(updated(state.model, updates, at_random), measured.update, key)
        average = state.average
        if options.ema is not None:
            drawn = jax.random.fold_in(key, zlib.crc32(b"average"))
            average = moving_average(average, model, options.ema, state.step, drawn)
        norm = optax.tree.norm(in_float32(gradients))
        metrics = {
            "loss": sums.cross_entropy / sums.tokens,
            "z_loss": sums.z_loss / sums.tokens,
            "accuracy": sums.correct / sums.tokens,
            "grad_norm": norm if not met else jnp.where(in_range(met), norm, jnp.nan),
            "tokens": sums.tokens,
            **measured.metrics(sums.tokens),
        }
        if options.names_tensors:
            metrics["out_of_range"] = first_out_of_range(state.model, gradients)
        if learning_rate is not None:
            metrics["learning_rate"] = jnp.asarray(learning_rate(state.step), jnp.float32)
        new = model, optimizer_state, average, rolled(state.scales, met)
        if options.skip_nonfinite:
            good = all_finite(sums.cross_entropy, metrics["grad_norm"])  # a mean over no tokens is not a number
            kept = left_out(optimizer_state, state.optimizer)
            new = select(good, new, (state.model, kept, state.average, state.scales))
        *new, scales = new
        return TrainState(state.step + 1, *new, state.key, scales), metrics

    return step


def loss_and_gradients(model: LanguageModel, batch: Batch, options: StepOptions, key=None):
    """The sums of the loss over a batch, what the model measured, and the gradient of the mean over all counted tokens.

    Microbatches are weighted by their tokens: each one's sum is divided by the count of the whole batch. With
    "pending" accumulation the gradients of all microbatches are added up as partial sums on each device, and summed
    over devices once.
    """
    return loss_gradients_and_met(model, {}, batch, options, key)[:3]


def loss_gradients_and_met(model: LanguageModel, largest: Scales, batch: Batch, options: StepOptions, key=None):
    """The same with delayed scales, and with the largest elements that narrow products met in the batch.

    Args:
        model, batch, options, key: as for `loss_and_gradients`.
        largest: the elements that scales are made from, by `largest_of`.
    """
    scale, lift = _loss_scale(batch, options.precision)
    several = (axis := stages_of(model)) is not None or options.microbatches > 1

    def mean_loss(params, largest, part, key, ahead=None, scale=scale):
        params = with_largest(with_keys(params, key), largest)
        sums, measured = batch_loss(params, part, options, key, ahead, part=several)
        return sums.total * scale, (sums, measured)

    to_use = options.precision.in_use
    if axis is not None:
        *found, gradients = _through_stages(model, batch, to_use, mean_loss, options, key, axis, scale)
        return *found, _lowered(gradients, lift), {}
    if options.microbatches == 1:
        whole = jax.value_and_grad(lambda p, m: mean_loss(to_use(p), m, batch, key), (0, 1), has_aux=True)
        (_, found), (gradients, met) = whole(model, largest)
        return *found, _lowered(gradients, lift), met

    def as_used(params):
        params = to_use(params)
        if options.accumulation == "pending":
            params = gathered(params, _TOKENS)  # as copies, whose gradients stay partial sums
        # Scales of narrow products are found by the paths of their weights, which a stack that is taken apart lacks.
        return params if options.precision.products else taken_apart(params)

    use, pull = jax.vjp(as_used, model)
    parts = _parts(batch, options.microbatches)
    ahead = _look_ahead(use, parts) if model.looks_ahead else None
    loss = jax.value_and_grad(mean_loss, (0, 1), has_aux=True)
    sums, measured, total, met = _accumulate(loss, use, largest, parts, key, ahead)
    (gradients,) = pull(jax.tree.map(lambda g, p: g.astype(p.dtype), total, use))
    return sums, measured, _lowered(gradients, lift), met


def _loss_scale(batch: Batch, precision: Precision) -> tuple[jax.Array, jax.Array | None]:
    """What makes the sum of a loss its mean, and a power of two by which it is larger, if gradients are in float16.

    The gradient of the mean over a million tokens is a millionth for each, where float16 ends: of a small Llama's 131
    thousand leave an error of a tenth, a million one of a half. The root of their number keeps each token's gradient
    away from this end, and their sum from the other.
    """
    tokens = jnp.maximum(batch.loss_mask.astype(jnp.float32).sum().array, 1.0)
    if "float16" not in (precision.params, precision.compute, *precision.exceptions.values()):
        return 1.0 / tokens, None
    lift = power_of_two(exponent_of(tokens) // 2)
    return lift / tokens, lift


def _lowered(gradients, lift: jax.Array | None):
    """The gradients of the mean, in float32 if they were lifted."""
    return gradients if lift is None else jax.tree.map(lambda g: g.astype(jnp.float32) / lift, gradients)


def _through_stages(
    model, batch: Batch, to_use: Callable, mean_loss: Callable, options: StepOptions, key, axis: str, scale
):
    """The same for a model whose layers are spread over stages."""
    copied = (lambda tree: gathered(tree, _TOKENS)) if options.accumulation == "pending" else lambda tree: tree
    last = around_loss(model, axis)

    def used(params):
        dealt, head = dealt_out(to_use(params), axis), []
        whole = apart(dealt, stacked=copied, others=copied)
        if last is not None:
            with last:
                head = copied(for_loss(head_of(dealt)))
            if not model.config.tie_embeddings:  # it is read nowhere else
                whole = put_head(whole, jax.lax.stop_gradient(head_of(dealt)))
        return in_stages(whole, axis), head

    use, pull = jax.vjp(used, model)

    def shared(numbers):
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        return keys, jnp.broadcast_to(scale, numbers.shape)

    with_names = lambda part: jax.tree.map(lambda x: named(x, "batch pos"), part)  # its positions are dealt out
    loss = lambda params, part, shared: mean_loss(params, {}, with_names(part), shared[0], scale=shared[1])
    cut = lambda batch, count: _parts(batch, count)[1]
    schedule = schedule_of(model, batch.tokens.shape["batch"], options.microbatches)
    (sums, measured), total = pipelined(*use, last, batch, cut, shared, loss, schedule, axis)
    (gradients,) = pull(jax.tree.map(lambda g, p: g.astype(p.dtype), total, use))
    return sums, measured, gradients


def _accumulate(value_and_grad, params, largest, parts, key, ahead):
    """The loss, the measures and the float32 gradients summed over microbatches, and the largest elements that they
    met; pending sums stay pending."""
    zeros, layout = jax.tree.map(_zero_gradient, params), current_layout()
    compiler_places = layout is not None and mode_of(layout.mesh) == "auto"

    def body(carry, part):
        sums, gradients, met = carry
        index, arrays = part
        mine = None if key is None else jax.random.fold_in(key, index)
        (_, (more, measured)), (new, now) = value_and_grad(params, largest, arrays.named(), mine, ahead)
        if compiler_places:  # it would sum a table's gradient and the total together: docs/published-bugs.md, 23
            new = jax.lax.optimization_barrier(new)
        gradients = jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradients, new)
        return (jax.tree.map(jnp.add, sums, more), gradients, jax.tree.map(jnp.maximum, met, now)), measured

    zero = jnp.zeros((), jnp.float32)
    start = TokenLoss(zero, zero, zero, zero, zero)
    (sums, gradients, met), measured = loop_over(body, (start, zeros, jax.tree.map(jnp.zeros_like, largest)), parts)
    return sums, jax.tree.map(lambda x: x.sum(0), measured), gradients, met


def _look_ahead(params: LanguageModel, parts):
    """What the losses of microbatches need to know of the whole batch, from a forward pass over all of them."""

    def body(_, part):
        layout, one = dealt(part[1].named())
        about = dict(segment_ids=one.segment_ids, positions=one.positions)
        with layout:
            return None, params(one.tokens, counted=one.loss_mask.astype(jnp.float32), **about).measured.ahead

    _, found = jax.lax.scan(body, None, parts)
    return jax.tree.map(lambda x: x.sum(0), found)


def _parts(batch: Batch, count: int) -> tuple[jax.Array, Batch]:
    """The microbatches of a batch: their numbers, and their arrays `"part batch pos"`, without names, for a loop.

    Each device's rows are dealt out in turn, so nothing moves.
    """

    def cut(x: NamedArray) -> jax.Array:
        rows = split_axis(x, "batch", {"batch": x.shape["batch"] // count, "part": count})
        return transpose(rows, ("part", "batch", "pos")).array

    return jnp.arange(count), jax.tree.map(cut, batch, is_leaf=is_named)


def _zero_gradient(param: jax.Array) -> jax.Array:
    """Float32 zeros in the type of the parameter's gradient: for copies, partial sums."""
    state = state_of(param)
    spec = spec_of(list(state.axes), state.copied) if state.mode == "explicit" else None
    return jax.lax.broadcast_in_dim(jnp.float32(0), param.shape, (), out_sharding=spec)
