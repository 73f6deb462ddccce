"""One reading of a program: a jaxpr as operations in order, with its calls inlined and its loops as bodies.

A jaxpr holds programs within equations: calls (of `jit`, `remat`, custom derivatives, `shard_map`), loops and branches.
Here a call's operations stand where the call was, so that a value has one name inside and outside it, and only loops
and branches have bodies of their own. Each operation knows how often it runs, in which pass, which line of the user's
program made it, and what made and what reads its values. The ledger, memory and work are views of this.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType

from trellis._compat import scan_counts
from trellis.notation.state import State
from trellis.program.scopes import direction_of, share_of_turns
from trellis.program.sizes import itemsize, local_shape, shape_at, state_at
from trellis.program.source import label_of, source_of

# A call of `shard_map` is inlined between these: its operands become slices, and its results whole arrays.
ENTER, LEAVE = "enter shard_map", "leave shard_map"
# Operations that run a program again and again.
LOOPS = ("scan", "while")
# Each is one operation to the device, whatever the program inside says.
KERNELS = frozenset(
    "pallas_call custom_call ffi_call tpu_custom_call dot_product_attention_fwd dot_product_attention_bwd "
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper".split()
)
# Make one element of many; the last of several arrays together, by a program of two elements of each.
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce".split())
# Begins the names of marks that Trellis makes itself, by JAX's `checkpoint_name`.
OWN_MARK = "trellis "
# Ends the names of marks of values that are kept only if a policy names them.
IF_NAMED = " if named"
# Their jaxprs say how to combine two elements.
_COMBINE = ("reduce", "reduce_window", "select_and_scatter_add")


class Value:
    """An array of a program.

    Attributes:
        aval: its JAX type.
        maker: the operation that makes it; None for an input of the program or of a body, a constant, a literal.
        position: its place among the results of its maker.
        frame: where it is made.
        readers: the operations that read it, each once.
        literal: a number that is written in place; None if it is not one.
        number: the same, also for an argument of a call that is given one.
        outer: for a body's input, the operand of the loop or branch that it is in the first turn.
        fixed: whether it is that in all turns.
        placed: where it lies if a compiler places it, as far as that is known (`trellis.program.by_compiler`).
    """

    def __init__(self, aval: Any, frame: "Frame", maker: "Operation | None" = None, position: int = 0):
        self.aval, self.frame, self.maker, self.position = aval, frame, maker, position
        self.readers: list[Operation] = []
        self.literal: Literal | None = None
        self.number: Literal | None = None
        self.outer: Value | None = None
        self.fixed = False
        self.placed: State | None = None

    @functools.cached_property
    def state(self) -> State:
        """Where it lies, along explicit mesh axes."""
        return state_at(self.aval)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array; inside `shard_map`, of one device's slice."""
        return getattr(self.aval, "shape", ())

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on one device."""
        return local_shape(self.aval) if self.placed is None else shape_at(self.aval, self.placed)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes on one device."""
        return int(math.prod(self.local_shape) * itemsize(self.aval.dtype)) if hasattr(self.aval, "dtype") else 0

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether it lies in the memory of the host, not the device's."""
        return getattr(self.aval, "memory_space", None) is jax.memory.Space.Host

    @property
    def device_bytes(self) -> int:
        """Bytes in a device's memory: 0 if it lies in the host's."""
        return 0 if self.on_host else self.num_bytes

    @property
    def num_elements(self) -> int:
        """Elements on one device."""
        return math.prod(self.local_shape) if hasattr(self.aval, "shape") else 0


class Frame:
    """What an operation stands in: the program, a call that was inlined, or the body of a loop or a branch.

    Attributes:
        outer: the frame around; None for the program's own.
        equation: the call, the loop or the branch.
        is_body: whether this is a body and not a call.
        around: all frames around.
        last: the number of its last operation.
    """

    def __init__(self, outer: "Frame | None" = None, equation: JaxprEqn | None = None, is_body: bool = False):
        self.outer, self.equation, self.is_body, self.last = outer, equation, is_body, -1
        self.around: frozenset[Frame] = outer.around | {outer} if outer is not None else frozenset()

    @functools.cached_property
    def written_in(self) -> "Frame":
        """The frame that compilers write it in: for a call, that of the call, unless it computes what was computed
        before, which they are told to do again, or is one device's program."""
        apart = self.is_body or self.outer is None or self.equation.primitive.name == "shard_map"
        return self if apart or self.equation.params.get("differentiated") else self.outer.written_in

    @functools.cached_property
    def scope(self) -> str:
        """The name scopes around it, one after the other."""
        return _joined(self.outer, self.equation) if self.outer is not None else ""

    @functools.cached_property
    def source(self) -> str:
        """The line of the call."""
        return (source_of(self.equation) or self.outer.source) if self.outer is not None else ""

    @property
    def label(self) -> str:
        """What a person would call the call."""
        return (label_of(self.equation) or self.outer.label) if self.outer is not None else ""


