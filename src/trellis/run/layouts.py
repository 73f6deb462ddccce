"""Layouts by name: which axes are sliced over which mesh axes, for the usual kinds of parallelism."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from trellis.choices import check_choices
from trellis.cores import usable_cores
from trellis.errors import UserError, did_you_mean
from trellis.frozen import FrozenMap
from trellis.mesh import Layout, make_mesh
from trellis.mesh.layout import with_slashes
from trellis.mesh.platform import are_cpus
from trellis.run.schema import at_least

# Names that only activations have.
_ACTIVATIONS = ("batch", "pos", "key_pos")
# A model may have fewer of these than a mesh axis has devices: grouped queries share key and value heads.
_FEW = "kv_heads"
_STACK = "layers"
# What FSDP slices, and what it slices instead if there are enough of them.
_WIDTH, _MANY = "embed", "experts"

Preset = Literal[
    "auto", "single", "data", "fsdp", "expert", "tensor", "fsdp_tensor", "fsdp_tensor_sequence", "context", "hybrid"
]

Kind = Literal["ring", "gather", "exchange"]
# In the order of the mesh axes that slice positions.
KINDS: tuple[Kind, ...] = get_args(Kind)

_DATA = "data/data_y/data_z"
# Rings come first among slices of positions. Parameters are in the order of the mesh, in which sums are scattered.
_CONTEXT, _CONTEXT_AT_REST = "context/context_y", "context_y/context"
_EXPERT = "expert_y/expert"
_BATCH = f"replica/{_DATA}/{_EXPERT}/stage"
_LAYERS = {"layers": "stage"}
_TENSOR = {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}
_EXPERTS = {"experts": _EXPERT}
# Parameters that lead from a latent to heads have these names instead of the stream's width.
_LATENTS = ("q_latent", "kv_latent")

# Maps at rest and in use. Mesh axes that a mesh does not have, or has with size 1, drop out; if two names in one array
# want the same mesh axis, the earlier entry gets it. So `pos: .../model` at the end slices positions over `model`
# exactly where there are no heads and no feed-forward width to slice: sequence parallelism.
_KINDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "data": ({}, {"batch": _BATCH}),
    "fsdp": ({**_EXPERTS, "embed": _DATA}, {**_EXPERTS, "batch": _BATCH}),
    "expert": (_EXPERTS, {**_EXPERTS, "batch": _BATCH}),
    "tensor": (_TENSOR, {"batch": _BATCH, **_TENSOR}),
    "fsdp_tensor": ({**_EXPERTS, **_TENSOR, "embed": _DATA}, {**_EXPERTS, "batch": _BATCH, **_TENSOR}),
    "fsdp_tensor_sequence": (
        {**_EXPERTS, **_TENSOR, "embed": _DATA},
        {**_EXPERTS, "batch": _BATCH, **_TENSOR, "pos": "model"},
    ),
    "context": ({"embed": f"{_DATA}/{_CONTEXT_AT_REST}"}, {"batch": _BATCH, "pos": _CONTEXT}),
    "hybrid": (
        {**_EXPERTS, **_TENSOR, "embed": f"{_DATA}/{_CONTEXT_AT_REST}"},
        {**_EXPERTS, "batch": _BATCH, **_TENSOR, "pos": f"{_CONTEXT}/model"},
    ),
}
for _params, _ in _KINDS.values():
    _params.update({name: _params["embed"] for name in _LATENTS if "embed" in _params})
# Each of them also slices the layers over the stages of a pipeline, ahead of the batch. An array without layers leaves
# these axes to the batch, and one without a batch to slice, as for the microbatch whose loss all stages compute, to the
# vocabulary.
PRESETS: dict[str, tuple[dict[str, str], dict[str, str]]] = {"single": ({}, {})} | {
    name: ({**_LAYERS, **params}, {**_LAYERS, **compute, "vocab": "model/stage" if "vocab" in compute else "stage"})
    for name, (params, compute) in _KINDS.items()
}
PRESETS["auto"] = PRESETS["hybrid"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """Devices along each mesh axis. They multiply to the number of devices; one may be -1 and takes what is left."""

    replica: int = 1
    """Whole copies of the model, across slow links: gradients are summed over them once a step. Raise it across hosts
    or slices with slow links."""
    stage: int = 1
    """Stages of a pipeline: slices of the layers, and outside the layers of the batch. Raise it if a model does not fit
    otherwise and links are slow."""
    data: int = -1
    """Slices of the batch; with FSDP, of parameters too. Set it to divide devices between the batch and other axes."""
    data_y: int = 1
    """More slices like those of data, along a second dimension of a TPU's torus. Set it on TPU slices, to the second
    side of the slice."""
    data_z: int = 1
    """More of them along a third dimension. Set it on TPU slices, to the third side of the slice."""
    expert: int = 1
    """Slices of a layer's experts, and of the batch. Raise it for mixtures of experts that do not fit one device."""
    expert_y: int = 1
    """More of the same across slower links: a token crosses them once for all its experts on the other side. Raise it
    if mesh.expert alone would cross hosts."""
    context: int = 1
    """Slices of a sequence's positions. Raise it for sequences whose activations do not fit one device."""
    context_y: int = 1
    """More of the same across slower links, or along a second dimension of a TPU's torus. Raise it if mesh.context
    alone would cross hosts."""
    model: int = 1
    """Slices of heads, feed-forward width and vocabulary: tensor parallelism. Raise it if FSDP's gathers take longer
    than its products: large models, small batches."""

    def __post_init__(self):
        check_choices(self)
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(
                    "The size of a mesh axis must be 1 or more, or -1.",
                    seen=f"{name}={size}",
                    where=name,
                    fix="use 1 or more",
                )
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            seen = ", ".join(f"{name}=-1" for name in free)
            fix = f"give {' or '.join(free)} a size"
            raise UserError(
                "At most one mesh axis can be -1, which takes the remaining devices.",
                seen=seen,
                where=free[-1],
                fix=fix,
            )

    def resolve(self, num_devices: int) -> dict[str, int]:
        """The size of every axis on this many devices.

        >>> MeshSizes(model=2).resolve(8)["data"]
        4

        Raises:
            UserError: the sizes do not multiply to the number of devices.
        """
        sizes = dataclasses.asdict(self)
        known = math.prod(size for size in sizes.values() if size != -1)
        free = next((name for name, size in sizes.items() if size == -1), None)
        if num_devices % known or (free is None and known != num_devices):
            shown = " ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
            raise UserError(
                "The sizes of the mesh axes must multiply to the number of devices.",
                seen=f"{shown or 'all sizes 1'} ({'a multiple of ' if free else ''}{known}), devices={num_devices}",
                where="mesh",
                fix=f"use sizes that multiply to {num_devices}, or --devices {known} if a CPU simulates them",
            )
        return {name: num_devices // known if name == free else size for name, size in sizes.items()}


AXES = tuple(field.name for field in dataclasses.fields(MeshSizes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """What is sliced over which mesh axis. Mesh axes are written as in the notation: data, or data/model."""

    preset: Preset = "auto"
    """A pair of maps. auto slices parameters over data (FSDP), widths over model (tensor and sequence), positions over
    context; hybrid is the same with a replica on each host. On the two processors of a CPU auto is data, which is
    faster there; each keeps a copy of the state. Key and value heads that their mesh axis does not divide stay whole;
    FSDP slices experts by number if that is a multiple of its devices, and by width otherwise. Choose another if a plan
    says that it is faster; `trellis plan --search` tries them."""
    params: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap)
    """Entries that replace the preset's for parameters at rest: the name of an axis, and mesh axes or nothing. Add
    entries to slice what the preset leaves whole."""
    compute: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap)
    """Entries that replace the preset's for everything in use. Add entries to slice what the preset leaves whole."""
    gather: Literal["joint", "per_axis"] = "joint"
    """Whether a parameter sliced over several mesh axes is gathered over all of them at once or one after the other.
    Choose per_axis for FSDP over two sides of a TPU's torus."""
    strict: bool = False
    """Refuse operations that would gather a sliced axis on their own (sort, cumsum, top_k). Set it to true to find
    where an operation gathers without being asked."""
    mode: Literal["explicit", "auto"] = "explicit"
    """What places communication: the types, or the compiler. In auto, attention, experts and the loss still go as the
    types say, since no compiler can slice their kernels, exchanges and chunks. Choose auto to compare with what the
    compiler places by itself."""
    context: Kind = "ring"
    """How attention reaches keys of other slices along mesh.context: ring passes keys and values from device to device
    beside the kernels, gather gathers them, exchange swaps slices of positions for slices of heads and back. Choose
    exchange if there are many more heads than devices, gather for short sequences."""
    context_y: Kind | None = None
    """The same along mesh.context_y; null takes that of mesh.context. Rings come first, exchanges last. Set it if the
    two axes have links of different speed."""
    overlap: tuple[Literal["mlp", "heads"], ...] = ()
    """Products that hide their communication, in rings: mlp for those into and out of the feed-forward width, heads for
    the query, key, value and output projections. Positions must be sliced over the same mesh axis. Name both if tensor
    parallelism waits for its links."""

    pipeline_microbatches: int | None = None
    """With mesh.stage: parts of the batch that follow each other through the stages. null takes the most that divide
    the batch, at most 4 a stage. More of them leave stages idle for less of the time. Raise it if stages wait."""
    pipeline_groups: int = 1
    """With mesh.stage: groups of layers on each stage. Each part of the batch goes around the stages this many times,
    which divides the share of the time that stages are idle by this number and multiplies what moves between them by
    it. Raise it if stages wait and the batch has no more parts."""

    def __post_init__(self):
        check_choices(self)
        for which in ("params", "compute"):
            for name, axes in getattr(self, which).items():
                for axis in filter(None, axes.split("/")):
                    if axis not in AXES:
                        meant = with_slashes(axis, AXES)
                        raise UserError(
                            "A layout entry must map a name to mesh axes.",
                            seen=f"{name}: {axes}",
                            where=f"{which}.{name}",
                            fix=f"write {meant}" if meant else did_you_mean(axis, AXES),
                        )
        if self.overlap:
            self._check_overlap()
        if self.pipeline_microbatches is not None and self.pipeline_microbatches < 1:
            raise UserError(
                "`pipeline_microbatches` must be 1 or more.",
                seen=f"pipeline_microbatches={self.pipeline_microbatches}",
                where="pipeline_microbatches",
                fix="use 1 or more, or null to have it chosen",
            )
        at_least(1, pipeline_groups=self.pipeline_groups)
        if KINDS.index(self.context) > KINDS.index(self.kinds["context_y"]):
            raise UserError(
                "`context` cannot come after `context_y` in the order ring, gather, exchange.",
                seen=f"context={self.context}, context_y={self.context_y}",
                where="context_y",
                fix=f"use --layout.context {self.context_y} --layout.context_y {self.context}",
            )

    @property
    def kinds(self) -> dict[str, Kind]:
        """How attention reaches the keys of other slices, for each mesh axis of positions."""
        return {"context": self.context, "context_y": self.context_y or self.context}

    def _check_overlap(self) -> None:
        if self.mode == "auto":
            raise UserError(
                "Overlapped products need layout mode explicit.",
                seen=f"overlap={', '.join(self.overlap)} with mode=auto, where the compiler places communication",
                where="overlap",
                fix="use --layout.mode explicit",
            )
        compute = self.maps()[1]
        for name in self.overlap:
            mine = compute.get(name, ())
            if not mine:
                raise UserError(
                    "The name of an overlapped product must be sliced in use.",
                    seen=f"overlap={name} with the preset {self.preset}, which slices `{name}` over no mesh axis",
                    where="overlap",
                    fix=f"use --layout.preset fsdp_tensor_sequence, or --layout.compute.{name} model",
                )
            if not any(axis in compute.get(other, ()) for axis in mine for other in ("pos", "embed")):
                raise UserError(
                    "Overlap needs `pos` or `embed` sliced in use over the mesh axis of the product.",
                    seen=f"overlap={name} with the preset {self.preset}: activations beside `{name}` are whole along "
                    f"{'/'.join(mine)}",
                    where="overlap",
                    fix=f"use --layout.preset fsdp_tensor_sequence, or --layout.compute.pos {'/'.join(mine)}",
                )

    def used(self) -> set[str]:
        """The mesh axes that slice something in use: devices along any other axis repeat each other's work."""
        return {axis for axes in self.maps()[1].values() for axis in axes}

    def maps(self) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
        """The preset's maps, for parameters at rest and for arrays in use, with this choice's entries in them.

        >>> LayoutChoice(preset="tensor", compute={"pos": "model"}).maps()[1]["pos"]
        ('model',)
        """
        own = (self.params, self.compute)
        both = [{**preset, **mine} for preset, mine in zip(PRESETS[self.preset], own, strict=True)]
        params, compute = ({name: tuple(filter(None, axes.split("/"))) for name, axes in m.items()} for m in both)
        return params, compute


def make_layout(
    mesh: MeshSizes, choice: LayoutChoice, devices: Sequence[Any], axes: Mapping[str, int] | None = None
) -> Layout:
    """The layout of a run on devices.

    Args:
        mesh: devices along each mesh axis.
        choice: what is sliced over which.
        devices: real, simulated or only described.
        axes: the lengths of the model's axes, by name. A preset leaves key and value heads whole if its mesh axes do
            not divide them, and slices experts by number if FSDP's mesh axes divide that. None: not known.

    Raises:
        UserError: the mesh does not fit the devices, the layout leaves one of its axes without work, it has an entry
            for an axis that the model does not have, or the compiler would place what it gets wrong.
    """
    if axes is not None:
        check_names(choice, axes, _ACTIVATIONS)
    if choice.preset == "hybrid" and mesh.replica == 1:
        mesh = _with_a_copy_on_each_host(mesh, devices)
    sizes = {name: size for name, size in mesh.resolve(len(devices)).items() if size > 1} or {"data": 1}
    if choice.preset == "auto" and list(sizes) == ["data"] and _are_halves_of_a_cpu(devices):
        choice = dataclasses.replace(choice, preset="data")
    params, compute = choice.maps()
    if idle := [name for name, size in sizes.items() if size > 1 and name not in choice.used()]:
        kept = any(idle[0] in axes for axes in params.values())
        but = ", which slices only parameters at rest over it" if kept else ""
        smaller = f"--mesh.{idle[0]} 1, " if mesh.data == -1 and idle[0] != "data" else ""  # `data` takes its devices
        helps = idle[0] in dataclasses.replace(choice, preset="auto").used()
        auto = "--layout.preset auto, or " if helps else "or " if smaller else ""
        raise UserError(
            "Every mesh axis must slice something in use: otherwise, its devices repeat each other's work.",
            seen=f"{idle[0]}={sizes[idle[0]]} with the preset {choice.preset}{but}",
            where=f"mesh.{idle[0]}",
            fix=f"use {smaller}{auto}an entry such as --layout.compute.batch {idle[0]}",
        )
    at_rest, in_use = ({n: [a for a in over if a in sizes] for n, over in m.items()} for m in (params, compute))
    for own, found in ((choice.params, at_rest), (choice.compute, in_use)):
        ways = math.prod(sizes[axis] for axis in found.get(_FEW, ()))
        if axes is not None and _FEW not in own and axes.get(_FEW, 0) % ways:
            del found[_FEW]  # each device along the axis then has them all, and reads those of its query heads
    if axes is not None and _MANY in axes and _MANY in at_rest and _MANY not in choice.params:
        claimed = {axis for over in choice.params.values() for axis in over.split("/")}
        if not claimed.intersection(at_rest.get(_WIDTH, ())):
            at_rest[_MANY] = _with_width(at_rest, axes[_MANY], sizes)
    stage = [a for a in in_use.get(_STACK, ()) if a == "stage"]
    uneven = axes is not None and stage and axes.get(_STACK, 0) % (sizes["stage"] * choice.pipeline_groups)
    if uneven and _STACK not in choice.params and at_rest.pop(_STACK, None):
        at_rest[_WIDTH] = [*at_rest.get(_WIDTH, ()), *stage]  # a step then deals layers out to the stages
    params, compute = ({n: over for n, over in m.items() if over} for m in (at_rest, in_use))
    arranged = make_mesh(devices, axis_type=choice.mode, **sizes)
    overlap = [name for name in choice.overlap if name in compute]
    return Layout(
        arranged,
        params=params,
        compute=compute,
        gather=choice.gather,
        strict=choice.strict,
        overlap=overlap,
        context={axis: kind for axis, kind in choice.kinds.items() if axis in sizes},
        pipeline_microbatches=choice.pipeline_microbatches,
        pipeline_groups=choice.pipeline_groups,
        uneven=(_STACK,) if uneven else (),
    )


def _with_a_copy_on_each_host(mesh: MeshSizes, devices: Sequence[Any]) -> MeshSizes:
    """The mesh of the preset hybrid, in which the other axes have the devices of one host."""
    hosts = len({(getattr(d, "slice_index", 0), d.process_index) for d in devices})
    others = {name: size for name, size in dataclasses.asdict(mesh).items() if size != 1}
    each, known = len(devices) // hosts, math.prod(size for size in others.values() if size != -1)
    if hosts > 1 and (each % known or (-1 not in others.values() and each != known)):
        shown = " ".join(f"{name}={size}" for name, size in others.items()) or "all sizes 1"
        raise UserError(
            "With the preset hybrid, which has a replica on each host, other mesh axes must multiply to its devices.",
            seen=f"{shown}, {hosts} hosts of {each} devices",
            where="layout.preset",
            fix=f"use sizes that multiply to {each}, --mesh.replica with another number, or --layout.preset auto",
        )
    return dataclasses.replace(mesh, replica=hosts)


def _with_width(params: Mapping[str, list[str]], experts: int, sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes that slice experts at rest: those of the width as well, if all of them divide the experts.

    Whole experts that follow each other are gathered as they lie in memory. Slices of their widths are not: what is
    gathered along the last axis of a weight is all laid out anew before a kernel reads it, at each gather, and a width
    over many devices does not fill tiles. A gather over only some of the axes would use only their links.
    """
    over = [*params[_MANY], *params.get(_WIDTH, ())]
    return over if experts % math.prod(sizes[axis] for axis in over) == 0 else params[_MANY]


def _are_halves_of_a_cpu(devices: Sequence[Any]) -> bool:
    """Whether these are two devices of a CPU with two processors or more; with fewer, they rehearse a larger
    machine."""
    here = len({d.process_index for d in devices}) == 1
    return here and len(devices) == 2 <= usable_cores() and are_cpus(devices)


def check_names(choice: LayoutChoice, names: Iterable[str], activations: Iterable[str] = ()) -> None:
    """Refuses entries of a layout for axes that a model does not have.

    Args:
        choice: the layout.
        names: the names of all axes of the model's parameters.
        activations: the names that only activations have.

    Raises:
        UserError: an entry's name is not among them, or an entry at rest names an axis that no parameter has.
    """
    at_rest, in_use = {*names}, {*names, *activations}
    for which, known in (("params", at_rest), ("compute", in_use)):
        for name in getattr(choice, which):
            if name not in known:
                elsewhere = f"no parameter has it: use --layout.compute.{name}"
                raise UserError(
                    "A layout entry must name an axis of the model.",
                    seen=f"`{name}`",
                    where=f"layout.{which}.{name}",
                    fix=elsewhere if name in in_use else did_you_mean(name, known),
                )
