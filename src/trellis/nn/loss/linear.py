"""The product with the unembedding and the cross entropy of its logits, in one: on plain arrays, on any mesh."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from trellis.choices import is_count
from trellis.errors import TrellisError
from trellis.mesh.by_device import by_device
from trellis.mesh.landing import placed
from trellis.mesh.manual.ops import Axes, vary
from trellis.mesh.reshard import place
from trellis.named.arguments import cap_of, number_of
from trellis.named.backend import on_accelerator
from trellis.named.operand import refuse_named
from trellis.named.tuned import tuned
from trellis.nn.loss.formulas import Settings, kept_as
from trellis.nn.loss.products import NarrowFactors, in_chunks, joined, specs, tile_of
from trellis.nn.loss.token_chunks import CPU_CHUNK, chunk_size, summed_by_tokens
from trellis.nn.loss.vocab_chunks import VocabChunks, cut, summed_by_vocab
from trellis.notation import spec_of
from trellis.notation.state import State, state_of


class LossError(TrellisError, ValueError):
    """Shapes or shardings that the loss cannot take."""


class TokenLoss(NamedTuple):
    """Sums over all tokens of the batch, float32 scalars; divide by `tokens` for means.

    Attributes:
        total: what is minimized: cross entropy plus z-loss. Only this one carries a gradient, also with respect to the
            weights of tokens.
        cross_entropy: the first part, in nats.
        z_loss: the second part.
        correct: the sum of the weights of tokens whose target had the largest logit.
        tokens: the sum of the weights, with a gradient with respect to these alone.
    """

    total: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    tokens: jax.Array

    def plus(self, penalty: jax.Array | None) -> "TokenLoss":
        """The same loss plus a penalty, summed over tokens; None adds nothing."""
        return self if penalty is None else self._replace(total=self.total + penalty)


def linear_cross_entropy(
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
    chunk_bytes: int | None = None,
    bias: jax.Array | None = None,
    narrow: NarrowFactors | None = None,
) -> TokenLoss:
    """Summed cross entropy of next-token logits `x @ unembed`, and what is reported beside it.

    Gradients are made together with the loss, chunk by chunk, so each logit is computed once; without
    differentiation only the loss is made. Logits, their softmax and all sums are float32 whatever the dtype of `x`.

    On a mesh in explicit mode `batch` and `pos` may be sharded, and `vocab` over other axes (vocabulary parallel:
    devices share the largest logit, the sum of exponentials and the target's logit, three numbers a token). `x` and
    `unembed` may be in the `~` state, so that their gradients arrive as pending sums. A `"vocab embed"` that is sliced
    over mesh axes of the tokens is gathered chunk by chunk, and its gradient is scattered likewise: see `vocab_chunks`.

    Args:
        x: `batch pos embed`.
        unembed: `embed vocab`, or `vocab embed` if `vocab_first`.
        targets: `i32["batch pos"]`. One that is no word, such as the -100 of PyTorch's labels or an id that only a
            tokenizer has, has no logit, and its loss is that of the log-normalizer: give it the weight 0.
        weights: `f32["batch pos"]`, how much each token counts, 0 for not at all; all 1 if None.
        z_loss: adds `z_loss * log_sum_exp ** 2` to each token's loss (PaLM, Chowdhery et al., 2022,
            arXiv:2204.02311, section 5).
        logit_softcap: logits become `cap * tanh(logits / cap)`.
        vocab_size: the true size of a vocabulary that is padded: later columns get no probability and no gradient.
        vocab_first: the layout of `unembed`.
        chunk: tokens per chunk on each device; not for an unembedding that is gathered in chunks.
        chunk_bytes: what a chunk's float32 logits take on an accelerator, instead of the loss's own choice.
        bias: `vocab`, added to the logits; sharded as `unembed` is.
        narrow: `x` and `unembed` in narrow numbers, sharded like them, which are multiplied instead; `unembed` is
            `vocab_first` then. Gradients are those of `x` and `unembed`, which are not used otherwise.

    Raises:
        LossError: shapes or shardings do not fit together.

    >>> import jax.numpy as jnp
    >>> x, unembed = jnp.ones((1, 2, 4)), jnp.zeros((4, 8))
    >>> loss = linear_cross_entropy(x, unembed, jnp.zeros((1, 2), jnp.int32))
    >>> float(loss.total / loss.tokens) == float(jnp.log(8.0))
    True
    """
    _check(x, unembed, targets, weights, vocab_size, vocab_first, bias, chunk)
    z_loss, logit_softcap = known_numbers(z_loss, logit_softcap, "linear_cross_entropy")
    targets = in_vocabulary(targets, vocab_size or unembed.shape[0 if vocab_first else 1])
    head = (unembed,) if bias is None else (unembed, bias)
    weights = jnp.ones_like(targets, jnp.float32) if weights is None else weights.astype(jnp.float32)
    total_type, mine = kept_as(unembed.dtype), chunk
    if not on_accelerator(x):
        total_type, mine = jnp.dtype("float32"), chunk or tuned().loss_chunk or CPU_CHUNK
    settings = Settings(z_loss, logit_softcap, vocab_size, vocab_first, mine, total_type, chunk_bytes=chunk_bytes)
    if narrow is not None:
        settings = settings._replace(narrow=narrow.kind, tile=tile_of(narrow.kind, x.shape[1]))
    states = [state_of(a) for a in (x, unembed, targets)]
    if states[0].mode != "explicit":
        return _local(x, head, targets, weights, narrow, settings, None)
    if state_of(weights).mode == "none":  # weights of the caller's own, or, of JAX 0.12, ones
        mesh = getattr(x, "sharding", jax.typeof(x).sharding).mesh
        weights = placed(weights, spec_of(states[2].axes), mesh)
    weights = place(weights, states[2].axes)  # for a value that a program closes over, JAX makes these ones whole
    batch, pos, _ = states[0].axes
    across, vocab, chunks = states[1].axes, (), None
    if set(batch + pos) & set(across[0] + across[1]):
        plain = vocab_first and bias is None and chunk is None and not (narrow and narrow.unembed.scale.ndim)
        chunks = _vocab_chunks(states, x, unembed, targets, chunk_bytes, plain=plain)
    else:
        vocab = _vocab_axes(states, x, unembed, vocab_first)
        settings = settings._replace(vocab_axes=vocab)

    def body(x, head, targets, weights, narrow):
        x, head, narrow = jax.tree.map(lambda a: vary(a, batch + pos + vocab), (x, head, narrow))
        targets, weights = (vary(a, batch + pos) for a in (targets, weights))
        sums = _local(x, head, targets, weights, narrow, settings, chunks)
        return jax.tree.map(lambda s: lax.psum(s, batch + pos), sums) if batch + pos else sums

    tokens = (batch or None, pos or None)
    table = PartitionSpec(*(axes or None for axes in across), reduced=states[1].copied)
    return by_device(
        body,
        mesh=jax.typeof(x).sharding.mesh,
        in_specs=(
            PartitionSpec(*tokens, None, reduced=states[0].copied),
            (table, *(_bias_spec(b, vocab) for b in head[1:])),
            PartitionSpec(*tokens),
            PartitionSpec(*tokens),
            None if narrow is None else specs(narrow, (batch, pos), across),
        ),
        out_specs=PartitionSpec(),
    )(x, head, targets, weights, narrow)


def _vocab_chunks(states: list[State], x, unembed, targets, chunk_bytes: int | None, *, plain: bool) -> VocabChunks:
    """How an unembedding that is sliced over mesh axes of the tokens is gathered."""
    (batch, pos, embed), sides = states[0].axes, states[1].axes
    shown = _check_states(states, x, unembed)
    dim = 0 if sides[0] else 1
    alone = not (sides[0] and sides[1]) and set(sides[dim]) <= set(batch + pos) and not embed
    if not (alone and plain):
        raise LossError(
            "an unembedding gathered in chunks must be 'vocab embed' (vocab_first), with one dimension sliced, over "
            f"mesh axes of the tokens only, and without bias, chunk and tiles of narrow numbers, {shown}: gather it "
            "first with reshard"
        )
    sizes = jax.typeof(x).sharding.mesh.shape
    devices, parts = (math.prod(sizes[a] for a in axes) for axes in (sides[dim], batch + pos))
    local = unembed.shape[0] // (1 if dim else devices)
    tokens = targets.size // parts
    return cut(dim, sides[dim], devices, local, tokens, chunk_bytes)


def _bias_spec(bias, vocab: Axes) -> PartitionSpec:
    state = state_of(bias)
    if state.axes != (vocab,) or state.pending:
        raise LossError(
            f"a bias must be sharded like the vocabulary of the unembedding, got bias {jax.typeof(bias).str_short()} "
            f"for vocab over {'/'.join(vocab) or 'nothing'}, in linear_cross_entropy: reshard it"
        )
    return PartitionSpec(vocab or None, reduced=state.copied)


def _local(
    x, head, targets, weights, narrow: NarrowFactors | None, settings: Settings, chunks: VocabChunks | None
) -> TokenLoss:
    """The loss of one device's tokens over its part of the vocabulary."""
    if jnp.float16 not in (x.dtype, head[0].dtype):
        return _summed(x, head, targets, weights, narrow, settings, chunks)
    # Gradients are made for weights of at most 1, and those of the total from them in float32.
    largest = lax.stop_gradient(jnp.max(jnp.abs(weights)))
    largest = jnp.where(largest > 0, largest, 1.0)
    if narrow is not None:
        narrow = dataclasses.replace(narrow, limit=narrow.limit / largest)
    sums = _summed(x, head, targets, weights / largest, narrow, settings, chunks)
    return TokenLoss(*(s * largest for s in sums))


