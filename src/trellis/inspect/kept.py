"""What the forward pass keeps for the backward pass, by name: read off a jaxpr, nothing is compiled.

A value is kept where an equation of the forward pass makes it and one of the backward pass reads it. In a loop over
layers that is a stacked output. Names are those of `checkpoint_name` (`save` in the language); without one a value
goes by the scope and the line that made it.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from trellis.notation.typeof import short_dtype

from .calls import called
from .rules import num_bytes, place_of
from .source import direction_of, names_of, source_of

# The same bytes under another name, or a part of them.
_VIEWS = ("name", "reshape", "squeeze", "transpose", "slice", "copy", "pvary", "reduce_precision", "stop_gradient",
          "optimization_barrier")  # fmt: skip
_MOVES = ("reshard", "convert_element_type", "all_gather", "all_gather_reduced", "all_gather_invariant")
# Made again where they are read: a compiler keeps none of them.
_FREE = ("iota", "broadcast_in_dim")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Something one device holds.

    Attributes:
        kind: one of `trellis.inspect.memory.KINDS`.
        name: what it is called: a path, a name given by `save`, or the line that made it.
        what: its type in the notation.
        num_bytes: on one device.
        source: `file.py:line (function)`, where that is known.
    """

    kind: str
    name: str
    what: str
    num_bytes: int
    source: str = ""


def local_bytes(aval, sizes: Mapping[str, int]) -> int:
    """Bytes of one device's part."""
    return num_bytes(aval) // math.prod(sizes.get(axis, 1) for axis in place_of(aval).sharded)


def typed(aval, names: tuple[str, ...] | None = None) -> str:
    """A type in the notation: `f32[batch/data pos embed]`, with sizes where there are no names."""
    words = place_of(aval).words(names or tuple(map(str, aval.shape)))
    return f"{short_dtype(aval.dtype)}[{words}]"


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """How a value was made.

    Attributes:
        equation: the equation that made it.
        position: the value's place among the equation's results.
        inputs: keys of the equation's operands, None for literals.
        scope: the name scopes around.
    """

    equation: JaxprEqn
    position: int
    inputs: tuple
    scope: str

    @property
    def op(self) -> str:
        return self.equation.primitive.name


class _Flat:
    """A jaxpr with its calls written out. A value is known by one key: its variable, and the call it stands in (a
    jaxpr that is called twice has its variables twice)."""

    def __init__(self, jaxpr: Jaxpr, scope: str):
        self.steps: list[_Made] = []
        self.made: dict[Any, _Made] = {}
        self._calls = itertools.count()
        self.results = self._write(jaxpr, scope, {v: (0, v) for v in (*jaxpr.invars, *jaxpr.constvars)})

    def _write(self, jaxpr: Jaxpr, scope: str, keys: dict) -> list:
        call = next(self._calls)

        def key(variable):
            return None if isinstance(variable, Literal) else keys.get(variable, (call, variable))

        for equation in jaxpr.eqns:
            here = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
            inputs = tuple(key(v) for v in equation.invars)
            bodies = called(equation)
            loop = equation.primitive.name in ("scan", "while", "cond", "shard_map")
            if len(bodies) == 1 and not loop and len(bodies[0].invars) == len(inputs):
                results = self._write(bodies[0], here, dict(zip(bodies[0].invars, inputs)))
                keys |= dict(zip(equation.outvars, results))
                continue
            for position, variable in enumerate(equation.outvars):
                step = _Made(equation, position, inputs, here)
                self.made[key(variable)] = step
                if position == 0:
                    self.steps.append(step)
        return [key(v) for v in jaxpr.outvars]

    def root(self, key) -> tuple[Any, str]:
        """The value that this one is a view of, and the first name it was given on the way."""
        name = ""
        while key in self.made and self.made[key].op in _VIEWS and self.made[key].inputs[0] is not None:
            step = self.made[key]
            if step.op == "name" and not (given := step.equation.params["name"]).startswith("trellis "):
                name = name or given
            key = step.inputs[0]
        return key, name


def kept(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> list[Buffer]:
    """Every value that the forward pass of a jaxpr keeps for its backward pass, largest first.

    Args:
        jaxpr: of a gradient or a train step, without dead equations.
        sizes: of the mesh axes.
    """
    return sorted(_kept(jaxpr, sizes, ""), key=lambda buffer: -buffer.num_bytes)


def _kept(jaxpr: Jaxpr, sizes: Mapping[str, int], scope: str) -> Iterator[Buffer]:
    flat = _Flat(jaxpr, scope)
    found: dict[Any, Buffer] = {}
    for step in flat.steps:
        if direction_of(step.scope) != "forward":
            for key, variable in zip(step.inputs, step.equation.invars):
                root, name = flat.root(key)
                if root in flat.made and direction_of(flat.made[root].scope) == "forward":
                    _keep(flat, root, name, variable.aval, sizes, found)
        if step.op in ("scan", "while"):  # a loop over microbatches has both passes inside
            for body in called(step.equation):
                yield from _kept(body, sizes, step.scope)
    yield from found.values()


def _keep(flat: _Flat, root, name: str, aval, sizes: Mapping[str, int], found: dict[Any, Buffer]) -> None:
    """Adds a value that crosses, once; a name that it has anywhere is its name."""
    outer = flat.made[root]
    inmost, given, weight = _inmost(flat, outer)
    name = name or given
    identity = (root if inmost is outer else (root[0], id(outer.equation), inmost), aval.shape)
    if inmost.op in _FREE or math.prod(aval.shape) == 1 or (identity in found and not name):
        return
    source = source_of(inmost.equation) or source_of(outer.equation)
    dims = _dims(inmost.scope, aval.shape)
    if not name and weight:
        name = f"{' '.join(dims)} at {source}" if dims else f"weight at {source}"
    elif not name:
        name = "carry between layers" if inmost.op == "scan" else f"{inmost.op} at {source or 'an unknown line'}"
    found[identity] = Buffer(
        kind="gathered weights" if weight else "activations",
        name=name,
        what=typed(aval, dims),
        num_bytes=local_bytes(aval, sizes),
        source=source,
    )


def _dims(scope: str, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Names for the dimensions where the scope has them; a loop stacks a dimension without a name before them."""
    stacked = names_of(scope, len(shape) - 1)
    return names_of(scope, len(shape)) or ((str(shape[0]), *stacked) if stacked else None)


def _inmost(flat: _Flat, made: _Made) -> tuple[_Made, str, bool]:
    """How the slices of a loop's stacked output are made, a name given to them, and whether they are a weight."""
    name = ""
    while made.op in ("scan", "shard_map"):
        (body, *_) = called(made.equation)
        inner = _Flat(body, made.scope)
        key, given = inner.root(inner.results[made.position])
        name = name or given
        if key not in inner.made:
            break
        flat, made = inner, inner.made[key]
    return made, name, _moved_input(flat, made)


def _moved_input(flat: _Flat, made: _Made) -> bool:
    """Whether this only moves or casts something that was not computed here: a weight."""
    if made.op not in _MOVES or made.inputs[0] is None:
        return False
    source, _ = flat.root(made.inputs[0])
    return source not in flat.made or _moved_input(flat, flat.made[source])
