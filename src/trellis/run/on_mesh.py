"""Checks of a run on its mesh, before anything is traced: what is sliced, and what the slices have to do."""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence

from trellis.errors import UserError
from trellis.mesh import Layout
from trellis.mesh.layout import POSITIONS
from trellis.mesh.platform import platform_of_devices
from trellis.models import LanguageModel
from trellis.named import is_named
from trellis.named.pipeline.by_vmap import microbatches_of
from trellis.nn.attention.attend import KEY
from trellis.nn.moe import Routing
from trellis.nn.moe.mixing import check_way, places_of
from trellis.nn.parameters import Parameter, parameters
from trellis.nn.positions import dealt_axes
from trellis.nn.rope import QUERY
from trellis.notation.state import mode_of
from trellis.run.config import Run
from trellis.run.layouts import KINDS


def check_on_mesh(run: Run, layout: Layout, model: LanguageModel) -> None:
    """Refuses a run that cannot be computed on its layout.

    Args:
        run: the run, of one length.
        layout: its layout.
        model: the model, as types without a layout.

    Raises:
        UserError: the mesh does not divide a batch, a sequence or a width; attention would not find its keys, or tokens
            their experts; or the stages of a pipeline have nothing that they can do at the same time.
    """
    declared = [p for p in parameters(model) if is_named(p.leaf)]
    _check_batch(run, layout)
    _check_widths(run, layout, declared)
    _check_attention(run, layout)
    if isinstance(routing := getattr(run.model, "routing", None), Routing):
        check_way(routing.way, places_of(layout), platform_of_devices(layout.mesh))
        _check_parts(run, layout, routing)
    if mode_of(layout.mesh) == "explicit":
        _check_dealt(layout, declared)
        _check_stages(run, layout)
        if run.mesh.stage > 1 and not model.looks_ahead:
            _check_permutes(run, layout, declared)


def _check_batch(run: Run, layout: Layout) -> None:
    """Refuses batches that the mesh axes of `batch` and `pos` do not divide."""
    rule = "The batch must split evenly over the mesh axes of `batch` and into microbatches."
    for entry in run.batch_sizes():
        _check_divides(rule, "batch_size", entry.size, batch_parts(run, layout))
    rule = "A sequence must split evenly over the mesh axes of `pos`."
    _, axes = layout.assign(("batch", "pos"))
    positions = {axis: layout.mesh.shape[axis] for axis in axes}
    _check_divides(rule, "data.sequence_length", run.data.sequence_length, positions)


@contextlib.contextmanager
def as_the_model_is(given: bool = True) -> Generator[None]:
    """Errors within advise no other sizes of a model that is `given`: that of an import, or of a run that has begun."""
    try:
        yield
    except UserError as error:
        if not (given and "--model." in error.fix):
            raise
        fix = "use --mesh sizes or a number of devices that divide it"
        raise UserError(error.rule, seen=error.seen, where=error.where, fix=fix) from None


def batch_parts(run: Run, layout: Layout) -> dict[str, int]:
    """Into how many parts a batch is cut, by what cuts it: the mesh axes of `batch`, and microbatches."""
    (axes,) = layout.assign(("batch",))
    parts = {axis: layout.mesh.shape[axis] for axis in axes}
    return parts | ({"microbatches": run.parts} if run.parts > 1 else {})


def _check_parts(run: Run, layout: Layout, routing: Routing) -> None:
    """Refuses batches if a device's sequences cannot be divided into the requested number of parts side by side."""
    if routing.interleave == 1:
        return
    rows = batch_parts(run, layout) | {"model.routing.interleave": routing.interleave}
    rule = "A device's sequences of a microbatch must split evenly into the parts of `interleave`."
    for entry in run.batch_sizes():
        _check_divides(rule, "batch_size", entry.size, rows)


def _check_dealt(layout: Layout, declared: Sequence[Parameter]) -> None:
    """Refuses parameters in the order of positions if positions are dealt out over devices."""
    for parameter in declared if dealt_axes(layout) else ():
        if POSITIONS in parameter.names:
            raise UserError(
                "If positions are dealt out over devices, a table of positions must be looked up by the batch's.",
                seen=f"a parameter '{' '.join(parameter.names)}'",
                where=f"`{parameter.path}`",
                fix="rename its rows and look them up, as gpt2 does: take(table, 'positions', positions); or "
                "use --layout.context exchange",
            )