class Operation:
    """An equation of a program.

    Attributes:
        name: of the JAX primitive.
        equation: as JAX has it; for `ENTER` and `LEAVE`, that of the `shard_map`.
        operands, results: its values.
        frame: what it stands in.
        times: how often a call of the program runs it: lengths of scans multiplied out, `while` loops as one turn.
        number: its place in the program.
        inputs: the operands that are not literals.
        taken: shapes on a device of a product's operands once it has gathered them, if a compiler places them.
        bodies: the body of a scan; the condition and the body of a while loop; the branches of a conditional; the
            program of a call that does not take its operands as they are.
    """

    def __init__(self, name: str, equation: JaxprEqn, operands: Sequence[Value], frame: Frame, times: int, number: int):
        self.name, self.equation, self.operands = name, equation, tuple(operands)
        self.inputs = [value for value in self.operands if value.literal is None]
        self.frame, self.times, self.number = frame, times, number
        self.results: tuple[Value, ...] = ()
        self.bodies: tuple[Body, ...] = ()
        self.taken: tuple[tuple[int, ...], ...] = ()
        for value in dict.fromkeys(self.operands):
            value.readers.append(self)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the equation."""
        return self.equation.params

    @functools.cached_property
    def scope(self) -> str:
        """Name scopes, including those around it."""
        return _joined(self.frame, self.equation)

    @property
    def own_scope(self) -> str:
        """Name scopes within the loop or branch that it stands in."""
        parts, frame = [str(self.equation.source_info.name_stack)], self.frame
        while frame.outer is not None and not frame.is_body:
            parts, frame = [str(frame.equation.source_info.name_stack), *parts], frame.outer
        return "/".join(filter(None, parts))

    @functools.cached_property
    def direction(self) -> str:
        """The pass it belongs to: "forward", "recomputed", "backward", or "update" for what is not differentiated."""
        return direction_of(self.scope)

    @functools.cached_property
    def source(self) -> str:
        """`file.py:line (function)` of the user's program."""
        return source_of(self.equation) or self.frame.source

    @property
    def label(self) -> str:
        """What a person would call it: the class and the attribute on its line, or the function that it is in."""
        return label_of(self.equation) or self.frame.label

    def entering(self, body: "Body") -> list[tuple[Value, Value]]:
        """Each input of a body, and the operand that it is in the first turn."""
        skip, kept = 0, len(body.inputs)
        if self.name == "while":
            own = self.params["cond_nconsts"], self.params["body_nconsts"]
            kept = own[body is self.bodies[1]]
            skip = own[0] * (body is self.bodies[1])
            carried = self.operands[sum(own) :]
            return list(zip(body.inputs, (*self.operands[skip : skip + kept], *carried), strict=True))
        skip = 1 if self.name == "cond" else 0
        given = self.operands[skip:]
        return list(zip(body.inputs, given)) if len(given) == kept else []

    @property
    def crosses(self) -> bool:
        """Whether it copies from the device's memory to the host's, or back."""
        return self.name == "device_put" and any(
            before.on_host != after.on_host for before, after in zip(self.operands, self.results, strict=True)
        )

    @property
    def mark(self) -> str:
        """The name that `save` gave its result; empty if it is no such mark."""
        given = self.params["name"] if self.name == "name" else ""
        return "" if given.startswith(OWN_MARK) else given.removesuffix(IF_NAMED)

    @property
    def is_loop(self) -> bool:
        """Whether its bodies run turn after turn."""
        return self.name in LOOPS

    @property
    def carries(self) -> tuple[int, int]:
        """For a loop: how many inputs its body has before those carried from turn to turn, and how many it carries."""
        if self.name == "scan":
            return scan_counts(self.params)
        return (self.params["body_nconsts"], len(self.results)) if self.is_loop else (0, 0)

    def constants(self, body: "Body") -> int:
        """How many of a body's first inputs are the same in all turns: for a branch, all of them."""
        if not self.is_loop:
            return len(body.inputs)
        of_condition = self.name == "while" and body is self.bodies[0]
        return self.params["cond_nconsts"] if of_condition else self.carries[0]

    def __repr__(self) -> str:
        return f"<{self.name} at {self.source or 'an unknown line'}>"


def _joined(frame: Frame, equation: JaxprEqn) -> str:
    own = str(equation.source_info.name_stack)
    return f"{frame.scope}/{own}" if frame.scope and own else frame.scope or own