def _summed(x, head, targets, weights, narrow, settings: Settings, chunks: VocabChunks | None) -> TokenLoss:
    if chunks is not None:
        x, targets, weights = x.reshape(-1, x.shape[-1]), targets.reshape(-1), weights.reshape(-1)
        if narrow is not None:
            narrow = dataclasses.replace(narrow, x=joined(narrow.x))
        total, rest = summed_by_vocab(x, head[0], targets, weights, narrow, settings, chunks)
        return reported(total, rest)
    count = targets.size
    columns = head[0].shape[0 if settings.vocab_first else 1]
    chunk = chunk_size(count, columns, settings)
    padding = -count % chunk
    x, targets, weights = x.reshape(count, x.shape[-1]), targets.reshape(count), weights.reshape(count)
    if padding:
        x, targets, weights = (jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1)) for a in (x, targets, weights))
    cut_up = lambda a: a.reshape(-1, chunk, *a.shape[1:])
    if narrow is not None:
        narrow = dataclasses.replace(narrow, x=in_chunks(narrow.x, chunk))
    total, rest = summed_by_tokens(cut_up(x), head, cut_up(targets), cut_up(weights), narrow, settings)
    return reported(total, rest)


def known_numbers(z_loss, logit_softcap, what: str) -> tuple[float, float | None]:
    """Refuses numbers that are values of the program, whose gradients the loss does not make."""
    fix = "pass a Python number, or compute the loss from whole logits (trellis.nn.cross_entropy)"
    return number_of(z_loss, "z_loss", what, fix), cap_of(logit_softcap, what, fix)


