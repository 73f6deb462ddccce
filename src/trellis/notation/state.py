"""Where an array is: the sharding that its JAX type carries, read in one place for all three modes."""

import dataclasses
import typing

import jax
from jax.sharding import AxisType, NamedSharding

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The sharding in an array's type.

    Attributes:
        mode: "none" (no mesh), "explicit", "auto" or "manual".
        axes: for each dimension the mesh axes that slice it, major to minor. The type does not say which dimension a
            manual mesh axis slices: those are not here but in `varying`.
        pending: mesh axes with partial sums.
        copied: mesh axes with copies whose gradient is a pending sum.
        varying: manual mode: the mesh axes along which devices hold different values.
    """

    mode: typing.Literal["none", "explicit", "auto", "manual"]
    axes: tuple[Axes, ...]
    pending: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    varying: frozenset[str] = frozenset()

    @property
    def sliced(self) -> Axes:
        """The mesh axes that slice some dimension."""
        return tuple(axis for axes in self.axes for axis in axes)

    def words(self, names: typing.Iterable[object]) -> str:
        """In the notation, with names or sizes for the dimensions: `batch/data embed +model`."""
        dims = ["/".join((str(name), *axes)) for name, axes in zip(names, self.axes)]
        return " ".join([*dims, *(f"+{a}" for a in sorted(self.pending)), *(f"~{a}" for a in sorted(self.copied))])


def mode_of(mesh) -> str:
    """The mode of code under an (abstract) mesh: manual wins over explicit, explicit over auto."""
    if mesh is None or mesh.empty:
        return "none"
    for kind, name in ((AxisType.Manual, "manual"), (AxisType.Explicit, "explicit")):
        if kind in mesh.axis_types:
            return name
    return "auto"


def axes_in(spec, rank: int) -> tuple[Axes, ...]:
    """For each of so many dimensions, the mesh axes over which a spec slices it."""
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec.partitions]
    return (*parts, *[()] * (rank - len(parts)))


def state_of(x) -> State:
    """The state of a plain array, tracer or `ShapeDtypeStruct`."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    rank = len(aval.shape)
    sharding = aval.sharding
    whole = ((),) * rank
    if not isinstance(sharding, NamedSharding):
        return State("none", whole)
    mesh = sharding.mesh
    if mesh.empty:
        here = jax.sharding.get_abstract_mesh()
        manual = not here.empty and AxisType.Manual in here.axis_types
        return State("manual" if manual else "none", whole)
    mode = mode_of(mesh)
    spec = sharding.spec
    axes = axes_in(spec, rank)
    if mode != "manual":
        return State(mode, axes, frozenset(spec.unreduced), frozenset(spec.reduced))
    mat = getattr(aval, "mat", None)
    if mat is None:
        return State(mode, axes)
    return State(mode, axes, frozenset(mat.unreduced), frozenset(mat.reduced), frozenset(mat.varying))


def sliced_by_compiler(x) -> bool:
    """Whether a compiler may slice what is done to a value, along mesh axes of several devices that are not by hand and
    in no type. It cannot slice kernels."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    if mode_of(mesh) not in ("auto", "manual"):
        return False
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(size > 1 and kind != AxisType.Manual for kind, size in kinds)


def sharding_on(x, spec) -> NamedSharding:
    """A spec on the mesh in an array's type, so that it also holds if no mesh is in force."""
    return NamedSharding(jax.typeof(x).sharding.mesh, spec)


def mesh_of(x):
    """The (abstract) mesh in an array's type, or the one in force, or None."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    for mesh in (getattr(aval.sharding, "mesh", None), jax.sharding.get_abstract_mesh()):
        if mesh is not None and not mesh.empty:
            return mesh
    return None
