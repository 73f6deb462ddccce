"""What a compiler makes no part of what is around it: kernels, loops, collectives and gathers of rows.

A loop has what its turns keep in one array for all of them. Where elementwise work makes such a value, or reads it,
that is where it writes and reads, and so do products on TPUs. What cannot is given a copy, of one turn, in memory of
its own: for each value that a kernel makes and a loop keeps, and for each that it keeps and a kernel reads. On GPUs
products are libraries' kernels.
"""

import math
from collections.abc import Iterator

from trellis.program import Body, Operation, Value
from trellis.program.flow import VIEWS
from trellis.program.manual import COLLECTIVES
from trellis.program.reading import KERNELS, LOOPS

PRODUCTS = ("dot_general", "scaled_matmul_wrapper", "ragged_dot", "ragged_dot_general")
# What passes its operands on, in the same order: nothing is made for them.
_SAME = VIEWS - {"slice"} | {"broadcast_in_dim", "pcast", "sharding_constraint"}
# What stands between a collective and what makes or reads an array: other steps of the same way, and casts.
_PASSED = frozenset({"reshard", "convert_element_type"})
# Numbers in a row of a TPU's tile.
_LANES = 128


def is_apart(operation: Operation, kind: str = "tpu") -> bool:
    """Whether an operation reads its operands, and writes its results, in memory of their own, on chips of a kind."""
    name = operation.name
    if name == "reshard":
        return not _is_view(operation)
    alone = name in KERNELS or name in LOOPS or name in COLLECTIVES or name.startswith("ragged")
    return alone or name in {"tpu": ("gather",), "gpu": PRODUCTS}.get(kind, ())


def copied(scan: Operation, kind: str = "tpu") -> Iterator[tuple[Value, Operation]]:
    """Values of one turn of a scan that are copied to what it keeps of all turns, or from there, each with an operation
    that says where: what makes it, or reads it."""
    (body,) = scan.bodies
    constants, carried = scan.carries
    for value in dict.fromkeys(body.results[carried:]):
        first = _origin(value)
        if first.literal is None and (first.maker is None or is_apart(first.maker, kind)):
            yield value, first.maker or scan
    for value in body.inputs[constants + carried :]:
        reader = next((reader for reader in _readers(value) if is_apart(reader, kind)), None)
        if reader is not None:
            yield value, reader


def turned(operation: Operation) -> bool:
    """Whether a TPU's compiler turns what a reshard gathers or scatters along the last axis of a table.

    Slices that end within a tile lie with that axis first, and come together like that. Products read and make both
    orders. Rows are looked up in the other order, and added to in it, and a loop holds its arrays in the one in which
    it adds to them.
    """
    if operation.name != "reshard" or operation.results[0].aval.ndim != 2:
        return False
    before, after = (value.local_shape[-1] for value in (operation.operands[0], operation.results[0]))
    if before == after or min(before, after) % _LANES == 0:
        return False
    if before < after:
        through = _PASSED | {"reduced_vary_cast", "reduced_vary_cast_p"}
        return any(reader.name in ("gather", *LOOPS) for reader in _readers(operation.results[0], through))
    made = _made_of(operation.operands[0])
    return made is not None and made.name in ("scatter-add", *LOOPS)


def _made_of(value: Value) -> Operation | None:
    """What makes a value, if elementwise work on arrays of its shape follows it."""
    shape = value.local_shape
    while (maker := value.maker) is not None and maker.name not in ("scatter-add", *LOOPS):
        like = (operand for operand in maker.inputs if operand.local_shape == shape)
        if (found := next(like, None)) is None:
            return maker
        value = found
    return maker


def made_at(operation: Operation) -> int:
    """The number of the operation that makes an operation's first operand; -1 if none here does."""
    maker = _origin(operation.operands[0], _PASSED).maker if operation.operands else None
    return -1 if maker is None else maker.number


def read_at(operation: Operation) -> int:
    """The number of the first operation that reads an operation's results; its own if none does."""
    readers = (reader.number for value in operation.results for reader in _readers(value, _PASSED))
    return min(readers, default=operation.number)


def in_lanes(body: Body) -> set[Value]:
    """The values that a TPU's compiler lays out with their last dimension in whole lanes: a Pallas kernel makes or
    reads them, their transposes, or what elementwise work makes of them."""
    made: set[Value] = set()
    read: set[Value] = set()
    for operation in body.operations:
        kernel = operation.name == "pallas_call"
        for result in operation.results:
            if kernel or made.intersection(_in_rows(operation, result)[:1]):
                made.add(result)
    for operation in reversed(body.operations):
        if operation.name == "pallas_call":
            read.update(operation.inputs)
        for result in read.intersection(operation.results):
            read.update(_in_rows(operation, result))
    return {value for value in made | read if value.local_shape and value.local_shape[-1] % _LANES}


def _in_rows(operation: Operation, result: Value) -> list[Value]:
    """The operands of which elementwise work makes a result, or of which it is another view, in rows of its length."""
    if is_apart(operation) or operation.name in PRODUCTS:
        return []
    operands = [operation.operands[result.position]] if _is_view(operation) else operation.inputs
    row, size = result.local_shape[-1:], math.prod(result.local_shape)
    return [each for each in operands if each.local_shape[-1:] == row and math.prod(each.local_shape) == size]


def _is_view(operation: Operation) -> bool:
    stays = lambda: operation.operands[0].num_bytes == operation.results[0].num_bytes
    return operation.name in _SAME or (operation.name == "reshard" and stays())


def _origin(value: Value, passing: frozenset[str] = frozenset()) -> Value:
    """What a value is another view of, or is made of by operations of these names alone."""
    while (maker := value.maker) is not None and (_is_view(maker) or maker.name in passing):
        value = maker.operands[value.position]
    return value


def _readers(value: Value, passing: frozenset[str] = frozenset()) -> Iterator[Operation]:
    """What reads a value, another view of it, or what operations of these names make of it."""
    for reader in value.readers:
        if _is_view(reader) or reader.name in passing:
            yield from _readers(reader.results[reader.operands.index(value)], passing)
        else:
            yield reader
