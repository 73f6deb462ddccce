"""What a step computes on one device: every product, kernel and fused elementwise group, with its FLOPs and bytes.

Products (`dot_general`) are exact from the types. Kernels (attention) are counted from the shapes of their operands
and the causal half of the scores. Everything else is elementwise or a reduction, which the compiler fuses: equations
that are connected through such values form one group, which reads its outside inputs once (once more for each
reduction, since a value that is summed and then used again is read twice) and writes what is used outside.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from trellis.inspect.source import source_of

from .trace import KERNELS, Step, inlined, is_literal, label_of, local_bytes, local_elements, local_shape, sub_jaxprs

# Vector operations an element costs, relative to an addition (polynomials and Newton steps in float32).
COSTS = collections.defaultdict(lambda: 1.0, {
    "exp": 12, "exp2": 10, "log": 12, "log1p": 14, "tanh": 16, "logistic": 16, "erf": 20, "sin": 24, "cos": 24,
    "pow": 24, "integer_pow": 2, "rsqrt": 5, "sqrt": 6, "div": 6, "rem": 10, "random_bits": 60, "threefry2x32": 60,
})  # fmt: skip
# No work of their own: names, views, and what a compiler folds into its neighbours.
FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "stop_gradient", "name", "optimization_barrier",
    "reshard", "sharding_constraint", "pvary", "pcast", "copy", "mesh_cast", "bitcast_convert_type", "iota", "split",
    "random_wrap", "random_unwrap", "pbroadcast", "psum_invariant",
}  # fmt: skip
_COLLECTIVES = {"psum", "psum_scatter", "reduce_scatter", "all_gather", "all_to_all", "ppermute", "pmax", "pmin",
                "all_gather_invariant", "unreduced_psum", "unreduced_reduce_scatter", "reduced_all_gather"}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """Work on one device.

    Attributes:
        kind: "product", "attention", "kernel" or "elementwise".
        flops: floating-point operations of the matrix units, once.
        vector: vector operations, weighted by `COSTS`, once.
        num_bytes: memory read and written, once.
        times: how often it runs in a step.
        direction: "forward", "recomputed", "backward", or "update" for what is not differentiated (the optimizer).
        source: `file.py:line (function)`.
        what: shapes on one device, for people.
        dims: of a product: (rows, contracted, columns) on one device.
        dtype: of the operands.
        label: what a person would call it, see `trellis.plan.trace.label_of`.
        order: its place in the program.
        looped: whether it is in a loop that holds one pass, as one over layers does; layers may be written out instead,
            and a loop over microbatches holds both passes.
    """

    kind: str
    flops: float
    vector: float
    num_bytes: float
    times: int
    direction: str
    source: str
    what: str
    dims: tuple[int, int, int] = (0, 0, 0)
    dtype: str = "bfloat16"
    label: str = ""
    order: int = 0
    looped: bool = False


def operations(step: Step) -> list[Op]:
    """Everything a step computes on one device, loops counted by their length."""
    ops = _walk(step.jaxpr.jaxpr, 1, "", itertools.count())
    return sorted(ops, key=lambda op: op.order)


def _walk(jaxpr: Any, times: int, outside: str, places: Iterator[int]) -> Iterator[Op]:
    fused = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        stack = f"{outside}/{eqn.source_info.name_stack}"
        place = next(places)
        inner = inlined(eqn)
        if inner is not None:
            yield from _walk(inner, times, stack, places)
        elif name == "scan":
            inside = _walk(eqn.params["jaxpr"].jaxpr, times * eqn.params["length"], stack, places)
            yield from _looped(inside) if eqn.params["unroll"] < eqn.params["length"] else inside
        elif name == "while":
            yield from _looped(_walk(eqn.params["body_jaxpr"].jaxpr, times, stack, places))
        elif name == "cond":
            branches = [list(_walk(b, times, stack, places)) for key, b in sub_jaxprs(eqn) if key == "branches"]
            yield from max(branches, key=lambda ops: sum(op.flops + op.vector for op in ops), default=[])
        elif name in ("dot_general", "ragged_dot", "ragged_dot_general"):
            yield dataclasses.replace(_product(eqn, times, outside), order=place)
        elif name in KERNELS:
            yield dataclasses.replace(_kernel(eqn, times, outside), order=place)
        elif name == "conv_general_dilated":
            yield dataclasses.replace(_convolution(eqn, times, outside), order=place)
        elif name not in _COLLECTIVES:
            fused.append((eqn, place))
    placed = {id(eqn): place for eqn, place in fused}
    yield from _groups(jaxpr, [eqn for eqn, _ in fused], times, outside, placed)


def _looped(ops: Iterator[Op]) -> list[Op]:
    inside = list(ops)
    if {"forward", "backward"} <= {op.direction for op in inside}:
        return inside
    return [dataclasses.replace(op, looped=True) for op in inside]


def _direction(eqn: Any, outside: str) -> str:
    stack = f"{outside}/{eqn.source_info.name_stack}"
    if "rematted_computation" in stack:
        return "recomputed"
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else "update"


def _product(eqn: Any, times: int, outside: str) -> Op:
    left, right, out = (eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval)
    a, b = local_shape(left), local_shape(right)
    if eqn.primitive.name == "dot_general":
        (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
        batch = math.prod(min(a[i], b[j]) for i, j in zip(batch_a, batch_b))
        inner = math.prod(min(a[i], b[j]) for i, j in zip(contract_a, contract_b))
        rows = math.prod(n for i, n in enumerate(a) if i not in (*contract_a, *batch_a))
        columns = math.prod(n for i, n in enumerate(b) if i not in (*contract_b, *batch_b))
    else:  # ragged_dot: tokens times one expert's matrix each
        batch, rows, inner, columns = 1, a[0], a[-1], b[-1]
    moved = local_bytes(left) + local_bytes(right) + local_bytes(out)
    what = f"{_show(left)} . {_show(right)}"
    return Op(
        "product", 2.0 * batch * rows * inner * columns, 0.0, moved, times, _direction(eqn, outside), source_of(eqn),
        what, (rows, inner, columns), str(left.dtype), label_of(eqn),
    )  # fmt: skip


def _convolution(eqn: Any, times: int, outside: str) -> Op:
    left, right, out = (eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval)
    kernel = math.prod(local_shape(right)) / max(right.shape[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    moved = local_bytes(left) + local_bytes(right) + local_bytes(out)
    flops = 2.0 * local_elements(out) * kernel
    what = f"convolution {_show(out)}"
    return Op("product", flops, 0.0, moved, times, _direction(eqn, outside), source_of(eqn), what, label=label_of(eqn))


def _kernel(eqn: Any, times: int, outside: str) -> Op:
    """An attention kernel from its operands: queries `[..., pos, head_dim]`, keys `[..., key_pos, head_dim]`.

    The scores' causal half counts: 2 products forward (4 b h s t d / 2 FLOPs), 5 in a backward kernel that makes all
    gradients. A backward kernel is one that takes more than three large operands.
    """
    arrays = [v.aval for v in eqn.invars if hasattr(v.aval, "shape") and len(v.aval.shape) >= 3 and _is_float(v.aval)]
    moved = sum(local_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
    source, direction = source_of(eqn), _direction(eqn, outside)
    if len(arrays) < 3:
        return Op("kernel", 0.0, 0.0, moved, times, direction, source, eqn.primitive.name, label=label_of(eqn))
    q, k = local_shape(arrays[0]), local_shape(arrays[1])
    name = eqn.primitive.name + str(eqn.params.get("name", ""))
    if "dot_product_attention" in name:  # cuDNN: batch pos heads head_dim
        batch_heads, length, keys, width = q[0] * q[2], q[1], k[1], q[3]
    else:
        batch_heads, length, keys, width = math.prod(q[:-2]), q[-2], k[-2], q[-1]
    products = 2
    if "bwd" in name or "dkv" in name or "dq" in name:
        results = [v.aval for v in eqn.outvars if len(getattr(v.aval, "shape", ())) >= 3]
        alone = "dq" in name and "dkv" not in name
        products = 3 if alone else 5 if len(results) >= 3 or "dot_product" in name else 4
    flops = products * 2.0 * batch_heads * length * keys * width / 2
    vector = (products // 2) * batch_heads * length * keys / 2 * COSTS["exp"]
    dims = (length, width, keys)
    return Op(
        "attention",
        flops,
        vector,
        moved,
        times,
        direction,
        source,
        f"attention {_show(arrays[0])}",
        dims,
        label=label_of(eqn),
    )


def _is_float(aval: Any) -> bool:
    return "float" in str(getattr(aval, "dtype", ""))


def _show(aval: Any) -> str:
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int32": "i32"}
    return f"{short.get(str(aval.dtype), str(aval.dtype))}[{','.join(map(str, local_shape(aval)))}]"


def _groups(jaxpr: Any, eqns: list, times: int, outside: str, placed: dict) -> Iterator[Op]:
    """Fused groups: connected equations of one direction and one region."""
    parent = {id(eqn): id(eqn) for eqn in eqns}

    def root(key: int) -> int:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    for eqn in eqns:
        for var in eqn.invars:
            if not is_literal(var) and var in made and _direction(made[var], outside) == _direction(eqn, outside):
                parent[root(id(eqn))] = root(id(made[var]))
    users: dict[Any, list] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if not is_literal(var):
                users[var].append(eqn)
    members: dict[int, list] = collections.defaultdict(list)
    for eqn in eqns:
        members[root(id(eqn))].append(eqn)
    outputs = {var for var in jaxpr.outvars if not is_literal(var)}
    for group in members.values():
        for op in _group(group, users, outputs, times, outside):
            yield dataclasses.replace(op, order=min(placed[id(eqn)] for eqn in group))


def _group(group: list, users: dict, outputs: set, times: int, outside: str) -> Iterator[Op]:
    inside = {id(eqn) for eqn in group}
    made = {var for eqn in group for var in eqn.outvars}
    vector = reads = writes = 0.0
    seen, heaviest = set(), (0.0, group[0])
    for eqn in group:
        name = eqn.primitive.name
        large = max([local_elements(v.aval) for v in (*eqn.invars, *eqn.outvars)], default=0)
        if name not in FREE and not name.endswith("_cast_p"):
            cost = COSTS[name] * large
            vector += cost
            if source_of(eqn) or not source_of(heaviest[1]):
                heaviest = max(heaviest, (cost, eqn), key=lambda pair: pair[0])
        if name in ("gather", "dynamic_slice"):  # reads what it picks, not the whole table
            reads += local_bytes(eqn.outvars[0].aval)
            writes += local_bytes(eqn.outvars[0].aval)
            continue
        if name in ("scatter-add", "scatter_add", "scatter", "dynamic_update_slice"):
            update = eqn.invars[1 if name == "dynamic_update_slice" else 2]
            reads += 2 * local_bytes(update.aval)
            writes += local_bytes(update.aval)
            continue
        if name.startswith("reduce_") or name in ("argmax", "cumsum"):
            reads += sum(local_bytes(v.aval) for v in eqn.invars if not is_literal(v) and _wide(v, eqn))
        for var in eqn.invars:
            if not is_literal(var) and var not in made and var not in seen:
                seen.add(var)
                reads += local_bytes(var.aval)
    for var in made:
        used_outside = var in outputs or any(id(user) not in inside for user in users[var])
        if used_outside:
            writes += local_bytes(var.aval)
    if vector == 0 and reads + writes == 0:
        return
    if all(eqn.primitive.name in FREE or eqn.primitive.name.endswith("_cast_p") for eqn in group):
        return
    eqn = heaviest[1]
    what = f"{len(group)} fused, {_show(eqn.outvars[0].aval)}"
    direction = _direction(eqn, outside)
    yield Op(
        "elementwise", 0.0, vector, reads + writes, times, direction, source_of(eqn), what, label=label_of(eqn)
    )  # fmt: skip


def _wide(var: Any, eqn: Any) -> bool:
    return local_elements(var.aval) > local_elements(eqn.outvars[0].aval)
