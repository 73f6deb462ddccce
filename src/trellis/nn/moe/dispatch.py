"""Rows travel to experts in eight bits; experts' results come back without rounding.

Numbers of a row share powers of two in blocks of 32 (MXFP8, `trellis.named.blocks`), which travel with it in one array.
The gradient of what comes back goes the way of the rows, so in eight bits too; that of the rows comes back without
rounding (DeepSeek-AI, 2024, arXiv:2412.19437, section 3.3.3).

A row is rounded by its own numbers, wherever it goes, and rows that stay are rounded like those that travel, so what a
model computes does not depend on its layout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trellis.named import save
from trellis.named.backend import platform_of
from trellis.named.blocks import MXFP8, block_of, opened
from trellis.named.narrow import rounded
from trellis.nn.moe.config import Dispatch
from trellis.nn.moe.ragged import in_tiles
from trellis.nn.moe.tiles import LANES

# Rows of any kind of numbers, and integers that say where each goes.
Move = Callable[[jax.Array, Any], jax.Array]

# The type of rows that travel in eight bits, in the notation.
WORDS = "u16"

# Rows are padded to a multiple of these bytes: what vectorized copies take at once, and two rows of a TPU's tile, of
# 128 words of 16 bits each, so that a ragged exchange moves whole tiles (`in_tiles`).
_ALIGNED, _TILE = 16, 2 * 2 * LANES


@dataclasses.dataclass(frozen=True)
class Carrier:
    """Brings rows to experts, and experts' results back.

    Attributes:
        bring: moves rows to where experts take them, `rows ...` to `room ...`.
        leave: the other way, which `bring` takes backward.
        dispatch: the numbers in which rows are brought; None for their own.
        ragged: whether rows that travel are in tiles of their own (`in_tiles`).
    """

    bring: Move
    leave: Move
    dispatch: Dispatch | None
    ragged: bool = False

    def there(self, rows: jax.Array, at: Any) -> jax.Array:
        """`room embed`, from `rows embed` or rows in tiles."""
        return self.bring(rows, at) if self.dispatch is None else _there(self, rows, at)

    def back(self, made: jax.Array, at: Any) -> jax.Array:
        """Brings experts' results, `room embed`, to where the rows came from."""
        return self.leave(made, at) if self.dispatch is None else _back(self, made, at)

    def words(self, rows: jax.Array, at: Any) -> jax.Array:
        """`room embed`: rows brought as words, in the type that they have here."""
        assert self.dispatch is not None
        words = self.bring(in_words(rows, self.dispatch, tiled=self.ragged), at)
        return from_words(save(words, "mlp_rows"), math.prod(rows.shape[1:]), rows.dtype, self.dispatch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _there(carrier: Carrier, rows, at):
    return carrier.words(rows, at)


# Without another call of `_there`: marks in it, of what to keep, would not be seen.
_there.defvjp(lambda c, rows, at: (c.words(rows, at), at), lambda c, at, d: (c.leave(d, at), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _back(carrier: Carrier, made, at):
    return carrier.leave(made, at)


_back.defvjp(lambda c, made, at: (c.leave(made, at), at), lambda c, at, d: (c.words(d, at), None))


def as_sent(x: jax.Array, dispatch: Dispatch | None) -> jax.Array:
    """Rounds what stays as if it had been sent; the gradient is as if nothing was rounded.

    Args:
        x: `... embed`, whose blocks lie on one device.
        dispatch: the numbers in which it would go.
    """
    return _rounded(x) if dispatch == "mxfp8" else x


def as_returned(made: jax.Array, dispatch: Dispatch | None) -> jax.Array:
    """Results that stay, without rounding; their gradient is rounded as if it had been sent."""
    return _gradient_rounded(made) if dispatch == "mxfp8" else made


@jax.custom_vjp
def _rounded(x):
    found = rounded(x, "mxfp8", (x.ndim - 1,), widened=True)
    return opened(found.values, found.scale, x.dtype)


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, d: (d,))


@jax.custom_vjp
def _gradient_rounded(made):
    return made


_gradient_rounded.defvjp(lambda made: (made, None), lambda _, d: (_rounded(d),))


def in_words(rows: jax.Array, dispatch: Dispatch, *, tiled: bool = False) -> jax.Array:
    """Rows as words of 16 bits, `u16["rows words"]`: in eight bits with the scales of their blocks, or all their bits.

    >>> import jax.numpy as jnp
    >>> words = in_words(jnp.array([[1.0, -2.0, 0.3, 448.0]]), "mxfp8")
    >>> words.shape, from_words(words, 4, jnp.float32, "mxfp8").tolist()
    ((1, 8), [[1.0, -2.0, 0.3125, 448.0]])

    Args:
        rows: `rows embed`, or in tiles.
        dispatch: what the words are.
        tiled: whether words are to be in tiles too (`in_tiles`).
    """
    rows = rows.reshape(rows.shape[0], -1)
    if dispatch == "bits":
        parts = [rows.astype(jnp.float32)]
    else:
        found = rounded(rows, "mxfp8", (1,))
        parts = [found.values, found.scale]
    of_bytes = [lax.bitcast_convert_type(x, jnp.uint8).reshape(rows.shape[0], -1) for x in parts]
    left = -sum(x.shape[1] for x in of_bytes) % (_TILE if tiled and platform_of(rows) == "tpu" else _ALIGNED)
    whole = jnp.pad(jnp.concatenate(of_bytes, 1), ((0, 0), (0, left)))
    words = lax.bitcast_convert_type(whole.reshape(rows.shape[0], -1, 2), jnp.uint16)
    return in_tiles(words) if tiled else words


def from_words(words: jax.Array, embed: int, dtype: Any, dispatch: Dispatch) -> jax.Array:
    """The rows that words stand for, `rows embed`.

    Args:
        words: from `in_words`, in tiles or not.
        embed: numbers of a row.
        dtype: of the result.
        dispatch: what the words are.
    """
    of_bytes = lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)
    if dispatch == "bits":
        numbers = of_bytes[:, : 4 * embed].reshape(words.shape[0], embed, 4)
        return lax.bitcast_convert_type(numbers, jnp.float32).astype(dtype)
    values, scales = of_bytes[:, :embed], of_bytes[:, embed : embed + embed // block_of(embed)]
    values, scales = (lax.bitcast_convert_type(x, t) for x, t in ((values, MXFP8.element), (scales, MXFP8.scale)))
    return opened(values, scales, dtype)
