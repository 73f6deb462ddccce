"""What a program computes on one device: every product, kernel and fused elementwise group, with its FLOPs and bytes.

Products (`dot_general`) are exact from the types. Kernels (attention) state their own work, and loops over experts'
rows how often they run (`trellis.program.said`). Everything else is elementwise or a reduction, which the compiler
fuses: operations that are connected through such values form one group, which reads its outside inputs once (once more
for each reduction, since a value that is summed and then used again is read twice) and writes what is used outside.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from trellis.inspect.apart import PRODUCTS, copied, turned
from trellis.program import Body, Operation, Program, Value
from trellis.program.manual import COLLECTIVES
from trellis.program.reading import ENTER, KERNELS, LEAVE, REDUCTIONS
from trellis.program.said import (
    anew_said,
    grouped_said,
    lies_so,
    mask_said,
    row_said,
    share_filled,
    turns_said,
    work_said,
)
from trellis.program.scopes import turns_written_out
from trellis.program.sizes import window_pairs

# Vector operations an element costs, relative to an addition (polynomials and Newton steps in float32).
COSTS = collections.defaultdict(lambda: 1.0, {
    "exp": 12, "exp2": 10, "log": 12, "log1p": 14, "tanh": 16, "logistic": 16, "erf": 20, "sin": 24, "cos": 24,
    "pow": 24, "integer_pow": 2, "rsqrt": 5, "sqrt": 6, "div": 6, "rem": 10, "random_bits": 60, "threefry2x32": 60,
})  # fmt: skip
# No work of their own: names, views, and what a compiler folds into its neighbours.
FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "name", "optimization_barrier",
    "reshard", "sharding_constraint", "pvary", "pcast", "copy", "mesh_cast", "bitcast_convert_type", "iota", "split",
    "random_wrap", "random_unwrap", "layout_constraint",
}  # fmt: skip
# Operations that repeat their operand, or pass it on.
_SPREADS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pcast", "pvary", ENTER, LEAVE}
# Operations that write a part of their first operand, and which operand they write there; those that combine it with
# what is there read that, too.
_COMBINES = tuple(f"scatter-{how}" for how in ("add", "sub", "mul", "min", "max"))
UPDATES = {"dynamic_update_slice": 1, "scatter": 2} | dict.fromkeys(_COMBINES, 2)
# How much longer copies between what a loop keeps and one turn's take than streamed bytes: by libtpu's schedules, and
# on an H200, where a step of Llama 1B with layers in a loop took 42 ms more than without for copies of 26 ms
# (benchmarks/results/accelerator_h200.txt).
COPIED = {"tpu": 2.0, "gpu": 1.6}
# Why work is by itself: an array is laid out anew, rows are gathered or were, or a turn's value is a loop's.
Alone = Literal["", "laid out anew", "turned", "gathered", "of gathered rows", "copied"]
ANEW: Alone = "laid out anew"
TURNED: Alone = "turned"
STACKED: Alone = "copied"
# How much longer a table's turn takes than streamed bytes, by libtpu's schedule of one of 1,000,000 words on v5e.
_TURN = 3.0
# Kinds of pieces for which libtpu's schedule has no estimate: they are kernels.
UNSCHEDULED = ("attention", "kernel", "grouped")
# The kind of pieces that copy between a device's memory and the host's.
HOST_COPY = "host copy"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work on one device.

    Attributes:
        kind: "product", "grouped" (rows sorted by group with a matrix for each, by a kernel), "attention", "kernel",
            "elementwise", or "host copy" (between the device's memory and the host's).
        flops: floating-point operations of the matrix units, once.
        vector: vector operations, weighted by `COSTS`, once.
        num_bytes: memory read and written, or copied to or from the host, once.
        times: how often it runs in a call of the program.
        direction: "forward", "recomputed", "backward", or "update" for what is not differentiated (the optimizer).
        source: `file.py:line (function)`.
        what: shapes on one device, for people.
        dims: for a product: (rows, contracted, columns) on one device; for attention: (0, keys that a query sees, 0).
        last: for a product: the last of several dimensions that each of these is made of; 0 where it is one.
        dtype: of the operands.
        label: what a person would call it, see `Operation.label`.
        number: its place in the program.
        slower: how much longer its bytes take than streamed ones.
        alone: for elementwise work that no compiler makes a part of what is around it, what it is.
        whole: for attention, whether a kernel's queries see all of its keys.
        looped: whether it is in a loop that holds one pass, such as one over layers; layers may be unrolled instead,
            and a loop over microbatches holds both passes.
        turns: in how many turns of loops that are written out the same is done, each a piece.
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
    last: tuple[int, int, int] = (0, 0, 0)
    dtype: str = "bfloat16"
    label: str = ""
    number: int = 0
    slower: float = 1.0
    alone: Alone = ""
    whole: bool = False
    looped: bool = False
    turns: int = 1


def work(program: Program, load: float = 1.0, kind: str = "") -> list[Piece]:
    """Everything a program computes on one device, loops counted as often as they run.

    Args:
        program: the program.
        load: rows that experts on the fullest device get, in those of an even load.
        kind: of the chip, as in `Chip`. The compilers of "tpu" make gathers by themselves, and copies of what loops
            keep for kernels; those of "gpu" copies of what loops keep for kernels and products (`inspect/apart.py`).
    """
    return sorted(_pieces(program, load, kind), key=lambda piece: piece.number)


def _pieces(body: Body, load: float, kind: str) -> Iterator[Piece]:
    fused, apart = [], kind == "tpu"
    for operation in body.operations:
        name = operation.name
        inside = [list(_pieces(inner, load, kind)) for inner in operation.bodies]
        if name == "scan":
            is_loop = operation.params["unroll"] < operation.params["length"]
            yield from _looped(inside[0]) if is_loop else inside[0]
            yield from _copies(operation, kind) if is_loop and kind in COPIED else ()
        elif name == "while":
            turns = turns_said(operation, load)
            pieces = [dataclasses.replace(piece, times=piece.times * turns) for piece in inside[1]]
            yield from _looped(pieces) if turns else ()
        elif inside:
            yield from max(inside, key=lambda pieces: sum(p.times * (p.flops + p.vector) for p in pieces))
        elif name in PRODUCTS:
            yield _product(operation, load)
        elif name in KERNELS:
            yield _kernel(operation, load)
        elif name == "conv_general_dilated":
            yield _convolution(operation)
        elif slower := anew_said(operation):
            yield _alone(operation, ANEW, slower)
        elif apart and name == "gather":
            yield _alone(operation, "gathered")
        elif apart and turned(operation):
            whole = max(operation.operands[0], operation.results[0], key=lambda value: value.num_bytes)
            yield _alone(operation, TURNED, _TURN, whole)
        elif operation.crosses:
            yield from _crossings(operation)
        elif name not in COLLECTIVES and name not in (ENTER, LEAVE) and not lies_so(operation):
            fused.append(operation)
    yield from _groups(fused, set(body.results), apart)


def _alone(operation: Operation, what: Alone, slower: float = 1.0, array: Value | None = None) -> Piece:
    """What reads and writes an array, its result unless it is another, and is no part of what is around it."""
    array = operation.results[0] if array is None else array
    said, moved = f"{_show(array)} {what}", 2.0 * array.num_bytes
    return _piece(operation, "elementwise", said, num_bytes=moved, slower=slower, alone=what)


def _copies(scan: Operation, kind: str) -> Iterator[Piece]:
    for value, place in copied(scan, kind):
        counted = dict(num_bytes=2.0 * value.num_bytes, slower=COPIED[kind], alone=STACKED)
        piece = _piece(place, "elementwise", f"{_show(value)} copied, of a loop's stack", **counted)
        yield dataclasses.replace(piece, times=scan.times * scan.params["length"], direction=scan.direction)


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
        turns=turns_written_out(operation.scope),
        **{"flops": 0.0, "vector": 0.0, "number": operation.number} | counted,
    )


def _crossings(operation: Operation) -> Iterator[Piece]:
    for before, after in zip(operation.operands, operation.results, strict=True):
        if before.on_host != after.on_host:
            what = f"{_show(after)} {'to' if after.on_host else 'from'} the host"
            yield _piece(operation, HOST_COPY, what, num_bytes=float(after.num_bytes))


def _product(operation: Operation, load: float) -> Piece:
    left, right, out = *operation.operands[:2], operation.results[0]
    (a, b), share, last = operation.taken or (left.local_shape, right.local_shape), 1.0, (0, 0, 0)
    if operation.name == "dot_general":
        (contract_a, contract_b), (batch_a, batch_b) = operation.params["dimension_numbers"]
        batch = math.prod(min(a[i], b[j]) for i, j in zip(batch_a, batch_b))
        inner = math.prod(min(a[i], b[j]) for i, j in zip(contract_a, contract_b))
        in_rows = [n for i, n in enumerate(a) if i not in (*contract_a, *batch_a)]
        in_columns = [n for i, n in enumerate(b) if i not in (*contract_b, *batch_b)]
        rows, columns = math.prod(in_rows), math.prod(in_columns)
        last = tuple(s[-1] if len(s) > 1 else 0 for s in (in_rows, [a[i] for i in sorted(contract_a)], in_columns))
    elif operation.name == "scaled_matmul_wrapper":
        (batch, rows, inner), columns = a, b[1]
    else:  # each group of rows with its own matrix; kernels pass over rows that are not filled
        share = share_filled(operation, load)
        batch, rows, inner, columns = 1, round(a[0] * share), a[-1], b[-1]
    return _piece(
        operation,
        "grouped" if operation.name.startswith("ragged") else "product",
        f"{_show(left)} . {_show(right)}",
        flops=2.0 * batch * rows * inner * columns,
        num_bytes=sum(v.num_bytes for v in (*operation.operands, out)) - (1 - share) * (left.num_bytes + out.num_bytes),
        dims=(rows, inner, columns),
        last=last,
        dtype=str(left.aval.dtype),
    )


def _convolution(operation: Operation) -> Piece:
    """Padding, and zeros between elements (as in the gradient of one with strides), take no multiplications."""
    (left, right), out, params = operation.operands[:2], operation.results[0], operation.params
    numbers = params["dimension_numbers"]
    flops = 2.0 * out.num_elements * right.local_shape[numbers.rhs_spec[1]]
    dims = zip(numbers.out_spec[2:], numbers.rhs_spec[2:], numbers.lhs_spec[2:])
    for index, (step, tap, place) in enumerate(dims):
        pairs = window_pairs(
            out.shape[step],
            right.shape[tap],
            left.shape[place],
            stride=params["window_strides"][index],
            spread=params["rhs_dilation"][index],
            gaps=params["lhs_dilation"][index],
            before=params["padding"][index][0],
        )
        flops *= pairs / max(out.shape[step], 1) * right.local_shape[tap] / max(right.shape[tap], 1)
    moved = left.num_bytes + right.num_bytes + out.num_bytes
    return _piece(operation, "product", f"convolution {_show(out)}", flops=flops, num_bytes=moved)


def _kernel(operation: Operation, load: float) -> Piece:
    """A kernel, by what its author says of it; if nothing is said, it only moves its operands and results."""
    arrays = [v for v in (*operation.operands, *operation.results) if hasattr(v.aval, "shape")]
    moved = sum(v.num_bytes for v in arrays)
    largest = max(operation.operands, key=lambda value: value.num_bytes)
    if (found := grouped_said(operation, load)) is not None:
        flops, dims, filled = found
        # Weights have three dimensions, tables one. A kernel reads rows that it gathers as often as it takes them.
        wide = [v for v in arrays if len(v.local_shape) == 2]
        moved += sum(filled * v.num_bytes / v.local_shape[0] - v.num_bytes for v in wide)
        what, dtype = f"grouped {_show(largest)}", str(largest.aval.dtype)
        return _piece(operation, "grouped", what, flops=flops, num_bytes=moved, dims=dims, dtype=dtype)
    if (of_rows := row_said(operation, load)) is not None:
        each, share = of_rows
        what, vector = f"activation {_show(largest)}", each * share * largest.num_elements
        return _piece(operation, "kernel", what, vector=vector, num_bytes=share * moved)
    kind, flops, keys = work_said(operation) or ("kernel", 0.0, 0)
    whole = kind == "attention" and mask_said(operation.scope) is None
    what = f"{kind} {_show(largest)}"
    return _piece(operation, kind, what, flops=flops, num_bytes=moved, whole=whole, dims=(0, keys, 0))


def _show(value: Value) -> str:
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int32": "i32"}
    name = str(value.aval.dtype)
    return f"{short.get(name, name)}[{','.join(map(str, value.local_shape))}]"


def _groups(operations: list[Operation], outputs: set[Value], apart: bool) -> Iterator[Piece]:
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
        yield from _group(group, outputs, apart)


def _group(group: list[Operation], outputs: set[Value], apart: bool) -> Iterator[Piece]:
    inside = set(group)
    made = {value for operation in group for value in operation.results}
    vector = reads = writes = 0.0
    seen: set[Value] = set()
    updated: set[Value] = set()  # whose memory is an operand's
    heaviest, most = group[0], 0.0
    for operation in group:
        name = operation.name
        if not _free(operation):
            cost = COSTS[name] * _elements(operation)
            vector += cost
            if (operation.source or not heaviest.source) and cost > most:
                heaviest, most = operation, cost
        if name in ("gather", "dynamic_slice"):  # reads what it picks, not the whole table
            reads += operation.results[0].num_bytes
            continue
        if name in UPDATES:  # in place: the update, and what a sum adds it to
            update = operation.operands[UPDATES[name]]
            reads += update.num_bytes * ((update not in made) + (name in _COMBINES))
            writes += update.num_bytes
            updated.update(operation.results)
            continue
        if name in REDUCTIONS or name.startswith(("arg", "cum")):
            reads += sum(v.num_bytes for v in operation.inputs if v.num_elements > operation.results[0].num_elements)
        for value in map(_spread, operation.inputs):
            if value not in made and value not in seen and value.literal is None:
                seen.add(value)
                reads += value.num_bytes
    written = {value for value in made if value in outputs}
    written |= {_spread(value) for value in made - outputs if not inside.issuperset(value.readers)} & made
    writes += sum(value.num_bytes for value in written - updated)
    if (vector == 0 and reads + writes == 0) or all(map(_free, group)):
        return
    what = f"{len(group)} fused, {_show(heaviest.results[0])}"
    first = min(operation.number for operation in group)
    # What is made of gathered rows reads them where the gather wrote them.
    gathered = apart and any(value.maker and value.maker.name == "gather" for o in group for value in o.inputs)
    counted = dict(vector=vector, num_bytes=reads + writes, alone="of gathered rows" if gathered else "")
    yield _piece(heaviest, "elementwise", what, number=first, **counted)


def _spread(value: Value) -> Value:
    """What is in memory for a value: if it repeats a smaller one, that, since compilers repeat it where it is read.

    JAX moves constants, such as the zeros that a mask selects, out of loops; compilers move them back.
    """
    while True:
        if value.maker is None:
            before = value.outer if value.fixed else None
        else:
            before = value.maker.operands[0] if value.maker.name in _SPREADS else None
        if before is None or before.num_bytes > value.num_bytes:
            return value
        value = before


def _elements(operation: Operation) -> int:
    """How many elements an operation computes: if a part is picked or written, no more than that part."""
    values = (*operation.operands, *operation.results)
    if operation.name in ("gather", "dynamic_slice"):
        values = operation.results
    elif operation.name in UPDATES:
        values = operation.operands[UPDATES[operation.name] :][:1]
    return max([value.num_elements for value in values], default=0)


def _free(operation: Operation) -> bool:
    return operation.name in FREE or operation.name.endswith(("_cast", "_cast_p"))
