"""Sampling from a model: keys and values of earlier positions are kept, so each new token costs one position."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trellis import (
    Layout,
    NamedArray,
    Stacked,
    UserError,
    arange,
    current_layout,
    einsum,
    full,
    index,
    named,
    named_jit,
    shard,
    take,
)
from trellis.models.protocol import LanguageModel
from trellis.nn import attend, attend_cached

# Prompts are padded to a multiple of this, so most of them share a compiled program.
_BUCKET = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen from its logits.

    Attributes:
        temperature: divides the logits; 0 takes the largest.
        top_k: keeps this many of the largest, or all if there are fewer; None keeps all.
        top_p: keeps the largest whose probabilities add up to this (Holtzman et al., 2019, arXiv:1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        rules = (
            (
                self.temperature >= 0,
                "`temperature` must be 0 or more.",
                "temperature",
                "use 0 for the most likely token",
            ),
            (self.top_k is None or self.top_k >= 1, "`top_k` must be 1 or more.", "top_k", "use 1 or more"),
            (
                self.top_p is None or 0 < self.top_p <= 1,
                "`top_p` must be above 0 and at most 1.",
                "top_p",
                "use 0.9, or leave it out",
            ),
        )
        for holds, rule, field, fix in rules:
            if not holds:
                raise UserError(rule, seen=f"{field}={getattr(self, field)}", where=field, fix=fix)


def sample(
    model: LanguageModel,
    tokenizer,
    prompt: str,
    *,
    new_tokens: int = 100,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    count: int = 1,
    ends: Sequence[int] = (),
) -> list[str]:
    """Texts that begin with the prompt and go on until a document ends, `new_tokens` are made or positions run out.

    Most tokenizers join a space with the word after it, so a model has hardly seen a space that ends a text. A prompt
    that ends in one is continued from the token before it, by a token that begins with a space.

    Under a layout the model may be sliced in any way. All processes of a run call this together.

    Args:
        model: a model, in the type to compute in.
        tokenizer: has `encode_markup`, `decode` and `end_of_document`.
        prompt: the text to continue; an empty one begins a document. Special tokens that are written out in it, such as
            the markers of a chat, are those tokens.
        new_tokens: how many tokens are made at most.
        sampling: how each is chosen.
        seed: of the choices.
        count: how many texts.
        ends: tokens that end a text beside the one that ends a document, such as those that end a message.

    Raises:
        UserError: the prompt takes all positions that the model has, or has tokens that the model does not have, or
            none.
    """
    spaced = _spaced(tokenizer, model.config.vocab) if prompt.endswith(" ") and prompt.strip() else None
    kept = prompt if spaced is None else prompt[:-1]
    ids = [int(i) for i in tokenizer.encode_markup(kept)] if prompt else [tokenizer.end_of_document]
    positions = model.config.positions
    if positions is not None and len(ids) < positions:
        new_tokens = min(new_tokens, positions - len(ids))
    stop = (tokenizer.end_of_document, *ends)
    new = generate(
        model,
        [ids] * count,
        new_tokens=new_tokens,
        sampling=sampling,
        key=jax.random.key(seed),
        stop=stop,
        first=spaced,
    )
    texts = []
    for row in new:
        made = list(itertools.takewhile(lambda token: token not in stop, row))
        texts.append(tokenizer.decode((ids if prompt else []) + made))
    return texts


@functools.lru_cache(maxsize=1)
def _spaced(tokenizer, vocab: int) -> np.ndarray | None:
    """`bool_["vocab"]`, the tokens that begin with a space; None if no token joins a space with other text."""
    texts = [tokenizer.decode([i]) for i in range(vocab)]
    joins = any(len(text) > 1 and text[0] == " " and text[1] != " " for text in texts)
    return np.array([text.startswith(" ") for text in texts]) if joins else None


def generate(
    model: LanguageModel,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    sampling: Sampling,
    key,
    stop: Sequence[int] = (),
    first: np.ndarray | None = None,
) -> list[list[int]]:
    """New tokens after each prompt. Compiled once for prompts of similar length, or of one length if experts have a
    capacity: what they drop of a prompt is what they drop of these tokens by themselves. Of a new token nothing is.

    Args:
        model: a model, in the type to compute in.
        prompts: tokens, the same number in each, at least one.
        new_tokens: how many tokens are made.
        sampling: how each is chosen; the padding of a vocabulary never is.
        key: of the choices.
        stop: after one of these tokens a row holds nothing but the first of them; generation ends when all rows have
            one.
        first: the tokens that may come first, `bool_["vocab"]`; None allows all.

    Returns:
        `new_tokens` tokens for each prompt.

    Raises:
        UserError: the prompts are empty or of different lengths, have tokens that the model does not have, or leave too
            few of its positions.
    """
    lengths = {len(p) for p in prompts}
    if len(lengths) != 1:
        raise UserError(
            "Prompts that are continued together must have the same number of tokens, at least one.",
            seen=f"lengths {sorted(lengths)}",
            where="generate",
            fix="continue them one at a time",
        )
    (length,), vocab = lengths, model.config.vocab
    for prompt in prompts:
        check_tokens(prompt, vocab, "generate")
    positions = model.config.positions
    if positions is not None and length + new_tokens > positions:
        raise UserError(
            "A prompt and its new tokens must fit in the model's learned positions.",
            seen=f"{length} tokens of prompt and {new_tokens} new ones, positions={positions}",
            where="generate",
            fix=f"generate {positions - length} tokens or fewer"
            if length < positions
            else f"give a prompt of {positions - 1} tokens or fewer",
        )
    routing = getattr(model.config, "routing", None)
    limited = routing is not None and routing.capacity is not None  # what is dropped goes by a sequence's length
    padded = length if limited else -(-length // _BUCKET) * _BUCKET
    padded = padded if positions is None else min(padded, positions)
    stop = tuple(stop)
    rows = jnp.array([p + [0] * (padded - length) for p in prompts], jnp.int32)
    layout = _layout(current_layout(), len(prompts), model.layers.axis.name)
    with contextlib.nullcontext() if layout is None else layout:
        out = _program(model, rows, jnp.int32(length), key, new_tokens, sampling, stop, first)
    return jax.device_get(out.addressable_data(0)).tolist()


def check_tokens(tokens: Sequence[int], vocab: int, where: str) -> None:
    """Refuses a prompt without tokens, of which there is nothing to continue, or with tokens that a model of `vocab`
    tokens does not have: its table has no rows for them.

    Args:
        tokens: of a prompt.
        vocab: how many the model has.
        where: for the message.

    Raises:
        UserError: naming the first.
    """
    if not len(tokens):
        raise UserError(
            "A prompt must have at least one token.",
            seen="none: the tokenizer leaves nothing of it",
            where=where,
            fix="give a prompt with words in it, or an empty one, which begins a document",
        )
    if unknown := next((token for token in tokens if not 0 <= token < vocab), None):
        raise UserError(
            "Every token of a prompt must be in the model's vocabulary.",
            seen=f"token {unknown}, vocab={vocab}",
            where=where,
            fix="the tokenizer has more tokens than the model: write a prompt without those, such as added markers",
        )


def _layout(layout: Layout | None, batch: int, layers: str) -> Layout | None:
    """The layout without slices of positions (they come one by one), of layers, or of a batch that does not divide."""
    if layout is None:
        return None
    divides = [
        (name, axes)
        for name, axes in layout.compute
        if name not in ("pos", layers)
        and (name != "batch" or batch % math.prod(layout.mesh.shape[a] for a in axes) == 0)
    ]
    return dataclasses.replace(layout, compute=dict(divides), strict=False, overlap=(), dealt=())


def _run(model: LanguageModel, rows, length, key, new_tokens: int, sampling: Sampling, stop: tuple, allowed):
    """`i32["batch new"]`, on every device."""
    batch, padded = rows.shape
    hidden, cache = _prefill(model, named(rows, "batch pos"), padded + new_tokens)
    last = take(hidden, "pos", length - 1)
    key, first = jax.random.split(key)
    token = _choose(model, last, first, sampling, allowed)
    out = jnp.full((batch, new_tokens), stop[0] if stop else 0, jnp.int32).at[:, 0].set(token)

    def ends(token):
        return functools.reduce(jnp.logical_or, [token == end for end in stop], jnp.zeros(batch, jnp.bool_))

    def goes_on(carry):
        i, token, *_, done = carry
        return (i < new_tokens) & ~jnp.all(done)

    def step(carry):
        i, token, out, cache, key, done = carry
        hidden, cache = _decode(model, named(token[:, None], "batch pos"), length + i - 1, cache)
        key, mine = jax.random.split(key)
        token = _choose(model, hidden["pos", 0], mine, sampling)
        if stop:
            token = jnp.where(done, jnp.int32(stop[0]), token)
            done = done | ends(token)
        out = lax.dynamic_update_slice_in_dim(out, token[:, None], i, 1)
        return i + 1, token, out, cache, key, done

    return lax.while_loop(goes_on, step, (jnp.int32(1), token, out, cache, key, ends(token)))[2]


_program = named_jit(_run, static=(4, 5, 6))


def _prefill(model: LanguageModel, tokens: NamedArray, total: int):
    """Hidden states of the prompt, and the keys and values of all layers with room for `total` positions."""

    def attention(number, kept, q, k, v, **options):
        kept += [k, v]
        return attend(q, k, v, **options)

    hidden, caches = _through(model, tokens, None, [()] * len(_stacks(model)), attention)
    return hidden, [tuple(_with_room(x, total) for x in cache) for cache in caches]


def _decode(model: LanguageModel, token: NamedArray, at: jax.Array, cache):
    """The hidden state of the position `at`, and the cache with it."""

    def attention(number, kept, q, k, v, *, segment_ids=None, save_name=None, **options):
        # A block of several layers keeps a pair for each. The next layer's is first, and goes to the end.
        held = [_written(all_layers, x, at, number) for all_layers, x in zip(kept[:2], (k, v), strict=True)]
        kept[:] = [*kept[2:], *held]
        own = (index(x, {x.names[0]: number}) for x in held)
        return attend_cached(q, *own, at + 1, **options)

    positions = full(token.axes, at, jnp.int32)
    return _through(model, token, positions, cache, attention)


def _stacks(model: LanguageModel) -> list[Stacked]:
    return [model.layers] if model.first_layers is None else [model.first_layers, model.layers]


def _through(model: LanguageModel, tokens: NamedArray, positions, caches, attention):
    """The model's hidden states with another attention function, and what that left of each stack.

    `attention(number, kept, q, k, v, ...)` of the block of this number leaves its own part in the list `kept`, which is
    empty; or it finds there the cache of all blocks, and leaves it with its own part. A cache goes from block to block:
    if each gave its own part, all of it would be copied for every token.
    """
    x, each, shared = model.start(tokens, None, positions)

    def call(layer, carry, number, *rest):
        x, cache = carry
        kept = list(cache)
        x = layer(x, *rest, attention=lambda *args, **options: attention(number, kept, *args, **options))
        return ((x, tuple(kept)), ()) if cache else ((x, ()), tuple(kept))

    left = []
    for stack, cache in zip(_stacks(model), caches, strict=True):
        mine = each if stack is model.layers else ()
        numbers = arange(stack.axis)
        (x, cache), made = stack.scan((x, tuple(cache)), *shared, each=(numbers, *mine), call=call)
        left.append(cache or made)
    return model.norm(x), left


def _with_room(x: NamedArray, total: int) -> NamedArray:
    """Keys or values of all layers, with zeros after them."""
    axis = x.axis("key_pos")
    room = full([a.resize(total) if a.name == "key_pos" else a for a in x.axes], 0, x.dtype)
    return _written(room, x, 0) if total > axis.size else x


def _written(cache: NamedArray, x: NamedArray, at, number: NamedArray | None = None) -> NamedArray:
    """The cache of all layers with `x` from position `at` on, of all layers or of the one of this number."""
    x = x.transpose([n for n in cache.names if n in x.names])
    array = x.array if number is None else jnp.expand_dims(x.array, 0)
    first = [0 if number is None else number.array, *(at if n == "key_pos" else 0 for n in cache.names[1:])]
    return cache.with_array(lax.dynamic_update_slice(cache.array, array, first))


def _choose(model: LanguageModel, hidden: NamedArray, key, sampling: Sampling, allowed=None) -> jax.Array:
    """`i32["batch"]`, the next tokens, the same on every device; from those that are `allowed`, if given."""
    logits = einsum(
        "batch embed, vocab embed -> batch vocab", hidden, model.unembedding, preferred_element_type=jnp.float32
    )
    if model.unembedding_bias is not None:
        logits = logits + model.unembedding_bias.astype(jnp.float32)
    whole = logits if current_layout() is None else shard(logits, {})
    each = whole.array[:, : model.config.vocab]
    return choose(each if allowed is None else jnp.where(allowed, each, -jnp.inf), key, sampling)


def choose(logits: jax.Array, key, sampling: Sampling) -> jax.Array:
    """One token for each row of logits.

    Args:
        logits: `f32["batch vocab"]`.
        key: of the choice.
        sampling: how.

    Returns:
        `i32["batch"]`.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    size = logits.shape[-1]
    if sampling.top_k is not None and sampling.top_k < size:
        least = lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    # The largest becomes 0, which stays finite, and the temperature a number that float32 can also divide by.
    temperature = min(max(sampling.temperature, 1e-37), 1e37)
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if sampling.top_p is not None and sampling.top_p < 1:
        falling = jnp.sort(logits, axis=-1, descending=True)
        shares = jax.nn.softmax(falling, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        kept = before < sampling.top_p  # the one that crosses the limit is kept too, so there is always one
        least = jnp.min(jnp.where(kept, falling, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)
