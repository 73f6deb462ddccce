"""A batch: what the loader makes, the step takes and the loss reads."""

import dataclasses

import jax
import numpy as np

from trellis.mesh.layout import POSITIONS, current_layout
from trellis.named import NamedArray, is_named, named
from trellis.named.dealing import deal
from trellis.named.operand import slices_dealt
from trellis.notation.state import state_of

Rows = np.ndarray | jax.Array | NamedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of tokens: a pytree of arrays, all `"batch pos"`, on the host or on devices, with or without names.

    Attributes:
        tokens: `i32`, what the model reads: the token before each target; before a document's first token the store's
            start token (its end-of-document id).
        targets: `i32`, what it predicts.
        loss_mask: `f32`, 1 where the target counts and 0 where it does not (padding, turns of others in a chat).
        segment_ids: `i32`, which document of the row a position belongs to, from 1; 0 is padding. Attention stays
            inside a segment. None: a row is one text.
        positions: `i32`, the place of a token in its segment, from 0. None: its place in the row.
    """

    tokens: Rows
    targets: Rows
    loss_mask: Rows
    segment_ids: Rows | None = None
    positions: Rows | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and positions."""
        shape = self.tokens.shape
        return tuple(shape.values()) if isinstance(shape, dict) else shape

    def named(self) -> "Batch":
        """The same, with the names of their axes on arrays that have none.

        Positions of those are in natural order, and are dealt out if the layout in force deals them out.
        """
        return jax.tree.map(lambda x: x if is_named(x) else _named(x), self, is_leaf=is_named)

    def without_documents(self) -> "Batch":
        """The same tokens, each row as one text."""
        return dataclasses.replace(self, segment_ids=None, positions=None)


def _named(x: np.ndarray | jax.Array) -> NamedArray:
    """An array in natural order with names. One that is on no mesh is dealt out where it is used."""
    if not slices_dealt(POSITIONS, x.shape[-1], "Batch.named") or state_of(x).mode != "explicit":
        return named(x, "batch pos")
    with current_layout().with_dealt(()):
        natural = named(x, "batch pos")
    return deal(natural)
