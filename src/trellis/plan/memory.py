"""Memory of one device through a step, from types alone.

A jaxpr is run in order with sizes for values: an input lives as long as its owner keeps it, a value lives from the
equation that makes it to the last that reads it, a loop's stacked outputs from the loop's start. What a compiler
fuses takes no memory of its own: the value of an elementwise chain exists when something that is not elementwise (a
product, a kernel, a collective, a loop, an output) reads it, and until then keeps alive what it is made of. The
highest point over the step is the prediction, told by kind.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from trellis.inspect.source import source_of

from .trace import KERNELS, Step, inlined, is_literal, local_bytes, local_shape, sub_jaxprs

KINDS = ("parameters", "optimizer", "gradients", "kept activations", "gathered weights", "batch", "temporaries",
         "fragmentation")  # fmt: skip
# What the compiler's allocator loses between buffers, as a share of everything that is not an argument. The layouts of
# compiled train steps lost between 0.3 and 7 %.
FRAGMENTATION = 0.02
# The vector memory of a TPU, where a loop's small buffers go.
VECTOR_MEMORY = 128 * 2**20
# The lanes of a TPU's registers.
LANES = 128

_OPAQUE = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond", "sort",
           "gather", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "reshard", "all_gather", "psum",
           "reduce_scatter", "psum_scatter", "all_to_all", "ppermute", "concatenate", "cumsum", "top_k",
           "unreduced_psum", "unreduced_reduce_scatter", "reduced_all_gather", "all_gather_invariant",
           "optimization_barrier", "random_bits", "threefry2x32"}  # fmt: skip
_OPAQUE |= KERNELS
_VIEWS = {"reshape", "squeeze", "expand_dims", "name", "pvary", "pcast", "mesh_cast", "bitcast_convert_type", "copy",
          "stop_gradient"}  # fmt: skip
_FUSED_AFTER = {"add", "add_any", "sub", "mul", "convert_element_type", "neg", "div", "max"}


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """Memory held at the highest point of a step.

    Attributes:
        kind: one of `KINDS`.
        num_bytes: on one device.
        what: dtype and shape on one device.
        source: path of an input, or the line that made it.
    """

    kind: str
    num_bytes: int
    what: str
    source: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """A step's memory at its highest point, on one device.

    Attributes:
        peak: bytes.
        kinds: bytes by kind, adding up to `peak`.
        buffers: the same, one by one, largest first.
        where: the line that runs at the highest point.
    """

    peak: int
    kinds: Mapping[str, int]
    buffers: tuple[Buffer, ...]
    where: str


def _show(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, local_shape(aval)))}]"


class _Value:
    """A value during the walk: memory that exists, or a chain that will be fused into its reader."""

    __slots__ = ("buffer", "made_of", "uses", "pinned", "lazy")

    def __init__(self, buffer: Buffer | None, made_of: "tuple[_Value, ...]" = (), pinned: bool = False):
        self.buffer, self.made_of, self.pinned, self.uses, self.lazy = buffer, made_of, pinned, 0, False


class _Walk:
    def __init__(self, top: bool = False, held: bool = False):
        self.top = top  # whether this is the whole step and not a loop's body
        self.held = held  # whether a loop over layers holds all that its body does to the end of a turn
        self.moved = 0  # bytes of weights that are gathered and of gradients that are summed over devices
        self.loops: list[tuple[int, dict[int, Buffer]]] = []  # bytes of its body; by id, what is around it
        self.live: dict[int, _Value] = {}
        self.total = 0
        self.peak, self.at_peak, self.where = 0, (), ""

    def add(self, value: _Value) -> None:
        if value.buffer is not None and id(value) not in self.live:
            self.live[id(value)] = value
            self.total += value.buffer.num_bytes

    def drop(self, value: _Value) -> None:
        if value.pinned or value.uses > 0:
            return
        if value.buffer is not None:
            if id(value) in self.live:
                del self.live[id(value)]
                self.total -= value.buffer.num_bytes
        for part in value.made_of:
            part.uses -= 1
            self.drop(part)

    def mark(self, extra: int, buffers: tuple[Buffer, ...], where: str) -> None:
        if self.total + extra > self.peak:
            self.peak = self.total + extra
            self.at_peak = tuple(v.buffer for v in self.live.values() if v.buffer) + buffers
            self.where = where

    def realize(self, value: _Value, aval: Any, kind: str, source: str, size=local_bytes) -> None:
        """A fused chain's value comes into being; what it was made of is released."""
        if value.buffer is not None or value.pinned:  # it exists, or belongs to the program around this one
            return
        parts, value.made_of = value.made_of, ()
        value.buffer = Buffer(kind, size(aval), _show(aval), source)
        # An elementwise result takes the place of an operand of its size that ends here; else both exist for a while.
        in_place = any(p.buffer and p.uses == 1 and p.buffer.num_bytes == value.buffer.num_bytes for p in parts)
        if not in_place:
            self.add(value)
            self.mark(0, (), source)
        for part in parts:
            part.uses -= 1
            self.drop(part)
        self.add(value)

    def run(self, jaxpr: Any, inputs: list[_Value], weights: set, keep: str) -> list[_Value]:
        """Runs a program; `weights` are the values that depend on parameters alone, `keep` the kind of its stacks."""
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs))
        for var in jaxpr.constvars:
            env[var] = _Value(None, pinned=True)
        last: dict[Any, int] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            for var in eqn.invars:
                if not is_literal(var):
                    last[var] = index
        for var in jaxpr.outvars:
            if not is_literal(var):
                last[var] = len(jaxpr.eqns)
        for var, value in env.items():
            value.uses += 1 if var in last else 0
        lazy = _partitioned_lookups(jaxpr) | _epilogues(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            self.equation(eqn, env, weights, id(eqn) in lazy)
            for var in dict.fromkeys(v for v in (*eqn.invars, *eqn.outvars) if not is_literal(v)):
                if last.get(var, -1) <= index and var in env:
                    value = env.pop(var)
                    if var in last:
                        value.uses -= 1
                    self.drop(value)
        return [env[v] if not is_literal(v) else _Value(None, pinned=True) for v in jaxpr.outvars]

    def equation(self, eqn: Any, env: dict, weights: set, lazy: bool) -> None:
        name = eqn.primitive.name
        operands = [env[v] for v in eqn.invars if not is_literal(v)]
        pure = all(v in weights for v in eqn.invars if not is_literal(v)) and bool(operands)
        if pure:
            weights.update(eqn.outvars)
        inner = inlined(eqn)
        source = ""
        if inner is not None:
            self.inline(eqn, inner, env, weights)
            return
        if lazy or name not in _OPAQUE and not name.startswith(("reduce_", "arg")):
            if _view(eqn) and len(operands) == 1 and len(eqn.outvars) == 1:
                operands[0].uses += 1
                env[eqn.outvars[0]] = operands[0]
                return
            for var in eqn.outvars:
                parts = tuple(dict.fromkeys(operands))
                value = _Value(None, parts)
                for part in parts:
                    part.uses += 1
                value.uses, value.lazy = 1, lazy
                env[var] = value
            return
        source = source_of(eqn)
        size = _in_tiles if name == "pallas_call" else local_bytes
        reduces = name.startswith("reduce_") or name in ("argmax", "argmin")
        fused_reads = name in ("dot_general", "gather", "reshard", "scatter-add", "scatter_add")
        for var, value in ((v, env[v]) for v in eqn.invars if not is_literal(v)):
            light = fused_reads and value.buffer is None and _only_views_or_casts(value)
            light = light or name in ("scan", "while") and _cheap(value, var.aval)
            light = light or name == "dot_general" and _narrows(value, var.aval)
            if not light and not reduces:  # a reduction reads a fused chain as it is made
                kind = "gathered weights" if var in weights else "gradients" if _pending(var.aval) else "temporaries"
                self.realize(value, var.aval, kind, source, size)
        if name in ("scan", "while", "cond"):
            self.loop(eqn, env, weights, source)
            return
        for position, var in enumerate(eqn.outvars):
            kind = "gathered weights" if pure else "gradients" if _pending(var.aval) else "temporaries"
            in_place = name in ("dynamic_update_slice", "optimization_barrier", "scatter-add", "scatter_add")
            atom = eqn.invars[position if name == "optimization_barrier" else 0]
            if (in_place or name == "reshard" and _moves_nothing(eqn)) and not is_literal(atom):
                env[atom].uses += 1
                env[var] = env[atom]
                continue
            value = _Value(Buffer(kind, size(var.aval), _show(var.aval), source))
            value.uses = 1
            env[var] = value
            self.add(value)
            if name == "reshard":
                self.moved += value.buffer.num_bytes if pure else _summed_whole(eqn)
            if self.top and name == "reshard" and _gathers_columns(eqn):
                copy = dataclasses.replace(value.buffer, what=f"{value.buffer.what}, transposed")
                self.mark(copy.num_bytes, (copy,), source)
        self.mark(0, (), source)

    def inline(self, eqn: Any, inner: Any, env: dict, weights: set) -> None:
        inputs, inside = [], set()
        for var, name in zip(inner.invars, eqn.invars):
            value = _Value(None, pinned=True) if is_literal(name) else env[name]
            if not is_literal(name) and name in weights:
                inside.add(var)
            inputs.append(value)
        results = self.run(inner, inputs, inside, "")
        for var, value, inner_var in zip(eqn.outvars, results, inner.outvars):
            if not is_literal(inner_var) and inner_var in inside:
                weights.add(var)
            env[var] = value

    def loop(self, eqn: Any, env: dict, weights: set, source: str) -> None:
        name = eqn.primitive.name
        if name == "scan":
            body, consts, carry = eqn.params["jaxpr"].jaxpr, eqn.params["num_consts"], eqn.params["num_carry"]
        elif name == "while":
            body = eqn.params["body_jaxpr"].jaxpr
            skip = eqn.params["cond_nconsts"]
            consts, carry = eqn.params["body_nconsts"], len(eqn.outvars)
        else:
            body = max((b for key, b in sub_jaxprs(eqn) if key == "branches"), key=lambda b: len(b.eqns))
            skip, consts, carry = 1, len(body.invars), 0
        outer = list(eqn.invars[skip:] if name in ("while", "cond") else eqn.invars)
        stacked = []
        backward = "transpose(" in str(eqn.source_info.name_stack)
        for position, var in enumerate(eqn.outvars):
            if name == "scan" and position < carry or name == "while":
                continue  # a carry's memory is its initial value's, below
            kind = "temporaries" if name == "cond" else "gradients" if backward else "kept activations"
            value = _Value(Buffer(kind, local_bytes(var.aval), _show(var.aval), source))
            value.uses = 1
            env[var] = value
            self.add(value)
            stacked.append(value)
        inside = set()
        inputs = []
        carries = []
        for position, (var, name_outside) in enumerate(zip(body.invars, outer)):
            literal = is_literal(name_outside)
            if not literal and name_outside in weights:
                inside.add(var)
            if position < consts or literal and position >= consts + carry:
                inputs.append(_Value(None, pinned=True))
            elif position < consts + carry:
                old = None if literal else env[name_outside]
                kind = "gradients" if _pending(var.aval) else "temporaries"
                value = _Value(Buffer(kind, local_bytes(var.aval), _show(var.aval), source))
                if old is not None and old.buffer is not None and old.uses <= 1 and not old.pinned:
                    value.buffer = dataclasses.replace(value.buffer, kind=old.buffer.kind)
                    self.total -= old.buffer.num_bytes if id(old) in self.live else 0
                    self.live.pop(id(old), None)
                    old.buffer = None
                value.pinned = True
                self.add(value)
                carries.append(value)
                inputs.append(value)
            else:  # one step's slice of a stack, read in place
                inputs.append(_Value(None, pinned=True))
        inner = _Walk(held=self.held)
        inner.run(body, [_Value(None, pinned=True) for _ in inputs], inside, "")
        if self.held:
            on_the_way = Buffer("gathered weights", inner.moved, "and gradients on the way", source)
            self.mark(inner.peak + inner.moved, (*inner.at_peak, on_the_way), inner.where or source)
            self.loops.append((inner.peak, {id(v.buffer): v.buffer for v in self.live.values()}))
        else:
            self.mark(inner.peak, inner.at_peak, inner.where or source)
        position = 0
        for var in eqn.outvars:
            if var not in env:
                env[var] = carries[position]
                carries[position].pinned = False
                carries[position].uses = 1
                position += 1


def _partitioned_lookups(jaxpr: Any) -> set[int]:
    """Equations of a lookup by indices that are sharded, which the types say whole and the compiler partitions.

    `table.at[ids].get(out_sharding=...)` is traced as a lookup of everything and a slice of it, its gradient as a
    gather of all updates and a scatter of them; the compiler does the slice first, and does not gather the updates.
    """
    readers: dict[Any, list] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if not is_literal(var):
                readers[var].append(eqn)
    found = set()
    for eqn in jaxpr.eqns:
        after = readers[eqn.outvars[0]] if len(eqn.outvars) == 1 else []
        names = {reader.primitive.name for reader in after}
        before = max((local_bytes(v.aval) for v in eqn.invars[:1]), default=0)
        if eqn.primitive.name == "gather" and names == {"reshard"}:
            if all(local_bytes(reader.outvars[0].aval) < local_bytes(eqn.outvars[0].aval) for reader in after):
                found.add(id(eqn))
        elif eqn.primitive.name == "reshard" and names <= {"scatter-add", "scatter_add", "gather"} and names:
            if local_bytes(eqn.outvars[0].aval) > before:
                found.add(id(eqn))
    return found


def _epilogues(jaxpr: Any) -> set[int]:
    """Products whose result one elementwise equation of the same size reads: the compiler makes both in one."""
    readers: dict[Any, list] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if not is_literal(var):
                readers[var].append(eqn)
    outputs = {id(var) for var in jaxpr.outvars}
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and id(eqn.outvars[0]) not in outputs:
            after = readers[eqn.outvars[0]]
            if len(after) == 1 and after[0].primitive.name in _FUSED_AFTER:
                found.add(id(eqn))
    return found


def _only_views_or_casts(value: _Value) -> bool:
    """Whether a value is one step from memory, or is a lookup done by parts: its reader makes it as it reads it."""
    if value.lazy or value.pinned:
        return True
    return len(value.made_of) == 1 and (value.made_of[0].pinned or value.made_of[0].buffer is not None)


def _cheap(value: _Value, aval: Any) -> bool:
    """Whether a loop's constant is a broadcast of little, which the compiler makes again inside the loop."""
    if value.buffer is not None or value.pinned:
        return False
    made_of = sum(part.buffer.num_bytes for part in _leaves(value) if part.buffer)
    return made_of * 8 <= local_bytes(aval)


def _narrows(value: _Value, aval: Any) -> bool:
    """Whether a product's operand is made of something twice as large that exists: it is made as the product reads it.

    So are the bfloat16 gradients of float32 logits.
    """
    if value.buffer is not None or value.pinned:
        return False
    return any(part.buffer is not None and part.buffer.num_bytes >= 2 * local_bytes(aval) for part in _leaves(value))


def _leaves(value: _Value) -> "list[_Value]":
    """What a chain that is not there yet is made of."""
    seen, todo, found = set(), list(value.made_of), []
    while todo:
        part = todo.pop()
        if id(part) not in seen:
            seen.add(id(part))
            found.append(part)
            todo += part.made_of
    return found


def _gathers_columns(eqn: Any) -> bool:
    """Whether the last of several dimensions is gathered: devices' parts come one after the other, so that the result
    is transposed and copied. (Inside layers the products take weights either way.)"""
    before, after = local_shape(eqn.invars[0].aval), local_shape(eqn.outvars[0].aval)
    return len(after) > 1 and after[-1] > before[-1] and after[:-1] == before[:-1]


def _in_tiles(aval: Any) -> int:
    """Bytes of a kernel's operand or result: its last dimension fills whole lanes, so that heads of 64 take twice."""
    last = local_shape(aval)[-1] if getattr(aval, "shape", ()) else LANES
    return local_bytes(aval) * (-(-last // LANES) * LANES) // max(last, 1)


def _view(eqn: Any) -> bool:
    """Whether a value is another in memory, as it is."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":  # with further dimensions of size 1
        return local_bytes(eqn.invars[0].aval) == local_bytes(eqn.outvars[0].aval)
    return name in _VIEWS or name.endswith("_cast_p")


def _summed_whole(eqn: Any) -> int:
    """Bytes of a pending sum that a joint reduction over several mesh axes holds: it is made of all-reduces."""
    before, after = (getattr(v.aval.sharding.spec, "unreduced", ()) for v in (eqn.invars[0], eqn.outvars[0]))
    return local_bytes(eqn.invars[0].aval) if len(set(before) - set(after)) > 1 else 0


def _moves_nothing(eqn: Any) -> bool:
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return (
        local_bytes(before) == local_bytes(after) and local_shape(before) == local_shape(after) and not _pending(before)
    )


def _pending(aval: Any) -> bool:
    return bool(getattr(getattr(aval, "sharding", None), "spec", None) and aval.sharding.spec.unreduced)


def _lost_to_loops(walk: _Walk) -> int:
    """Bytes that the largest loop took, but for vector memory, and that are empty at the highest point: what is larger
    than half of the room was not seen to be put there."""
    room, around = max(walk.loops, key=lambda loop: loop[0], default=(0, {}))
    later = [buffer.num_bytes for buffer in walk.at_peak if id(buffer) not in around]
    return max(room - VECTOR_MEMORY - sum(size for size in later if size <= room / 2), 0)


def memory(step: Step, held: bool = False) -> Memory:
    """The highest point of a step's memory on one device.

    Args:
        step: the step, traced.
        held: whether SparseCores move weights and gradients beside computation. What is gathered, and what is summed
            over several mesh axes at once, then stays in place until a loop over layers ends its turn, beside what
            moves for the next, and that room is lost to large buffers at the highest point.
    """
    jaxpr = step.jaxpr.jaxpr
    walk = _Walk(top=True, held=held)
    inputs, weights = [], set()
    for var, kind, name in zip(jaxpr.invars, step.kinds, step.names):
        kind = kind if kind in KINDS else "temporaries"
        value = _Value(Buffer(kind, local_bytes(var.aval), _show(var.aval), name), pinned=True)
        if kind == "parameters":
            weights.add(var)
        walk.add(value)
        inputs.append(value)
    walk.mark(0, (), "")
    walk.run(jaxpr, inputs, weights, "")
    kinds: collections.Counter[str] = collections.Counter()
    for buffer in walk.at_peak:
        kinds[buffer.kind] += buffer.num_bytes
    arguments = sum(local_bytes(var.aval) for var in jaxpr.invars)
    kinds["fragmentation"] = int(FRAGMENTATION * (walk.peak - arguments)) + _lost_to_loops(walk)
    lost = Buffer("fragmentation", kinds["fragmentation"], "between buffers", "the compiler's allocator")
    ordered = tuple(sorted((*walk.at_peak, lost), key=lambda buffer: -buffer.num_bytes))
    return Memory(walk.peak + lost.num_bytes, {kind: kinds[kind] for kind in KINDS}, ordered, walk.where)
