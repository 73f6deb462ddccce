"""The three products of the loss, of plain factors or of narrow ones (`tr.Narrow`).

Narrow factors are rounded with the scale of the whole array, before the loss cuts it into chunks. The gradient of the
logits never exists as a whole, but a bound on it is known in advance: a logit's gradient is its token's weight times a
probability, or times a probability less 1. So its scale is made from the largest weight, and depends neither on chunks
nor on the mesh.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from trellis.mesh.manual.ops import Axes
from trellis.named.backend import copied_turned, on_accelerator
from trellis.named.blocks import block_of
from trellis.named.narrow import TYPES, Kind, Rounded, multiplied, once_only, rounded
from trellis.nn.loss.formulas import Settings
from trellis.notation import spec_of

Factor = jax.Array | Rounded

# In the others most probabilities become zero: int8 has no number between 0 and 1/254 of the largest gradient.
ABLE: tuple[Kind, ...] = ("fp8", "mxfp8")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "unembed", "limit"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True, slots=True)
class NarrowFactors:
    """What the loss multiplies, in narrow numbers.

    Attributes:
        x: `batch pos embed`; its tiles' scales are `batch pos_block embed_block`.
        unembed: `vocab embed`.
        limit: the largest possible gradient of a logit, a scalar.
        kind: of the numbers.
    """

    x: Rounded
    unembed: Rounded
    limit: jax.Array
    kind: Kind


def narrow_factor(array: jax.Array, kind: Kind) -> Rounded:
    """Hidden states or an unembedding in narrow numbers; tiles lie along the last two dimensions."""
    return rounded(array, kind, (array.ndim - 2, array.ndim - 1))


def specs(narrow: NarrowFactors, tokens: tuple[Axes, Axes], table: tuple[Axes, Axes]) -> NarrowFactors:
    """How the factors lie on a mesh, by the axes that slice tokens and the unembedding."""

    def of(found: Rounded, axes) -> Rounded:
        return found._replace(values=spec_of(axes), scale=spec_of(axes if found.scale.ndim else ()), largest=None)

    return NarrowFactors(of(narrow.x, (*tokens, ())), of(narrow.unembed, table), spec_of(()), narrow.kind)


def limit_of(weights: jax.Array, z_loss: float) -> jax.Array:
    """The largest possible gradient of a logit: the largest weight of a token; with a z-loss, whose part is small
    beside it, twice that."""
    return jnp.max(jnp.abs(weights)) * (2.0 if z_loss else 1.0)


def in_chunks(x: Rounded, chunk: int) -> Rounded:
    """Hidden states of one device cut into chunks of tokens: `chunk token embed`; the last one is padded."""
    rows = math.prod(x.values.shape[:-1])
    count = -(-rows // chunk)

    def cut(a: jax.Array, tile: int, filling: float) -> jax.Array:
        a = a.reshape(-1, a.shape[-1])
        a = jnp.pad(a, ((0, count * chunk // tile - a.shape[0]), (0, 0)), constant_values=filling)
        return a.reshape(count, chunk // tile, -1)

    scale = x.scale
    if scale.ndim:
        return Rounded(cut(x.values, 1, 0), cut(scale, rows // math.prod(scale.shape[:-1]), 1))
    return Rounded(cut(x.values, 1, 0), jnp.broadcast_to(scale, (count,)))


def tile_of(kind: Kind, pos: int) -> int:
    """How many tokens share scales, in sequences of `pos` tokens."""
    form = TYPES[kind].blocks
    return 1 if form is None else block_of(pos, form.block)


def joined(factor: Factor) -> Factor:
    """Chunks joined to one array of tokens; a factor's one scale is in each of them."""
    if not isinstance(factor, Rounded):
        return factor.reshape(-1, factor.shape[-1])
    flat = lambda a: a.reshape(-1, a.shape[-1])
    scale = factor.scale
    return Rounded(flat(factor.values), scale.reshape(-1)[0] if scale.ndim < 2 else flat(scale))


def to_logits(x: Factor, unembed: Factor, settings: Settings) -> jax.Array:
    """`f32["token vocab"]` of `"token embed"`."""
    if isinstance(x, Rounded):
        return multiplied(x, unembed, (((1,), (1,)), ((), ())), settings.narrow, jnp.float32)
    form = "te,ve->tv" if settings.vocab_first else "te,ev->tv"
    return jnp.einsum(form, x, unembed, preferred_element_type=jnp.float32)


def gradient_factor(d_logits: jax.Array, dtype, settings: Settings, limit=None) -> Factor:
    """The gradient of logits, `f32["token vocab"]`, as both of its products take it.

    Args:
        d_logits: the gradient.
        dtype: of plain factors.
        settings: how.
        limit: for narrow factors, its largest possible element.
    """
    if settings.narrow is None:
        return d_logits.astype(dtype)
    tiles = d_logits.reshape(-1, settings.tile, d_logits.shape[1])
    found = once_only(rounded(tiles, settings.narrow, (1, 2), gradient=True, known=limit), d_logits)
    flat = lambda a: a.reshape(-1, a.shape[-1]) if a.ndim else a
    return Rounded(flat(found.values), flat(found.scale))


def to_x(d_logits: Factor, unembed: Factor, settings: Settings, dtype=None) -> jax.Array:
    """The gradient of hidden states, `"token embed"`."""
    if isinstance(d_logits, Rounded):
        return multiplied(d_logits, unembed, (((1,), (0,)), ((), ())), settings.narrow, dtype or jnp.float32)
    form = "tv,ve->te" if settings.vocab_first else "tv,ev->te"
    return jnp.einsum(form, d_logits, unembed, preferred_element_type=dtype)


def to_unembed(d_logits: Factor, x: Factor, settings: Settings) -> jax.Array:
    """The float32 gradient of `unembed`, a sum over tokens. On a CPU the factor with tokens first is transposed
    before the product: inside it, that takes as long as the product itself."""
    if isinstance(d_logits, Rounded):
        return multiplied(d_logits, x, (((0,), (0,)), ((), ())), settings.narrow, jnp.float32)
    left, right = (d_logits, x) if settings.vocab_first else (x, d_logits)
    if not on_accelerator(x):
        return jax.lax.dot(copied_turned(left, (1, 0)), right, preferred_element_type=jnp.float32)
    form = "tv,te->ve" if settings.vocab_first else "tv,te->ev"
    return jnp.einsum(form, d_logits, x, preferred_element_type=jnp.float32)


def turns_sum(x: Factor, tokens: int, unembed: jax.Array, settings: Settings) -> bool:
    """Whether the gradient of an unembedding that has the vocabulary first is summed over chunks with it last, and
    transposed at the end: on a CPU, if that copies less than the gradient of all logits."""
    if isinstance(x, Rounded) or not settings.vocab_first or on_accelerator(unembed):
        return False
    vocab, embed = unembed.shape
    return tokens * embed + vocab * embed < tokens * vocab
