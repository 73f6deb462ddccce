"""What a program computes on one device: every product, kernel and fused elementwise group, with its FLOPs and bytes.

Products (`dot_general`) are exact from the types. Kernels (attention) are counted from the shapes of their operands
and the causal half of the scores. Everything else is elementwise or a reduction, which the compiler fuses: operations
that are connected through such values form one group, which reads its outside inputs once (once more for each
reduction, since a value that is summed and then used again is read twice) and writes what is used outside.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator

from trellis.program import Body, Operation, Program, Value
from trellis.program.manual import COLLECTIVES
from trellis.program.reading import ENTER, KERNELS, LEAVE

# Vector operations an element costs, relative to an addition (polynomials and Newton steps in float32).
COSTS = collections.defaultdict(lambda: 1.0, {
    "exp": 12, "exp2": 10, "log": 12, "log1p": 14, "tanh": 16, "logistic": 16, "erf": 20, "sin": 24, "cos": 24,
    "pow": 24, "integer_pow": 2, "rsqrt": 5, "sqrt": 6, "div": 6, "rem": 10, "random_bits": 60, "threefry2x32": 60,
})  # fmt: skip
# No work of their own: names, views, and what a compiler folds into its neighbours.
FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "stop_gradient", "name", "optimization_barrier",
    "reshard", "sharding_constraint", "pvary", "pcast", "copy", "mesh_cast", "bitcast_convert_type", "iota", "split",
    "random_wrap", "random_unwrap",
}  # fmt: skip
PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work on one device.

    Attributes:
        kind: "product", "attention", "kernel" or "elementwise".
        flops: floating-point operations of the matrix units, once.
        vector: vector operations, weighted by `COSTS`, once.
        num_bytes: memory read and written, once.
        times: how often it runs in a call of the program.
        direction: "forward", "recomputed", "backward", or "update" for what is not differentiated (the optimizer).
        source: `file.py:line (function)`.
        what: shapes on one device, for people.
        dims: of a product: (rows, contracted, columns) on one device.
        dtype: of the operands.
        label: what a person would call it, see `Operation.label`.
        number: its place in the program.
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
    number: int = 0
    looped: bool = False


def work(program: Program) -> list[Piece]:
    """Everything a program computes on one device, loops counted by their length."""
    return sorted(_pieces(program), key=lambda piece: piece.number)


def _pieces(body: Body) -> Iterator[Piece]:
    fused = []
    for operation in body.operations:
        name = operation.name
        inside = [list(_pieces(inner)) for inner in operation.bodies]
        if name == "scan":
            yield from _looped(inside[0]) if operation.params["unroll"] < operation.params["length"] else inside[0]
        elif name == "while":
            yield from _looped(inside[1])
        elif inside:
            yield from max(inside, key=lambda pieces: sum(piece.flops + piece.vector for piece in pieces))
        elif name in PRODUCTS:
            yield _product(operation)
        elif name in KERNELS:
            yield _kernel(operation)
        elif name == "conv_general_dilated":
            yield _convolution(operation)
        elif name not in COLLECTIVES and name not in (ENTER, LEAVE):
            fused.append(operation)
    yield from _groups(fused, set(body.results))


def _looped(pieces: list[Piece]) -> list[Piece]:
    if {"forward", "backward"} <= {piece.direction for piece in pieces}:
        return pieces
    return [dataclasses.replace(piece, looped=True) for piece in pieces]


def _piece(operation: Operation, kind: str, what: str, **counted) -> Piece:
    return Piece(
        kind=kind,
        times=operation.times,
        direction=operation.direction,
        source=operation.source,
        what=what,
        label=operation.label,
        **{"flops": 0.0, "vector": 0.0, "number": operation.number} | counted,
    )


def _product(operation: Operation) -> Piece:
    left, right, out = *operation.operands[:2], operation.results[0]
    a, b = left.local_shape, right.local_shape
    if operation.name == "dot_general":
        (contract_a, contract_b), (batch_a, batch_b) = operation.params["dimension_numbers"]
        batch = math.prod(min(a[i], b[j]) for i, j in zip(batch_a, batch_b))
        inner = math.prod(min(a[i], b[j]) for i, j in zip(contract_a, contract_b))
        rows = math.prod(n for i, n in enumerate(a) if i not in (*contract_a, *batch_a))
        columns = math.prod(n for i, n in enumerate(b) if i not in (*contract_b, *batch_b))
    else:  # ragged_dot: tokens times one expert's matrix each
        batch, rows, inner, columns = 1, a[0], a[-1], b[-1]
    return _piece(
        operation,
        "product",
        f"{_show(left)} . {_show(right)}",
        flops=2.0 * batch * rows * inner * columns,
        num_bytes=left.num_bytes + right.num_bytes + out.num_bytes,
        dims=(rows, inner, columns),
        dtype=str(left.aval.dtype),
    )


def _convolution(operation: Operation) -> Piece:
    left, right, out = *operation.operands[:2], operation.results[0]
    features = right.shape[operation.params["dimension_numbers"].rhs_spec[0]]
    flops = 2.0 * out.num_elements * math.prod(right.local_shape) / max(features, 1)
    moved = left.num_bytes + right.num_bytes + out.num_bytes
    return _piece(operation, "product", f"convolution {_show(out)}", flops=flops, num_bytes=moved)


def _kernel(operation: Operation) -> Piece:
    """An attention kernel from its operands: queries `[..., pos, head_dim]`, keys `[..., key_pos, head_dim]`.

    The scores' causal half counts: 2 products forward (4 b h s t d / 2 FLOPs), 5 in a backward kernel that makes all
    gradients. A backward kernel is one that takes more than three large operands.
    """
    arrays = [v for v in operation.operands if len(v.shape) >= 3 and "float" in str(v.aval.dtype)]
    moved = sum(v.num_bytes for v in (*operation.operands, *operation.results) if hasattr(v.aval, "shape"))
    if len(arrays) < 3:
        return _piece(operation, "kernel", operation.name, num_bytes=moved)
    q, k = arrays[0].local_shape, arrays[1].local_shape
    name = operation.name + str(operation.params.get("name", ""))
    if "dot_product_attention" in name:  # cuDNN: batch pos heads head_dim
        batch_heads, length, keys, width = q[0] * q[2], q[1], k[1], q[3]
    else:
        batch_heads, length, keys, width = math.prod(q[:-2]), q[-2], k[-2], q[-1]
    products = 2
    if "bwd" in name or "dkv" in name or "dq" in name:
        results = [v for v in operation.results if len(v.shape) >= 3]
        alone = "dq" in name and "dkv" not in name
        products = 3 if alone else 5 if len(results) >= 3 or "dot_product" in name else 4
    flops = products * 2.0 * batch_heads * length * keys * width / 2
    return _piece(operation, "attention", f"attention {_show(arrays[0])}", flops=flops, num_bytes=moved)


def _show(value: Value) -> str:
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int32": "i32"}
    name = str(value.aval.dtype)
    return f"{short.get(name, name)}[{','.join(map(str, value.local_shape))}]"


def _groups(operations: list[Operation], outputs: set[Value]) -> Iterator[Piece]:
    """Fused groups: connected operations of one direction and one frame."""
    parent = {operation: operation for operation in operations}

    def root(operation: Operation) -> Operation:
        while parent[operation] is not operation:
            parent[operation] = parent[parent[operation]]
            operation = parent[operation]
        return operation

    for operation in operations:
        for value in operation.inputs:
            maker = value.maker
            if maker in parent and maker.frame is operation.frame and maker.direction == operation.direction:
                parent[root(operation)] = root(maker)
    members: dict[Operation, list[Operation]] = collections.defaultdict(list)
    for operation in operations:
        members[root(operation)].append(operation)
    for group in members.values():
        yield from _group(group, outputs)


def _group(group: list[Operation], outputs: set[Value]) -> Iterator[Piece]:
    inside = set(group)
    made = {value for operation in group for value in operation.results}
    vector = reads = writes = 0.0
    seen: set[Value] = set()
    heaviest, most = group[0], 0.0
    for operation in group:
        name = operation.name
        if not _free(operation):
            large = max([value.num_elements for value in (*operation.operands, *operation.results)], default=0)
            cost = COSTS[name] * large
            vector += cost
            if (operation.source or not heaviest.source) and cost > most:
                heaviest, most = operation, cost
        if name in ("gather", "dynamic_slice"):  # reads what it picks, not the whole table
            reads += operation.results[0].num_bytes
            writes += operation.results[0].num_bytes
            continue
        if name in ("scatter-add", "scatter_add", "scatter", "dynamic_update_slice"):
            update = operation.operands[1 if name == "dynamic_update_slice" else 2]
            reads += 2 * update.num_bytes
            writes += update.num_bytes
            continue
        if name.startswith("reduce_") or name in ("argmax", "cumsum"):
            reads += sum(v.num_bytes for v in operation.inputs if v.num_elements > operation.results[0].num_elements)
        for value in operation.inputs:
            if value not in made and value not in seen:
                seen.add(value)
                reads += value.num_bytes
    for value in made:
        if value in outputs or not inside.issuperset(value.readers):
            writes += value.num_bytes
    if (vector == 0 and reads + writes == 0) or all(map(_free, group)):
        return
    what = f"{len(group)} fused, {_show(heaviest.results[0])}"
    first = min(operation.number for operation in group)
    yield _piece(heaviest, "elementwise", what, vector=vector, num_bytes=reads + writes, number=first)


def _free(operation: Operation) -> bool:
    return operation.name in FREE or operation.name.endswith("_cast_p")
