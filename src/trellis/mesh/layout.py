"""A layout: a mesh and two maps from axis names to mesh axes. It is where parallelism is chosen."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from trellis._compat import mapped_over
from trellis.choices import is_count
from trellis.mesh.meshes import MeshError, mesh_text
from trellis.notation import spec_of
from trellis.notation.binding import check_divides
from trellis.notation.shape import is_name
from trellis.notation.state import mode_of

# The layout in force is part of what JAX keys its traces by: a function that was traced under one layout is traced
# again under another, by `jit`, `checkpoint`, `cond`, `scan` and every other transformation.
_current = jax.make_user_context(None)

# The dimension whose positions context parallelism deals out over devices, and its name for keys.
POSITIONS, KEY_POSITIONS = "pos", "key_pos"

Axes = tuple[str, ...]


Entries = tuple[tuple[str, Axes], ...]


def read_axes(axes: "str | Sequence[str] | None") -> Axes:
    """The mesh axes of an entry, major to minor: `"data"`, `"data/model"`, `("data", "model")`, or None for none."""
    if axes is None:
        return ()
    return tuple(axes.split("/")) if isinstance(axes, str) and axes else tuple(axes)


def with_slashes(axes: str, known: Collection[str]) -> str | None:
    """Several mesh axes as the notation writes them, from a text with spaces or commas between them; else None.

    >>> with_slashes("data, model", ["data", "model"]), with_slashes("modle", ["data", "model"])
    ('data/model', None)
    """
    several = axes.replace(",", " ").split()
    return "/".join(several) if len(several) > 1 and {*several} <= {*known} else None


def _read(entries: "Mapping[str, str | Sequence[str] | None] | Entries", mesh: Mesh, which: str) -> Entries:
    if not isinstance(entries, Mapping | tuple | list):
        raise MeshError(
            f"a layout must map names to axes of its mesh, got {which}={entries!r}, in Layout: write "
            f"{which}={{'batch': 'data'}}"
        )
    items = _pairs(entries, which, "{'batch': 'data'}")
    read = tuple((str(getattr(name, "name", name)), _read_entry(name, axes, which)) for name, axes in items)
    for name, axes in read:
        for axis in axes:
            if axis not in mesh.axis_names:
                meant = with_slashes(axis, mesh.axis_names)
                fix = f"write '{meant}'" if meant else f"use one of these, or add '{axis}' to make_mesh"
                raise MeshError(
                    f"a layout can only use axes of its mesh, got '{name}: {axis}' in {which}, where the mesh has "
                    f"{', '.join(mesh.axis_names)}: {fix}"
                )
        if repeated := [axis for axis in axes if axes.count(axis) > 1]:
            raise MeshError(
                f"a name cannot be sliced over a mesh axis twice, got '{name}: {'/'.join(axes)}' in {which}, in "
                f"Layout: remove one '{repeated[0]}'"
            )
    return read


def _pairs(entries: "Mapping | Sequence", which: str, example: str) -> tuple[tuple, ...]:
    """The entries of a map, which may be written as pairs."""
    items = tuple(entries.items() if isinstance(entries, Mapping) else entries)
    if other := [item for item in items if not (isinstance(item, tuple | list) and len(item) == 2)]:
        raise MeshError(f"a layout's {which} must be a map, got {other[0]!r} in it, in Layout: write {which}={example}")
    return tuple(map(tuple, items))


def _by_name(entries: Any) -> dict[str, Axes]:
    """The mesh axes of each name: of several entries for one the first counts."""
    return dict(reversed(entries))


def _read_entry(name, axes, which: str) -> Axes:
    several = isinstance(axes, Sequence) and all(isinstance(axis, str) for axis in axes)
    if not is_name(str(getattr(name, "name", name))) or not (axes is None or several):
        raise MeshError(
            f"a layout must map names to axes of its mesh, got {name!r}: {axes!r} in {which}, in Layout: write a "
            "name, and 'data', 'data/model' or None"
        )
    return read_axes(axes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which named axes are sliced over which mesh axes, at rest and in use.

    Earlier entries win: if two names of one operation map to the same mesh
    axis, the first entry gets it and the other name stays whole. So
    `compute={"batch": "data", "mlp": "model", "pos": "model"}` is Megatron's
    sequence parallelism: `pos` is sliced wherever `mlp` is absent.

    Attributes:
        mesh: the devices.
        params: slices of parameters and optimizer state at rest.
        compute: slices of everything in use.
        strict: refuse operations that would gather a sliced axis on their own
            (sort, cumsum, top_k, ...) instead of gathering it.
        gather: "joint" gathers a weight over all its mesh axes in one
            collective, "per_axis" over one mesh axis after the other.
        overlap: names whose products hide their communication, in rings along
            the mesh axis that `compute` gives the name. These are products into
            the name from an operand that the same mesh axis slices along
            another name (an all-gather), and products that sum over the name
            into such a result (a reduce-scatter). The same bytes move, in
            permutes between parts of the product. Other products stay as they are.
        context: how attention reaches the keys of other slices, for each mesh axis that slices positions: "gather" (the
            default for axes not listed) gathers them, "ring" passes them from device to device, and "exchange"
            exchanges slices of positions for slices of heads. An array's positions are sliced over axes of a ring
            first, then over those that gather, then over those that exchange.
        uneven: names of layers that the stages of a pipeline do not have equally many of: only the pipeline uses their
            entry in `compute`, to deal them out, and elsewhere they are whole.
        dealt: mesh axes over which positions are dealt out, so that each slice has equal work under a causal mask
            (see `trellis.mesh.dealing`). `from_numpy` deals out what comes in; if positions are in natural order,
            attention deals them out by itself, and gathers them again.
        pipeline_microbatches: if `compute` spreads layers over a mesh axis, the
            number of parts that the batch is cut into, which follow each other
            through the stages; None: the most that divide it, at most 4 a stage.
        pipeline_groups: how many groups of layers each stage has in a training step: a part of the batch goes around
            the stages that many times.
        mapped: the mesh axes that the program is mapped over (see `without`), one entry for each map; an empty one for
            a map over a name that is whole, in which JAX refused copies.
        cut: names of which the program sees only a part, such as the batch
            within a pipeline: nothing may be computed along them.
        sums: whether sums along `cut` may be made all the same: what a model measures of its parts is added up.

    Raises:
        MeshError: an entry names an axis that the mesh does not have, or `overlap` a name that `compute` slices over
            none or several; or a pipeline's number of microbatches or groups is not 1 or more.
    """

    mesh: Mesh
    params: "Entries | Mapping[str, str | Sequence[str] | None]" = ()
    compute: "Entries | Mapping[str, str | Sequence[str] | None]" = ()
    strict: bool = dataclasses.field(default=False, kw_only=True)
    gather: str = dataclasses.field(default="joint", kw_only=True)
    overlap: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    context: "tuple[tuple[str, str], ...] | Mapping[str, str]" = dataclasses.field(default=(), kw_only=True)
    pipeline_microbatches: int | None = dataclasses.field(default=None, kw_only=True)
    pipeline_groups: int = dataclasses.field(default=1, kw_only=True)
    uneven: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    dealt: Axes = dataclasses.field(default=(), kw_only=True)
    mapped: tuple[Axes, ...] = dataclasses.field(default=(), kw_only=True)
    cut: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    sums: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise MeshError(f"a layout needs a mesh, got {self.mesh!r}, in Layout: pass make_mesh(data=-1)")
        if self.gather not in ("joint", "per_axis"):
            raise MeshError(
                f"a layout's gather must be 'joint' or 'per_axis', got gather={self.gather!r}, in Layout: pass one of "
                "the two"
            )
        if not isinstance(self.strict, bool):
            raise MeshError(f"a layout's strict must be True or False, got strict={self.strict!r}, in Layout: pass one")
        for field, kinds, example in (
            ("context", (Mapping, tuple, list), "context={'context': 'exchange'}"),
            ("dealt", (str, tuple, list), "dealt='context'"),
            ("overlap", (str, tuple, list), "overlap=('mlp', 'heads')"),
            ("uneven", (str, tuple, list), "uneven=('layers',)"),
        ):
            if not isinstance(getattr(self, field), kinds):
                raise MeshError(
                    f"a layout's {field} must name mesh axes or dimensions, got {field}={getattr(self, field)!r}, in "
                    f"Layout: write {example}"
                )
        read = {
            "params": _read(self.params, self.mesh, "params"),
            "compute": _read(self.compute, self.mesh, "compute"),
            "overlap": (self.overlap,) if isinstance(self.overlap, str) else tuple(self.overlap),
            "context": _pairs(self.context, "context", "{'context': 'exchange'}"),
            "dealt": (self.dealt,) if isinstance(self.dealt, str) else tuple(self.dealt),
            "uneven": (self.uneven,) if isinstance(self.uneven, str) else tuple(self.uneven),
        }
        for field, value in read.items():
            object.__setattr__(self, field, value)  # only here, where the frozen value is still being made
        self._check_overlap()
        self._check_context()
        self._check_pipeline()
        if unknown := [axis for axis in read["dealt"] if axis not in self.mesh.axis_names]:
            raise MeshError(
                f"positions can only be dealt out over axes of the mesh, got dealt '{unknown[0]}' where the mesh has "
                f"{', '.join(self.mesh.axis_names)}, in Layout: use one of these"
            )

    def _check_context(self) -> None:
        kinds = ("gather", "ring", "exchange")
        for axis, kind in self.context:
            if axis not in self.mesh.axis_names or kind not in kinds:
                known = ", ".join(self.mesh.axis_names)
                raise MeshError(
                    f"a layout's context must map axes of the mesh to one of {', '.join(kinds)}, got context '{axis}: "
                    f"{kind}' where the mesh has {known}, in Layout: correct it"
                )

    def _check_pipeline(self) -> None:
        for field in ("pipeline_microbatches", "pipeline_groups"):
            count = getattr(self, field)
            chosen = count is None and field == "pipeline_microbatches"
            if not (chosen or is_count(count)):
                raise MeshError(
                    f"a layout's {field} must be a whole number of 1 or more, got {field}={count!r}, in Layout: write "
                    "such a number, or leave it out"
                )

    def _check_overlap(self) -> None:
        sliced = _by_name(self.compute)
        for name in self.overlap:
            axes = [a for a in sliced.get(name) or () if self.mesh.shape[a] > 1]
            if name not in sliced or len(axes) > 1:
                raise MeshError(
                    f"an overlapped name must be sliced over one mesh axis, got overlap '{name}' where compute has "
                    f"'{name}: {'/'.join(axes) or 'nothing'}', in Layout: "
                    + ("choose one of these axes" if axes else f"add '{name}' to compute, or remove it from overlap")
                )

    def assign(self, names: Sequence[str], which: str = "compute") -> tuple[Axes, ...]:
        """The mesh axes of each name, when these names meet in one array or operation."""
        return _assign(self, tuple(names), which)

    def on(self, mesh: Mesh) -> "Layout":
        """The same layout on another mesh with these axes."""
        return dataclasses.replace(self, mesh=mesh)

    def even(self) -> "Layout":
        """The same layout for layers that have been dealt out to stages, with equally many rows for each."""
        return dataclasses.replace(self, uneven=())

    def without(self, *axes: str) -> "Layout":
        """The same maps without some mesh axes: the layout of a program that is mapped over them."""
        drop = lambda entries: tuple((name, tuple(a for a in mine if a not in axes)) for name, mine in entries)
        return dataclasses.replace(
            self,
            params=drop(self.params),
            compute=drop(self.compute),
            overlap=tuple(n for n in self.overlap if not set(_by_name(self.compute)[n]) & set(axes)),
            mapped=(*self.mapped, axes) if axes else self.mapped,
        )

    def with_dealt(self, axes: Sequence[str]) -> "Layout":
        """The same layout for arrays whose positions are dealt out over mesh axes (over none: in natural order)."""
        return dataclasses.replace(self, dealt=tuple(axes))

    @property
    def axes_dealt(self) -> Axes:
        """The mesh axes over which positions are dealt out, without those of one device."""
        return tuple(axis for axis in self.dealt if self.mesh.shape[axis] > 1)

    @property
    def slices_dealt(self) -> int:
        """The number of slices over which positions are dealt out; 1 if they are in natural order."""
        return math.prod(self.mesh.shape[axis] for axis in self.dealt)

    def with_compute(self, entries: Mapping[str, "str | Sequence[str] | None"]) -> "Layout":
        """The same layout with further entries of `compute`, before those it has."""
        return dataclasses.replace(self, compute=(*_read(entries, self.mesh, "compute"), *self.compute))

    def spec(self, names: Sequence[str], which: str = "compute") -> PartitionSpec:
        """What `assign` gives, as a JAX `PartitionSpec`."""
        return spec_of(self.assign(names, which))

    def sharding(self, names: Sequence[str], which: str = "compute") -> NamedSharding:
        """What `assign` gives, as a sharding on this layout's devices."""
        return NamedSharding(self.mesh, self.spec(names, which))

    def check(self, names: Sequence[str], sizes: Sequence[int], which: str = "compute") -> None:
        """Refuses sizes that do not divide over their mesh axes.

        Raises:
            NotationError: with both sizes, and the nearest sizes that work.
        """
        for name, size, axes in zip(names, sizes, self.assign(names, which), strict=True):
            check_divides(name, size, axes, self.mesh.shape, f"'{'/'.join((name, *axes))}'")

    def __enter__(self) -> "Layout":
        with contextlib.ExitStack() as stack:
            if jax.sharding.get_abstract_mesh() != self.mesh.abstract_mesh:
                stack.enter_context(self._begun())
            stack.enter_context(_current(self))
            _entered.stacks = [*getattr(_entered, "stacks", []), (self, stack.pop_all())]
        return self

    def _begun(self) -> contextlib.AbstractContextManager:
        """Puts this layout's mesh in force.

        Raises:
            MeshError: within what is compiled, whose mesh is another.
        """
        try:
            return jax.set_mesh(self.mesh)
        except ValueError as error:
            if "outside of `jax.jit`" not in str(error):
                raise
            here = jax.sharding.get_abstract_mesh()
            around = "none" if here.empty else f"({mesh_text(here)})"
            raise MeshError(
                "a layout inside a compiled function must have the mesh in force around it, got a layout of "
                f"({mesh_text(self.mesh)}) where that is {around}, in `with layout:`: enter the layout around the call"
            ) from error

    def __exit__(self, *exception) -> None:
        layout, stack = _entered.stacks.pop()
        stack.close()
        if layout is not self:
            raise MeshError(
                f"the layout that began last must end first, got the end of one of ({mesh_text(self.mesh)}) inside of "
                f"one of ({mesh_text(layout.mesh)}), in `with layout:`: let no generator or coroutine yield inside of "
                "it, since what runs in the meantime is under its layout, too"
            )


