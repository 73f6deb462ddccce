"""Cross entropy in chunks of tokens: the float32 logits of the whole batch never exist, forward or backward."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from trellis.mesh.manual.ops import Axes, vary, varying_axes
from trellis.mesh.platform import platform_of
from trellis.notation.state import State, state_of

from .loss_pieces import Pieces, capped, cut, summed_in_pieces, weighed

CHUNK = {"cpu": 512}
# On accelerators a chunk's float32 logits take at most this many bytes, but for no more chunks than the second number:
# each adds once to the gradient of `unembed`, which is kept in that parameter's own type there (a gigabyte less for a
# vocabulary of 128k and a width of 4096 in bfloat16). With few tokens nothing is added: see `_kept_fwd`.
LOGITS_BYTES, MOST_CHUNKS = 1 << 28, 8


class LossError(ValueError):
    """Shapes or shardings that the loss cannot take."""


class TokenLoss(NamedTuple):
    """Sums over all tokens of the batch, float32 scalars; divide by `tokens` for means.

    Attributes:
        total: what is minimized: cross entropy plus z-loss. Only this one carries a gradient.
        cross_entropy: the first part, in nats.
        z_loss: the second part.
        correct: how many tokens had the largest logit.
        tokens: the sum of the weights.
    """

    total: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    tokens: jax.Array


class _Settings(NamedTuple):
    z_loss: float
    logit_softcap: float | None
    chunk: int | None
    total_type: jnp.dtype
    vocab_size: int | None
    vocab_first: bool
    vocab_axes: Axes = ()
    pieces: Pieces | None = None


def cross_entropy(
    x: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_first: bool = False,
    chunk: int | None = None,
    bias: jax.Array | None = None,
) -> TokenLoss:
    """Summed cross entropy of next-token logits `x @ unembed`, and what is reported beside it.

    Gradients are made together with the loss, chunk by chunk, so each logit is computed once; without
    differentiation only the loss is. Logits, their softmax and all sums are float32 whatever the dtype of `x`.

    On a mesh in explicit mode `batch` and `pos` may be sharded, and `vocab` over other axes (vocabulary parallel:
    devices share the largest logit, the sum of exponentials and the target's logit, three numbers a token). `x` and
    `unembed` may be in the `~` state, so that their gradients arrive as pending sums. A `"vocab embed"` that is sliced
    over mesh axes of the tokens is gathered piece by piece, and so is its gradient scattered: see `loss_pieces`.

    Args:
        x: `batch pos embed`.
        unembed: `embed vocab`, or `vocab embed` if `vocab_first`.
        targets: `i32["batch pos"]`.
        weights: `f32["batch pos"]`, what each token counts, 0 for none; all 1 if None.
        z_loss: adds `z_loss * log_sum_exp ** 2` to each token's loss (PaLM, Chowdhery et al., 2022,
            arXiv:2204.02311, section 5).
        logit_softcap: logits become `cap * tanh(logits / cap)`.
        vocab_size: the true size of a vocabulary that is padded: later columns get no probability and no gradient.
        vocab_first: the layout of `unembed`.
        chunk: tokens per chunk on each device; not for an unembedding that is gathered in pieces.
        bias: `vocab`, added to the logits; sharded as `unembed` is.

    Raises:
        LossError: shapes or shardings do not fit together.

    >>> import jax.numpy as jnp
    >>> x, unembed = jnp.ones((1, 2, 4)), jnp.zeros((4, 8))
    >>> loss = cross_entropy(x, unembed, jnp.zeros((1, 2), jnp.int32))
    >>> float(loss.total / loss.tokens) == float(jnp.log(8.0))
    True
    """
    _check(x, unembed, targets, weights, vocab_size, vocab_first, bias)
    head = (unembed,) if bias is None else (unembed, bias)
    weights = jnp.ones_like(targets, jnp.float32) if weights is None else weights.astype(jnp.float32)
    platform = platform_of(x)
    total_type = jnp.dtype("float32") if platform == "cpu" else unembed.dtype
    settings = _Settings(z_loss, logit_softcap, chunk or CHUNK.get(platform), total_type, vocab_size, vocab_first)
    states = [state_of(a) for a in (x, unembed, targets)]
    if states[0].mode != "explicit":
        return _local(x, head, targets, weights, settings)
    batch, pos, _ = states[0].axes
    across, vocab = states[1].axes, ()
    if set(batch + pos) & set(across[0] + across[1]):
        pieces = _pieces(states, x, unembed, targets, plain=vocab_first and bias is None and chunk is None)
        settings = settings._replace(pieces=pieces)
    else:
        vocab = _vocab_axes(states, x, unembed, vocab_first)
        settings = settings._replace(vocab_axes=vocab)

    def body(x, head, targets, weights):
        x, head = jax.tree.map(lambda a: vary(a, batch + pos + vocab), (x, head))
        targets, weights = (vary(a, batch + pos) for a in (targets, weights))
        sums = _local(x, head, targets, weights, settings)
        return jax.tree.map(lambda s: lax.psum(s, batch + pos), sums) if batch + pos else sums

    tokens = (batch or None, pos or None)
    table = PartitionSpec(*(axes or None for axes in across), reduced=states[1].copied)
    return jax.shard_map(
        body,
        mesh=jax.typeof(x).sharding.mesh,
        in_specs=(
            PartitionSpec(*tokens, None, reduced=states[0].copied),
            (table, *(_bias_spec(b, vocab) for b in head[1:])),
            PartitionSpec(*tokens),
            PartitionSpec(*tokens),
        ),
        out_specs=PartitionSpec(),
    )(x, head, targets, weights)


def _pieces(states: list[State], x, unembed, targets, *, plain: bool) -> Pieces:
    """How an unembedding that is sliced over mesh axes of the tokens is gathered."""
    (batch, pos, embed), sides = states[0].axes, states[1].axes
    shown = _check_states(states, x, unembed)
    dim = 0 if sides[0] else 1
    alone = not (sides[0] and sides[1]) and set(sides[dim]) <= set(batch + pos) and not embed
    if not (alone and plain):
        raise LossError(
            "an unembedding that is gathered in pieces is 'vocab embed' (vocab_first), with one dimension sliced, over "
            f"mesh axes of the tokens only, and goes without bias and without chunk, {shown}: gather it first, "
            "with reshard"
        )
    sizes = jax.typeof(x).sharding.mesh.shape
    devices, parts = (math.prod(sizes[a] for a in axes) for axes in (sides[dim], batch + pos))
    local = unembed.shape[0] // (1 if dim else devices)
    return cut(dim, sides[dim], devices, local, targets.size // parts)


def _bias_spec(bias, vocab: Axes) -> PartitionSpec:
    state = state_of(bias)
    if state.axes != (vocab,) or state.pending:
        raise LossError(
            f"a bias is sharded as the vocabulary of the unembedding is, got bias {jax.typeof(bias).str_short()} for "
            f"vocab over {'/'.join(vocab) or 'nothing'}, in cross_entropy: reshard it"
        )
    return PartitionSpec(vocab or None, reduced=state.copied)


def _local(x, head, targets, weights, settings: _Settings) -> TokenLoss:
    """The loss of one device's tokens over its part of the vocabulary."""
    if settings.pieces is not None:
        x, targets, weights = x.reshape(-1, x.shape[-1]), targets.reshape(-1), weights.reshape(-1)
        total, rest = summed_in_pieces(x, head[0], targets, weights, settings, settings.pieces)
        return TokenLoss(total, *(lax.stop_gradient(s) for s in rest))
    count = targets.size
    columns = head[0].shape[0 if settings.vocab_first else 1]
    chunk = min(settings.chunk or accelerator_chunk(count, columns), count)
    padding = -count % chunk
    x, targets, weights = x.reshape(count, -1), targets.reshape(count), weights.reshape(count)
    if padding:
        x, targets, weights = (jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1)) for a in (x, targets, weights))
    in_chunks = lambda a: a.reshape(-1, chunk, *a.shape[1:])
    total, rest = _summed(in_chunks(x), head, in_chunks(targets), in_chunks(weights), settings)
    return TokenLoss(total, *(lax.stop_gradient(s) for s in rest))