def _check_widths(run: Run, layout: Layout, declared: Sequence[Parameter]) -> None:
    """Refuses mesh axes that do not divide what they slice of a parameter. A vocabulary is padded so that they do, and
    stages may have fewer layers than others."""
    fields = {field.name: getattr(run.model, field.name) for field in dataclasses.fields(run.model)}
    for parameter in declared:
        for which in ("params", "compute"):
            slices = zip(parameter.leaf.shape.items(), layout.assign(parameter.names, which), strict=True)
            for (name, length), axes in slices:
                if name != "vocab" and not (which == "compute" and name in layout.uneven):
                    parts = {axis: layout.mesh.shape[axis] for axis in axes}
                    rule = "Mesh axes must divide the axis that they slice."
                    if fields.get(name) == length:
                        _check_divides(rule, f"model.{name}", length, parts)
                    else:  # such as heads as wide as other fields say, and blocks of several layers
                        _check_divides(rule, name, length, parts, where=f"`{parameter.path}`")


def _check_divides(rule: str, field: str, size: int, parts: Mapping[str, int], where: str | None = None) -> None:
    """Refuses a size that its parts do not divide: of a field, or of an axis that no field sets, `where` that is."""
    count = math.prod(parts.values())
    if size % count:
        total = f" = {count}" if len(parts) > 1 else ""
        near = [n for n in (size // count * count, -(-size // count) * count) if n]
        sizes = f"--{field} {' or '.join(map(str, near))}, or " if where is None else ""
        raise UserError(
            rule,
            seen=f"{field}={size} over {' x '.join(f'{name}={n}' for name, n in parts.items())}{total}",
            where=where or field,
            fix=f"use {sizes}--mesh sizes or a number of devices that divide it",
        )


def _check_attention(run: Run, layout: Layout) -> None:
    """Refuses layouts under which devices would not have the keys that their queries need."""
    (_, pos, heads, head_dim), (_, _, kv_heads, key_dim) = layout.assign(QUERY), layout.assign(KEY)
    if (head_dim or key_dim) and mode_of(layout.mesh) == "explicit":  # a compiler adds up the parts of scores
        raise UserError(
            "Attention needs each head whole: head_dim cannot be sliced in use.",
            seen=f"head_dim over {'/'.join(head_dim or key_dim)}",
            where="layout.compute.head_dim",
            fix="use --layout.compute.head_dim '', and slice heads instead",
        )
    kinds = dict(layout.context)
    found = [KINDS.index(kinds.get(axis, "gather")) for axis in pos]
    if found != sorted(found):
        wanted = [axis for _, axis in sorted(zip(found, pos, strict=True))]
        raise UserError(
            "Positions must be sliced over ring axes first, then over gather axes, then over exchange axes.",
            seen=f"pos over {'/'.join(f'{axis} ({KINDS[kind]})' for kind, axis in zip(found, pos, strict=True))}",
            where="layout.compute.pos",
            fix=f"use --layout.compute.pos {'/'.join(wanted)}",
        )
    ways = lambda axes: math.prod(layout.mesh.shape[axis] for axis in axes)
    exchanged = tuple(axis for axis, kind in zip(pos, found, strict=True) if KINDS[kind] == "exchange")
    sliced = [axis for axis in pos if axis not in exchanged]
    pieces, length = 2 * ways(sliced), run.data.sequence_length
    if sliced and length % pieces:
        near = [n for n in (length // pieces * pieces, -(-length // pieces) * pieces) if n]
        raise UserError(
            "A sequence must split into two equal pieces for each device along the mesh axes of positions.",
            seen=f"data.sequence_length={length} over {sizes_of(layout, sliced)}, {pieces} pieces",
            where="data.sequence_length",
            fix=f"use --data.sequence_length {' or '.join(map(str, near))}",
        )
    if run.model.heads % ways((*heads, *exchanged)):
        raise UserError(
            "The mesh axes of heads and of exchanged positions must together divide the heads.",
            seen=f"model.heads={run.model.heads} over {sizes_of(layout, (*heads, *exchanged))}",
            where=f"layout.{exchanged[-1]}",
            fix=f"use --layout.{exchanged[-1]} ring or gather, or sizes of these mesh axes that divide the heads",
        )
    kv_heads = tuple(axis for axis in kv_heads if axis not in pos)
    if kv_heads == heads and run.model.kv_heads % ways((*kv_heads, *exchanged)) == 0:
        kv_heads += exchanged
    heads += exchanged
    each, shared = run.model.heads // ways(heads), run.model.heads // run.model.kv_heads
    whole = each % shared == 0 or shared % each == 0
    if kv_heads != heads and (kv_heads != heads[: len(kv_heads)] or not whole):
        entry = f"use --layout.compute.kv_heads {'/'.join(heads) or repr('')}"
        entry += "" if whole or not heads else f", with --model.kv_heads {ways(heads)}"
        if whole and run.model.kv_heads % ways(heads):  # without an entry they are as whole as they must be
            entry = "leave layout.compute.kv_heads out"
        raise UserError(
            "Key heads must be sliced like query heads, or less if each device's query heads read whole key heads.",
            seen=f"heads={run.model.heads} over {sizes_of(layout, heads) or 'nothing'}, "
            f"kv_heads={run.model.kv_heads} over {sizes_of(layout, kv_heads) or 'nothing'}",
            where="layout.compute.kv_heads",
            fix=entry,
        )


def sizes_of(layout: Layout, axes: Sequence[str]) -> str:
    """Mesh axes with their sizes, for messages."""
    return " x ".join(f"{axis}={layout.mesh.shape[axis]}" for axis in axes)


def _check_stages(run: Run, layout: Layout) -> None:
    """Refuses parts of a batch that the stages of a pipeline could not work on side by side."""
    (axes,) = layout.even().assign(("layers",))
    if len(axes) > 1:
        raise UserError(
            "A pipeline can use only one mesh axis.",
            seen=f"layers over {'/'.join(axes)}",
            where="layout.compute.layers",
            fix=f"use --layout.compute.layers {axes[0]}",
        )
    if not axes:
        return
    stages, groups = layout.mesh.shape[axes[0]], layout.pipeline_groups
    (over,) = layout.without(axes[0]).assign(("batch",))
    for rows in (entry.size // run.parts for entry in run.batch_sizes()):
        able = [n for n in range(1, rows + 1) if rows % (n * math.prod(layout.mesh.shape[a] for a in over)) == 0]
        count = layout.pipeline_microbatches
        if count is not None and count not in able:
            raise UserError(
                "The number of pipeline microbatches must divide each device's share of the batch.",
                seen=f"pipeline_microbatches={count} of batch_size={rows}"
                + (f" in each of {run.parts} microbatches" if run.parts > 1 else "")
                + (f", over {sizes_of(layout, over)}" if over else ""),
                where="layout.pipeline_microbatches",
                fix=f"use {_one_of(able)}, or leave it out",
            )
        count = run.parts * microbatches_of(layout, axes[0], rows)
        if groups > 1 and count % stages:
            raise UserError(
                "With several groups of layers on a stage, the stages must divide the pipeline's microbatches.",
                seen=f"{count} parts of a batch through {axes[0]}={stages}, pipeline_groups={groups}",
                where="layout.pipeline_microbatches",
                fix=f"use a multiple of {stages}, or --layout.pipeline_groups 1",
            )


def _check_permutes(run: Run, layout: Layout, declared: Sequence[Parameter]) -> None:
    """Refuses permutes that some stage would not take part in: a permute is one of all devices."""
    kinds, (_, pos, _, _) = dict(layout.context), layout.assign(QUERY)
    window = getattr(run.model, "window", None)
    near = window is not None and window < run.data.sequence_length  # a gather then asks only its neighbours, too
    rings = [f"layout.{axis}" for axis in pos if kinds.get(axis, "gather") in ("ring", *["gather"] * near)]
    permutes = [*rings, *(["layout.overlap"] if layout.overlap else [])]
    first = [p.path for p in declared if "heads" in p.names and not p.is_stacked]
    others = "exchange" if near else "exchange or gather"
    kind = " ".join(f"--{ring} {others if len(rings) == 1 else 'exchange'}" for ring in rings)
    if permutes and layout.uneven:
        fix = kind + (" without --layout.overlap" if layout.overlap else "") if rings else "--layout.overlap ''"
        raise UserError(
            "Rings in a pipeline need the same number of layers on every stage and in every group.",
            seen=f"stages and groups that do not divide the layers, with {' and '.join(permutes)}"
            + (f" under a window of {window}" if near and rings else ""),
            where=permutes[0],
            fix=f"use {fix}, or stages that divide the layers",
        )
    if rings and first:
        raise UserError(
            "Layers before the pipeline run on its first stage only, and cannot use a ring.",
            seen=f"`{first[0]}`, with {' and '.join(rings)} a ring",
            where=rings[0],
            fix=f"use {kind}, or --mesh.stage 1",
        )


def _one_of(numbers: Sequence[int]) -> str:
    *some, last = map(str, numbers)
    return f"{', '.join(some)} or {last}" if some else last
