"""Tiles of numbers that share a scale, in mxfp8 and nvfp4 products: which layouts would cut them."""

import math
from collections.abc import Iterator

from trellis.errors import UserError
from trellis.mesh import Layout
from trellis.models import LanguageModel
from trellis.named.blocks import block_of
from trellis.named.narrow import TYPES
from trellis.nn.parameters import Parameter, parameters
from trellis.nn.precision import unembedding_of
from trellis.notation.state import mode_of
from trellis.run.config import Run
from trellis.run.on_mesh import sizes_of

# Tiles lie along the last of the names that a product sums, or keeps. These are never the last.
_NEVER = ("heads", "kv_heads")


def check_tiles(run: Run, layout: Layout, model: LanguageModel, *, at_rest: bool) -> None:
    """Refuses layouts under which a device would have only part of a tile.

    Args:
        run: the run, of one length.
        layout: its layout.
        model: the model, as types, with the vocabulary as the layout has it padded.
        at_rest: whether weights are rounded as they rest, and then gathered; if not, they are rounded as they are used.

    Raises:
        UserError: slices cut a tile.
    """
    if mode_of(layout.mesh) != "explicit":
        return
    head = unembedding_of(model)
    kinds = [(p, run.precision.product_of(p)) for p in parameters(model)] + [(head, run.precision.loss_product(model))]
    for p, kind in kinds:
        if kind is None or (form := TYPES[kind].blocks) is None:
            continue
        sizes = {**p.leaf.shape, "pos": run.data.sequence_length}
        for name, axes in _slices(run, layout, p, at_rest):
            length, ways = sizes.get(name, 0), math.prod(layout.mesh.shape[axis] for axis in axes)
            if name not in _NEVER and length // (tile := block_of(length or 1, form.block)) % ways:
                raise UserError(
                    "Numbers that share a scale must be on the same device.",
                    seen=f"{kind} for `{p.path}`: {name}={length} in tiles of {tile} over {sizes_of(layout, axes)}",
                    where="precision.products",
                    fix=f"use fp8, or fewer devices along {' and '.join(axes)}",
                )


def _slices(run: Run, layout: Layout, p: Parameter, at_rest: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of a weight, and of the activations that it meets, each with the mesh axes that slice it when it is
    rounded."""
    is_head, (stages,) = "vocab" in p.names, layout.even().assign(("layers",))
    rest = [tuple(a for a in axes if a not in stages) for axes in layout.assign(p.names, "params")]
    used = list(layout.assign(p.names))
    if is_head and stages:  # each takes its slice of it into the loss
        taken = sum(used, ())
        used = [(*mine, *(a for a in more if a not in taken)) for mine, more in zip(used, rest, strict=True)]
    tied = is_head and run.model.tie_embeddings  # moved once for both uses
    yield from list(zip(p.names, rest if at_rest and not tied else used, strict=True))[p.counting :]
    for name in p.names[p.counting :]:
        _, *both = zip(("batch", "pos", name), layout.assign(("batch", "pos", name)), strict=True)
        yield from both