_entered = threading.local()


def current_layout() -> Layout | None:
    """The layout of the innermost `with layout:`, or None.

    Inside a map over mesh axes, it is without them, even in the backward rule of a `jax.custom_vjp`, which JAX runs
    under the layout outside the map.
    """
    layout = _current.value
    if layout is None:
        return None
    axes = mapped_over().difference(*layout.mapped)
    return _inside(layout, tuple(a for a in layout.mesh.axis_names if a in axes)) if axes else layout


@contextlib.contextmanager
def without_layout() -> Generator[None]:
    """Traces what is inside without a layout or a mesh, whatever is in force."""
    with _current(None), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def is_dealt(name: str) -> bool:
    """Whether positions of this name (`pos`, or `key_pos` for keys) are dealt out here (`Layout.dealt`)."""
    layout = current_layout()
    if layout is None or not layout.dealt or mode_of(jax.sharding.get_abstract_mesh()) == "manual":
        return False
    return name in (POSITIONS, KEY_POSITIONS)


@functools.lru_cache(maxsize=1024)
def _inside(layout: Layout, axes: Axes) -> Layout:
    return layout.without(*axes)


@functools.lru_cache(maxsize=65536)
def _assign(layout: Layout, names: tuple[str, ...], which: str) -> tuple[Axes, ...]:
    taken: dict[str, Axes] = {}
    used: set[str] = set()
    for name, axes in getattr(layout, which):
        if name in names and name not in taken and (which == "params" or name not in layout.uneven):
            mine = tuple(a for a in axes if a not in used and layout.mesh.shape[a] > 1)
            taken[name] = mine
            used.update(mine)
    return tuple(taken.get(name, ()) for name in names)