def in_vocabulary(targets, count: int):
    """The targets, and -1, which is no column of the logits, for those that a vocabulary of `count` words lacks."""
    if targets.dtype != jnp.int64:
        targets = targets.astype(jnp.int32)  # fewer bits may not hold the count, unsigned ones not -1
    return jnp.where((targets >= 0) & (targets < count), targets, -1)


def reported(total, rest) -> TokenLoss:
    """Sums of which only the total, and the sum of the weights, carry gradients."""
    *parts, tokens = rest
    return TokenLoss(total, *(lax.stop_gradient(s) for s in parts), tokens)


def _vocab_axes(states: list[State], x, unembed, vocab_first: bool) -> Axes:
    """The mesh axes that slice the vocabulary of an unembedding of which every device uses the part that it has."""
    shown = _check_states(states, x, unembed)
    vocab, contracted = states[1].axes if vocab_first else states[1].axes[::-1]
    if states[0].axes[2] or contracted:
        raise LossError(f"embed must be whole in x and unembed, {shown}: gather it first with reshard")
    return vocab


def _check_states(states: list[State], x, unembed) -> str:
    """Checks what must hold however the unembedding is sliced; returns the operands' types for further messages."""
    shown = f"got x {jax.typeof(x).str_short()}, unembed {jax.typeof(unembed).str_short()}, in linear_cross_entropy"
    if states[0].pending or states[1].pending:
        raise LossError(f"the loss is not linear, so no operand can be a pending sum, {shown}: settle it with reshard")
    if states[2].axes != states[0].axes[:2]:
        raise LossError(
            f"targets must be sharded like x, {shown}, targets sharded {states[2].axes}: reshard them like x"
        )
    return shown


def _check(x, unembed, targets, weights, vocab_size, vocab_first, bias, chunk) -> None:
    where = f"in linear_cross_entropy(vocab_first={vocab_first})"
    refuse_named((x, unembed, targets, weights, bias), "linear_cross_entropy", "next_token_loss")
    embed = unembed.shape[1 if vocab_first else 0] if unembed.ndim == 2 else None
    if x.ndim != 3 or x.shape[-1] != embed or targets.shape != x.shape[:2]:
        layout = "vocab embed" if vocab_first else "embed vocab"
        raise LossError(
            f"x must be 'batch pos embed', unembed '{layout}' and targets 'batch pos', got shapes {x.shape}, "
            f"{unembed.shape}, {targets.shape}, {where}: reorder the dimensions, or change vocab_first"
        )
    floats = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, unembed))
    if not (floats and jnp.issubdtype(targets.dtype, jnp.integer)):
        raise LossError(
            f"x and unembed must be floats and targets whole numbers, got {x.dtype}, {unembed.dtype} and "
            f"{targets.dtype}, {where}: cast them, as in targets.astype('int32')"
        )
    if chunk is not None and not is_count(chunk):
        raise LossError(f"a chunk must have one token or more, got chunk={chunk}, {where}: use 512 or so, or None")
    if weights is not None and weights.shape != targets.shape:
        raise LossError(
            f"each token needs a weight, got weights of shape {weights.shape} for targets {targets.shape}, {where}: "
            "pass weights of the targets' shape"
        )
    columns = math.prod(unembed.shape) // embed
    if bias is not None and bias.shape != (columns,):
        raise LossError(
            f"a bias must have one number for each column, got shape {bias.shape} for {columns} columns, {where}: "
            "pass 'vocab' numbers, including those of the padding"
        )
    if vocab_size is not None and not 0 < vocab_size <= columns:
        raise LossError(
            f"the vocabulary must be from 1 to the size of the unembedding, got vocab_size={vocab_size} for {columns} "
            f"columns, {where}: pass the tokenizer's size, or pad the unembedding further"
        )
