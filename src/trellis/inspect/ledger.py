"""The ledger: every communication of a function, read off its types, without compiling.

The function is traced to a jaxpr, and the jaxpr is walked with its loops multiplied out. In explicit mode each value
carries its placement in its type, so that a communication is an equation whose result is not where its operands put
it: a `reshard`, a product or a sum over a sharded dimension whose result is not a pending sum. In manual mode
(`shard_map`) the collectives are equations themselves. What the types do not decide is left to the compiler, and the
row says so in its note.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding

from trellis.notation.typeof import short_dtype

from . import manual
from .calls import called
from .resettled import refuse_resettled
from .rows import Ledger, Row
from .rules import Implied, Placements
from .source import direction_of, names_behind, names_of, source_of
from .transition import Move


def ledger(fn: Callable, *args, **kwargs) -> Ledger:
    """Lists every communication of a call of a function: forward, recomputed and backward.

    Nothing is compiled and nothing runs. Give it a gradient or a whole train step to see all three.

    Args:
        fn: any function of JAX, jitted or not.
        *args, **kwargs: its arguments: arrays, named arrays, trees of them, or `jax.ShapeDtypeStruct`s with
            shardings. Leaves that are not arrays are passed as they are.

    Returns:
        The rows in program order. `print` it for a table. Over mesh axes in auto mode, where types say nothing, only
        what `shard_map` does is known; `Ledger.auto` names them.

    Raises:
        PendingSumError: a sum that is settled in a loop is made pending again there, which compilers get wrong.
    """
    closed, mesh = trace(fn, *args, **kwargs)
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    walk = _Walk(dict(mesh.shape) if mesh is not None else {})
    rows = walk.jaxpr(live, 1, _Here("", ""))
    refuse_resettled(live, walk.sizes)
    sizes = {name: size for name, size in walk.sizes.items() if size > 1}
    auto = [a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto] if mesh is not None else []
    return Ledger(tuple(rows), sizes, tuple(axis for axis in auto if axis in sizes))


def trace(fn: Callable, *args, **kwargs) -> tuple[ClosedJaxpr, Mesh | None]:
    """The function's jaxpr, and the mesh of its arguments.

    Without a mesh in force (`with layout:`, `jax.set_mesh`) the arguments' own is used.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays):
        arrays = iter(arrays)
        filled = [next(arrays) if array else leaf for leaf, array in zip(leaves, is_array)]
        args, kwargs = jax.tree.unflatten(tree, filled)
        out = fn(*args, **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if hasattr(leaf, "dtype")]

    arrays = [leaf for leaf, array in zip(leaves, is_array) if array]
    mesh = next((m for m in map(_mesh_of, arrays) if m is not None), None)
    with mesh_in_force(mesh):
        return jax.make_jaxpr(call)(arrays), mesh


def mesh_in_force(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The given mesh, unless there is none or one is in force already."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def _mesh_of(array) -> Mesh | None:
    sharding = getattr(array, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Here:
    """Where the walk is: name scopes and the source line, those of the calls around included."""

    scope: str
    source: str

    def inside(self, equation: JaxprEqn) -> "_Here":
        own = str(equation.source_info.name_stack)
        return _Here("/".join(filter(None, (self.scope, own))), source_of(equation) or self.source)


class _Walk:
    """A walk over a jaxpr that yields rows, and learns the sizes of mesh axes on the way."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes

    def jaxpr(self, jaxpr: Jaxpr, times: int, here: _Here, placements: Placements | None = None) -> list[Row]:
        placements = placements or Placements(self.sizes)
        return [row for equation in jaxpr.eqns for row in self.equation(equation, times, here, placements)]

    def equation(self, equation: JaxprEqn, times: int, outer: _Here, placements: Placements) -> Iterator[Row]:
        name = equation.primitive.name
        here = outer.inside(equation)
        self._meet(equation)
        if name == "scan":
            yield from self.jaxpr(equation.params["jaxpr"].jaxpr, times * equation.params["length"], here)
        elif name == "while":
            for part in ("cond_jaxpr", "body_jaxpr"):
                rows = self.jaxpr(equation.params[part].jaxpr, times, here)
                yield from (_noted(row, "once a turn of a while loop") for row in rows)
        elif name == "cond":
            branches = [self.jaxpr(branch.jaxpr, times, here) for branch in equation.params["branches"]]
            largest = max(branches, key=lambda rows: sum(row.total for row in rows))
            yield from (_noted(row, f"the largest of {len(branches)} branches") for row in largest)
        elif parts := called(equation):
            inner = parts[0]
            child = placements.enter(equation, inner)
            yield from self.jaxpr(inner, times, here, child)
            placements.leave(equation, inner, child)
        elif name in manual.COLLECTIVES:
            for move, before, after, note in manual.moves(equation, self.sizes):
                what = manual.text_of(here.scope, before) or f"{manual.words(before)} -> {manual.words(after)}"
                yield self._row(move, before, what, times, here, note)
        elif not placements.again(equation):
            for implied in placements.implied(equation):
                aval = implied.aval
                names = names_of(here.scope, len(aval.shape)) or names_behind(here.scope, implied.before.dims) or ()
                mapped = aval.shape[: len(aval.shape) - len(names)]
                what = _words(implied, (*map(str, mapped), *names))
                yield self._row(implied.move, aval, what, times, here, implied.note)

    def _meet(self, equation: JaxprEqn) -> None:
        meshes = [equation.params.get("mesh")]
        meshes += [getattr(getattr(v.aval, "sharding", None), "mesh", None) for v in equation.outvars]
        for mesh in meshes:
            for axis, size in (getattr(mesh, "shape", None) or {}).items():
                self.sizes.setdefault(axis, size)

    def _row(self, move: Move, aval, what: str, times: int, here: _Here, note: str) -> Row:
        return Row(
            kind=move.kind,
            axes=move.axes,
            what=what,
            dtype=short_dtype(aval.dtype),
            payload=move.payload,
            wire=move.wire,
            times=times,
            direction=direction_of(here.scope),
            source=here.source,
            note=note,
        )


def _words(implied: Implied, names: tuple[str, ...]) -> str:
    before, after = implied.before, implied.after
    if len(before.dims) != len(names) or len(after.dims) != len(names):
        return " ".join(names)
    return f"{before.words(names)} -> {after.words(names)}"


def _noted(row: Row, note: str) -> Row:
    return dataclasses.replace(row, note=f"{row.note}; {note}" if row.note else note)
