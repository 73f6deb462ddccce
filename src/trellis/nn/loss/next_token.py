"""The loss of a language model, by name."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from trellis._compat import refuses_copies
from trellis.mesh.layout import Axes, Layout, current_layout
from trellis.mesh.linear import gradients_together
from trellis.named import NamedArray, arange, dot, equal, exp, outer, stop_gradient, where
from trellis.named.backend import on_accelerator
from trellis.named.explicitly import explicitly
from trellis.named.narrow import TYPES, Kind, Narrow
from trellis.named.operand import operand
from trellis.named.pair import moved
from trellis.named.placing import move, refuse_slices
from trellis.named.reduce import reduction
from trellis.nn.loss.formulas import capped, weighed
from trellis.nn.loss.linear import LossError, TokenLoss, in_vocabulary, known_numbers, linear_cross_entropy, reported
from trellis.nn.loss.products import ABLE, NarrowFactors, limit_of, narrow_factor
from trellis.notation import typeof
from trellis.notation.state import state_of

_NAMES = ("batch", "pos", "vocab", "embed")


def next_token_loss(
    hidden: NamedArray,
    unembedding: NamedArray | Narrow,
    targets: NamedArray,
    weights: NamedArray | None = None,
    *,
    bias: NamedArray | None = None,
    vocab_size: int | None = None,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    chunk: int | None = None,
    chunk_bytes: int | None = None,
) -> TokenLoss:
    """Summed cross entropy of `hidden` times `unembedding`, on any layout; the logits never exist all at once.

    With `vocab` mapped to a mesh axis it is vocabulary parallel: devices share
    three numbers a token. Mesh axes that slice `embed` slice the tokens instead.

    Names: none; sums over all tokens.
    Gradient: made along with the sums; a reduce-scatter for an unembedding that was gathered, an all-reduce for hidden
        states that meet a sliced `vocab`, an all-to-all for those whose `embed` is sliced.
    Moves: an all-gather of an unembedding that rests in slices; an all-reduce of the sums over tokens, and of three
        numbers a token if `vocab` is sliced; an all-to-all of hidden states whose `embed` is.

    Args:
        hidden: `"batch pos embed"`.
        unembedding: `"vocab embed"`; as `tr.Narrow`, its three products are in fp8 or mxfp8. The gradient of a logit is
            at most what its token counts, and its scale is made from that, the same for all chunks.
        targets: `i32["batch pos"]`. One that is no word has no logit, as in `linear_cross_entropy`.
        weights: `f32["batch pos"]`, how much each token counts.
        bias: `"vocab"`, added to the logits.
        vocab_size: the true size of a padded vocabulary.
        z_loss, logit_softcap, chunk, chunk_bytes: as in `linear_cross_entropy`; a loss that is mapped over mesh axes
            has no chunks.

    Raises:
        NamesError: in a manual program, `vocab` or `embed` is sliced, or tokens are not sliced alike everywhere.
    """
    tokens = ("batch", "pos")
    known_numbers(z_loss, logit_softcap, "next_token_loss")
    options = dict(z_loss=z_loss, logit_softcap=logit_softcap, chunk=chunk, chunk_bytes=chunk_bytes)
    kind = unembedding.kind if isinstance(unembedding, Narrow) else None
    unembedding = unembedding.weight if isinstance(unembedding, Narrow) else unembedding
    ordered = lambda x, *names: operand(x, "next_token_loss", pending=True).transpose(names)
    hidden, unembedding = ordered(hidden, *tokens, "embed"), ordered(unembedding, "vocab", "embed")
    targets = ordered(targets, *tokens)
    weights = None if weights is None else ordered(weights, *tokens)
    bias = None if bias is None else ordered(bias, "vocab")
    # In a manual program a device sums over its own words and channels only.
    refuse_slices((hidden, unembedding, targets, weights, bias), ("embed", "vocab"), "next_token_loss")
    run = lambda *arrays: _in_place(*arrays, vocab_size, kind, **options)
    return explicitly(run, hidden, unembedding, targets, weights, bias)


def _in_place(
    hidden: NamedArray, unembedding: NamedArray, targets, weights, bias, vocab_size: int | None, kind, **options
) -> TokenLoss:
    """The loss where the types say what is sliced; what it takes is brought where it has to be."""
    layout = current_layout()
    if layout is not None and layout.mapped:
        return _mapped(hidden, unembedding, targets, weights, bias, vocab_size, kind, **options)
    narrow = None if kind is None else _narrow(hidden, unembedding, weights, kind, options["z_loss"])
    if layout is not None and state_of(hidden.array).mode == "explicit":
        batch, pos, vocab = _axes(layout, targets)
        if on_accelerator(hidden.array):
            # Left alone, a compiler sums the unembedding's gradient over devices at the end of the step, and keeps each
            # device's whole part of it, a gigabyte for an 8B model, through all layers.
            arrays = gradients_together((hidden.array, unembedding.array))
            hidden, unembedding = (n.with_array(a) for n, a in zip((hidden, unembedding), arrays, strict=True))
        hidden = move(hidden, (batch, pos, ()), frozenset(vocab))
        in_chunks = bias is None and _in_chunks(targets.size, unembedding, batch + pos, vocab, kind)
        sides = state_of(unembedding.array).axes if in_chunks else (vocab, ())
        unembedding = move(unembedding, sides, frozenset(batch + pos).difference(*sides))
        if narrow is not None:
            x = moved(narrow.x, hidden.names, (batch, pos, ()))
            narrow = dataclasses.replace(narrow, x=x, unembed=moved(narrow.unembed, unembedding.names, sides))
        bias = None if bias is None else move(bias, (vocab,), frozenset(batch + pos))
        targets = move(targets, (batch, pos), frozenset())
        weights = None if weights is None else move(weights, (batch, pos), frozenset())
    named = hidden, unembedding, targets, weights, bias, vocab_size, kind
    plain = None if weights is None else weights.array
    if vocab_size == unembedding.shape["vocab"]:
        vocab_size = None
    given = {"vocab_size": vocab_size, "bias": None if bias is None else bias.array, "narrow": narrow, **options}
    try:
        return linear_cross_entropy(hidden.array, unembedding.array, targets.array, plain, vocab_first=True, **given)
    except ValueError as error:  # mapped over a name that is whole, where `layout.mapped` is empty, with copies
        if not refuses_copies(error):
            raise
        return _mapped(*named, **options)


def _narrow(hidden: NamedArray, unembedding: NamedArray, weights, kind: Kind, z_loss: float) -> NarrowFactors:
    """Both factors in narrow numbers, rounded where they are."""
    if kind not in ABLE:
        raise LossError(
            f"narrow products with an unembedding must be in {' or '.join(ABLE)}, which can represent small "
            f"probabilities, got {kind} for {typeof(unembedding)}, in next_token_loss: use one of these, or a product "
            "that is not narrow"
        )
    factors = (narrow_factor(x.array, kind) for x in (hidden, unembedding))
    counted = jnp.ones((), jnp.float32) if weights is None else weights.array.astype(jnp.float32)
    return NarrowFactors(*factors, limit_of(counted, z_loss), kind)


def _mapped(
    hidden, unembedding, targets, weights, bias, vocab_size, kind=None, *, z_loss=0.0, logit_softcap=None, **_
) -> TokenLoss:
    """The loss by name, from all logits at once: for `vmap` over mesh axes, such as for a loss of each example, since
    JAX maps no program written by hand. The mapped name cuts them into chunks."""
    head = unembedding if kind is None else Narrow(unembedding, kind)
    logits = dot(hidden, head, over="embed", preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    logits = logits.with_array(capped(logits.array, logit_softcap)[0])
    columns = arange(logits.axis("vocab"))
    if vocab_size is not None:
        logits = where(columns < vocab_size, logits, -jnp.inf)
    largest = stop_gradient(reduction(jnp.max, logits, "vocab"))  # if the result is to be NaN, the sum below is NaN
    total = exp(logits - largest).sum("vocab")
    targets = targets.with_array(in_vocabulary(targets.array, vocab_size or columns.size))
    hit = where(outer(equal, targets, columns), logits, 0.0).sum("vocab")
    counted = jnp.ones_like(hit.array) if weights is None else weights.astype(jnp.float32).array
    summed, rest = weighed(largest.array, total.array, hit.array, targets.array, counted, z_loss)[0]
    return reported(summed, rest)


def tied(table: NamedArray, tokens: NamedArray, kind: Kind | None = None) -> NamedArray:
    """Moves a table to where both of its uses want it: the lookup of its rows, and the unembedding of the loss.

    It moves once for both, so its gradients are summed on each device first, and over devices once; otherwise each use
    would move the table's gradient by itself. If the loss gathers an unembedding in chunks, the table stays as it is.

    Names: `vocab embed`.
    Gradient: summed over both uses first; a reduce-scatter if the table was gathered.
    Moves: an all-gather of a table that rests in slices, unless the loss gathers it in chunks.

    Args:
        table: `"vocab embed"`.
        tokens: `"batch pos"`, those of the batch.
        kind: of the loss's products, if they are narrow.
    """
    layout = current_layout()
    if layout is None or state_of(table.array).mode != "explicit":
        return table
    batch, pos, vocab = _axes(layout, tokens)
    table = table.transpose(("vocab", "embed"))
    if _in_chunks(tokens.size, table, batch + pos, vocab, kind):
        return table
    return move(table, (vocab, ()), frozenset(batch + pos).difference(vocab))


def _axes(layout: Layout, tokens: NamedArray) -> tuple[Axes, Axes, Axes]:
    """The mesh axes that slice the batch, its positions and the vocabulary in the loss.

    Those of `embed`, which is whole there, slice the tokens if they divide them: else each device along them would make
    the same logits.
    """
    batch, pos, vocab, embed = layout.assign(_NAMES)
    parts = lambda axes: math.prod(layout.mesh.shape[axis] for axis in axes)
    if tokens.shape["batch"] % parts(batch + embed) == 0:
        return batch + embed, pos, vocab
    if tokens.shape["pos"] % parts(pos + embed) == 0 and not layout.axes_dealt:
        return batch, pos + embed, vocab
    return batch, pos, vocab


def _in_chunks(count: int, unembedding: NamedArray, tokens, vocab, kind: Kind | None) -> bool:
    """Whether the loss gathers the unembedding in chunks, instead of getting it whole.

    It does on accelerators, if mesh axes of the tokens slice one dimension of the table, and a device has no more
    tokens than `embed`: the exponentials that are kept then take no more room than the whole table would.

    Args:
        count: how many tokens there are.
        unembedding: `"vocab embed"`.
        tokens, vocab: the mesh axes that slice them.
        kind: of narrow products; tiles are not cut into chunks.
    """
    if kind is not None and TYPES[kind].in_blocks or not on_accelerator(unembedding.array) or vocab:
        return False
    rows, columns = state_of(unembedding.array).axes
    mesh = jax.typeof(unembedding.array).sharding.mesh
    few = count <= unembedding.shape["embed"] * math.prod(mesh.shape[axis] for axis in tokens)
    return few and bool(rows) != bool(columns) and set(rows + columns) <= set(tokens)