class Body:
    """A program, or the body of a loop or a branch: inputs, operations in order, results.

    Attributes:
        frame: its own; operations of calls that were inlined stand in frames within.
        inputs: its arguments; for a scan: constants, carries, and one turn's slices.
        results: for a scan: carries, and what is stacked.
    """

    def __init__(self, frame: Frame):
        self.frame = frame
        self.inputs: list[Value] = []
        self.operations: list[Operation] = []
        self.results: list[Value] = []

    def walk(self) -> Iterator[Operation]:
        """Every operation; those of bodies come after the one that holds them."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body.walk()


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """What an input of a program is.

    Attributes:
        name: the path to it: `model.layers.block.mlp.gate`.
        kind: "parameters", "optimizer", "batch" or "other".
        what: its type in the notation.
        donated: whether its memory may be taken by results.
    """

    name: str
    kind: str
    what: str
    donated: bool = False


class Program(Body):
    """A whole program.

    Attributes:
        arguments: what its inputs are, if that is known.
        mesh: the sizes of the mesh axes of its arguments, and of those met in its equations.
        auto: mesh axes that are left to the compiler.
        device: the mesh's abstract device, which is what JAX knows of its devices; None without.
    """

    def __init__(self, jaxpr: Jaxpr, arguments: Sequence[Argument] = (), mesh: Any = None):
        super().__init__(Frame())
        self.arguments = tuple(arguments)
        self.mesh: dict[str, int] = dict(mesh.shape) if mesh is not None else {}
        kinds = zip(mesh.axis_names, mesh.axis_types) if mesh is not None else ()
        self.auto = tuple(axis for axis, kind in kinds if kind == AxisType.Auto and self.mesh[axis] > 1)
        self.device = None if mesh is None else mesh.abstract_mesh.abstract_device
        _Reader(self.mesh).body(self, jaxpr, 1)


class _Reader:
    """Turns jaxprs into bodies."""

    def __init__(self, mesh: dict[str, int]):
        self.mesh, self.met, self.number = mesh, set(), 0

    def body(self, body: Body, jaxpr: Jaxpr, times: int) -> Body:
        body.inputs = [Value(v.aval, body.frame) for v in jaxpr.invars]
        body.results = self.write(jaxpr, body.inputs, body, body.frame, times)
        body.frame.last = self.number - 1
        return body

    def write(self, jaxpr: Jaxpr, inputs: Sequence[Value], body: Body, frame: Frame, times: int) -> list[Value]:
        """Adds the operations of a jaxpr to a body; returns its results."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: Value(v.aval, frame) for v in jaxpr.constvars}

        def value_of(atom) -> Value:
            if not isinstance(atom, Literal):
                return known[atom]
            value = Value(atom.aval, frame)
            value.literal = value.number = atom
            return value

        for equation in jaxpr.eqns:
            operands = [value_of(atom) for atom in equation.invars]
            self.meet(equation)
            results = self.equation(equation, operands, body, frame, times)
            known.update(zip(equation.outvars, results, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, operands: list[Value], body: Body, frame: Frame, times: int) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "stop_gradient":  # for derivatives alone: compilers see one array
            return operands
        inner = jaxprs_in(equation)
        if name in (*LOOPS, "cond") or not inner:
            turns = params["length"] if name == "scan" else 1
            if name == "while":
                inner = [params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr]
        elif len(inner[0].invars) == len(operands) and len(inner[0].outvars) == len(equation.outvars):
            return self.call(equation, inner[0], operands, body, frame, times)
        else:
            inner, turns = inner[:1], 1
        operation = self.add(name, equation, operands, [v.aval for v in equation.outvars], body, frame, times)
        runs, of = share_of_turns(str(equation.source_info.name_stack)) if name == "cond" else (1, 1)
        operation.bodies = tuple(
            self.body(Body(Frame(frame, equation, is_body=True)), one, times * turns * runs // of) for one in inner
        )
        for one in operation.bodies:
            constants = operation.constants(one)
            for index, (value, operand) in enumerate(operation.entering(one)):
                value.outer, value.fixed = operand, index < constants
        return list(operation.results)

    def call(self, equation, inner: Jaxpr, operands: list[Value], body: Body, frame: Frame, times: int) -> list[Value]:
        """Inlines a call."""
        own = Frame(frame, equation)
        mapped = equation.primitive.name == "shard_map"
        inputs = []
        for variable, operand in zip(inner.invars, operands, strict=True):
            if mapped:
                operand = self.add(ENTER, equation, [operand], [variable.aval], body, frame, times).results[0]
            if operand.literal is not None:
                number, operand = operand.number, Value(variable.aval, own)
                operand.number = number
            inputs.append(operand)
        results = self.write(inner, inputs, body, own, times)
        own.last = self.number - 1
        if mapped:
            avals = [v.aval for v in equation.outvars]
            ends = (self.add(LEAVE, equation, [r], [a], body, frame, times) for r, a in zip(results, avals))
            return [end.results[0] for end in ends]
        return results

    def add(self, name: str, equation, operands, avals, body: Body, frame: Frame, times: int) -> Operation:
        operation = Operation(name, equation, operands, frame, times, self.number)
        operation.results = tuple(Value(aval, frame, operation, i) for i, aval in enumerate(avals))
        self.number += 1
        body.operations.append(operation)
        return operation

    def meet(self, equation: JaxprEqn) -> None:
        meshes = [equation.params.get("mesh")]
        meshes += [getattr(getattr(v.aval, "sharding", None), "mesh", None) for v in equation.outvars]
        for mesh in meshes:
            if mesh is not None and id(mesh) not in self.met:
                self.met.add(id(mesh))
                for axis, size in (getattr(mesh, "shape", None) or {}).items():
                    self.mesh.setdefault(axis, size)


def jaxprs_in(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs that an equation runs: those of a call, a loop or branches; none for a kernel."""
    name = equation.primitive.name
    if name in _COMBINE or name in KERNELS or name.startswith("scatter"):
        return []
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