def accelerator_chunk(count: int, columns: int) -> int:
    """Tokens a chunk on an accelerator, of `count` tokens and `columns` of the vocabulary on a device.

    >>> accelerator_chunk(4096, 128_256), accelerator_chunk(65536, 128_256), accelerator_chunk(4096, 1024)
    (512, 8192, 4096)
    """
    few = max(LOGITS_BYTES // (4 * columns), 1)
    return -(-count // min(max(-(-count // few), 1), MOST_CHUNKS))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(x, head, targets, weights, settings: _Settings):
    def step(sums, part):
        mine, *_ = _chunk(*part, head, settings, gradient=False)
        return jax.tree.map(jnp.add, sums, mine), None

    sums, _ = lax.scan(step, _zero_sums(weights), (x, targets, weights))
    return sums


def _summed_fwd(x, head, targets, weights, settings: _Settings):
    if targets.size <= x.shape[-1]:
        return _kept_fwd(x, head, targets, weights, settings)

    def step(carry, part):
        sums, d_head = carry
        mine, d_x, d_logits, d_bias = _chunk(*part, head, settings, gradient=True)
        d_more = (_to_unembed(d_logits, part[0], settings), *d_bias)
        d_head = jax.tree.map(lambda total, more: (total.astype(more.dtype) + more).astype(total.dtype), d_head, d_more)
        return (jax.tree.map(jnp.add, sums, mine), d_head), d_x

    types = (settings.total_type, jnp.float32)
    zeros = [jnp.zeros(h.shape, t) for h, t in zip(head, types, strict=False)]
    start = tuple(vary(zero, varying_axes(x, *head)) for zero in zeros)
    (sums, d_head), d_x = lax.scan(step, (_zero_sums(weights), start), (x, targets, weights))
    return sums, (d_x, jax.tree.map(lambda d, h: d.astype(h.dtype), d_head, head))


def _kept_fwd(x, head, targets, weights, settings: _Settings):
    """For no more tokens than `embed`: the gradient of all logits, in the type of `x`, takes no more room than the
    gradient of `unembed`, which then is one product instead of a sum over chunks, made when `unembed` is gone."""

    def step(carry, part):
        sums, d_bias = carry
        mine, d_x, d_logits, more = _chunk(*part, head, settings, gradient=True)
        return (jax.tree.map(jnp.add, sums, mine), jax.tree.map(jnp.add, d_bias, more)), (d_x, d_logits)

    zeros = tuple(vary(jnp.zeros(b.shape, jnp.float32), varying_axes(x, *head)) for b in head[1:])
    (sums, d_bias), (d_x, d_logits) = lax.scan(step, (_zero_sums(weights), zeros), (x, targets, weights))
    rows = lambda a: a.reshape(-1, a.shape[-1])
    d_head = (_to_unembed(rows(d_logits), rows(x), settings), *d_bias)
    return sums, (d_x, jax.tree.map(lambda d, h: d.astype(h.dtype), d_head, head))


def _to_unembed(d_logits, x, settings: _Settings):
    """The gradient of `unembed`, a sum over tokens. On a CPU what has them first is turned before the product: within
    it that takes as long as the product itself."""
    left, right = (d_logits, x) if settings.vocab_first else (x, d_logits)
    if platform_of(x) == "cpu":
        return lax.dot(lax.optimization_barrier(left.T), right, preferred_element_type=jnp.float32)
    form = "tv,te->ve" if settings.vocab_first else "tv,te->ev"
    return jnp.einsum(form, d_logits, x, preferred_element_type=jnp.float32)


def _summed_bwd(settings: _Settings, gradients, cotangents):
    d_total, _ = cotangents
    d_x, d_head = jax.tree.map(lambda d: d * d_total.astype(d.dtype), gradients)
    return d_x, d_head, None, None


_summed.defvjp(_summed_fwd, _summed_bwd)


def _zero_sums(weights):
    zero = vary(jnp.zeros((), jnp.float32), varying_axes(weights))
    return zero, (zero, zero, zero, zero)


def _chunk(x, targets, weights, head, settings: _Settings, *, gradient: bool):
    """Sums of one chunk, the gradients of its `total`: `(sums, d_x, d_logits, d_bias)`."""
    unembed, *bias = head
    vocab_axes = settings.vocab_axes
    columns = unembed.shape[0 if settings.vocab_first else 1]
    to_logits, to_x = ("te,ve->tv", "tv,ve->te") if settings.vocab_first else ("te,ev->tv", "tv,ev->te")
    first = lax.axis_index(vocab_axes) * columns if vocab_axes else 0
    logits = jnp.einsum(to_logits, x, unembed, preferred_element_type=jnp.float32)
    for b in bias:
        logits = logits + b.astype(jnp.float32)[None, :]
    logits, slope = capped(logits, settings.logit_softcap)
    if settings.vocab_size is not None:
        real = first + jnp.arange(columns) < settings.vocab_size
        logits = jnp.where(real[None, :], logits, -jnp.inf)

    largest = _over(lax.pmax, jnp.max(logits, axis=1), vocab_axes)
    powers = jnp.exp(logits - largest[:, None])
    total = _over(lax.psum, jnp.sum(powers, axis=1), vocab_axes)
    place = targets - first
    here = (place >= 0) & (place < columns)
    hit = jnp.take_along_axis(logits, jnp.clip(place, 0, columns - 1)[:, None], axis=1)[:, 0]
    if vocab_axes:
        hit = lax.psum(jnp.where(here, hit, 0.0), vocab_axes)

    sums, pull = weighed(largest, total, hit, weights, settings.z_loss)
    if not gradient:
        return sums, None, None, ()

    hot = jnp.arange(columns)[None, :] == place[:, None]
    d_logits = powers * pull[:, None] - jnp.where(hot, weights[:, None], 0.0)
    if slope is not None:
        d_logits = d_logits * slope
    d_bias = tuple(jnp.sum(d_logits, axis=0) for _ in bias)
    d_logits = d_logits.astype(x.dtype)
    wide = jnp.float32 if platform_of(x) == "cpu" else None  # the faster product there: `trellis.named.product.cpu_dot`
    d_x = jnp.einsum(to_x, d_logits, unembed, preferred_element_type=wide)
    return sums, d_x.astype(x.dtype), d_logits, d_bias


def _over(collective, x, axes: Axes):
    return collective(x, axes) if axes else x


def _vocab_axes(states: list[State], x, unembed, vocab_first: bool) -> Axes:
    """The mesh axes that slice the vocabulary of an unembedding that every device uses as it has it."""
    shown = _check_states(states, x, unembed)
    vocab, contracted = states[1].axes if vocab_first else states[1].axes[::-1]
    if states[0].axes[2] or contracted:
        raise LossError(f"embed is whole in x and unembed, {shown}: gather it first, with reshard")
    return vocab


def _check_states(states: list[State], x, unembed) -> str:
    """What holds however the unembedding is sliced; returns the operands' types, for further messages."""
    shown = f"got x {jax.typeof(x).str_short()}, unembed {jax.typeof(unembed).str_short()}, in cross_entropy"
    if states[0].pending or states[1].pending:
        raise LossError(f"the loss is not linear, so no operand is a pending sum, {shown}: settle it, with reshard")
    if states[2].axes != states[0].axes[:2]:
        raise LossError(f"targets are sharded as x is, {shown}, targets sharded {states[2].axes}: reshard them like x")
    return shown


def _check(x, unembed, targets, weights, vocab_size, vocab_first, bias) -> None:
    where = f"in cross_entropy(vocab_first={vocab_first})"
    embed = unembed.shape[1 if vocab_first else 0] if unembed.ndim == 2 else None
    if x.ndim != 3 or x.shape[-1] != embed or targets.shape != x.shape[:2]:
        layout = "vocab embed" if vocab_first else "embed vocab"
        raise LossError(
            f"x is 'batch pos embed', unembed '{layout}', targets 'batch pos', got shapes {x.shape}, {unembed.shape}, "
            f"{targets.shape}, {where}: reorder the dimensions, or change vocab_first"
        )
    if weights is not None and weights.shape != targets.shape:
        raise LossError(
            f"each token has a weight, got weights of shape {weights.shape} for targets {targets.shape}, {where}: "
            "pass weights of the targets' shape"
        )
    columns = math.prod(unembed.shape) // embed
    if bias is not None and bias.shape != (columns,):
        raise LossError(
            f"a bias has one number for each column, got shape {bias.shape} for {columns} columns, {where}: "
            "pass 'vocab' numbers, the padding's too"
        )
    if vocab_size is not None and not 0 < vocab_size <= columns:
        raise LossError(
            f"the vocabulary is at most the unembedding's, got vocab_size={vocab_size} for {columns} columns, {where}: "
            "pass the tokenizer's size, or pad the unembedding further"
        )
