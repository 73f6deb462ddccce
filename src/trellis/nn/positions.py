"""A batch whose positions are dealt out, so that under a causal mask every device has the same amount to do.

Tokens, targets, masks and documents are small; they are gathered along positions once and dealt out. Everything else
follows from `positions`: a token gets the angles, or the row of a table, of its place in its sequence.
"""

import contextlib
import dataclasses
import math
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

from trellis.mesh.layout import Axes, Layout, current_layout
from trellis.named import NamedArray, arange, is_named
from trellis.named.dealing import deal
from trellis.nn.rope import QUERY
from trellis.notation.state import mode_of


class _Batch(Protocol):
    @property
    def tokens(self) -> NamedArray: ...
    @property
    def positions(self) -> NamedArray | None: ...


Batch = TypeVar("Batch", bound=_Batch)


def dealt_axes(layout: Layout | None) -> Axes:
    """The mesh axes over which attention deals positions out; those that exchange them for heads need no dealing."""
    if layout is None or mode_of(layout.mesh) != "explicit":
        return ()
    kinds, (_, pos, _, _) = dict(layout.context), layout.assign(QUERY)
    return tuple(a for a in pos if kinds.get(a) != "exchange")


def dealt(batch: Batch) -> tuple[contextlib.AbstractContextManager, Batch]:
    """The batch as attention wants it, and the layout that says so, which must be in force while it is used.

    Args:
        batch: a dataclass of arrays `"batch pos"`, or None; with `tokens`, and with `positions` (the place of each
            token in its document) if they are not 0, 1, ...

    Returns:
        The layout, and the batch with `positions`. If nothing is to be dealt out, nothing changes.
    """
    layout = current_layout()
    axes, pos = dealt_axes(layout), batch.tokens.axis("pos")
    if not axes or layout.dealt or pos.size % (2 * math.prod(layout.mesh.shape[a] for a in axes)):
        return contextlib.nullcontext(), batch
    if batch.positions is None:
        batch = dataclasses.replace(batch, positions=arange(pos, dtype=jnp.int32))
    with layout.with_dealt(axes) as dealt_layout:
        return dealt_layout, jax.tree.map(deal, batch, is_leaf=is_named)
