"""Which values of a program take memory: what compilers fuse, make in place, or make again where it is read.

Each rule was seen in the memory layouts of compiled train steps (libtpu 0.0.42; docs/plan.md has the errors that
remain), and says why a compiler does so.
"""

from trellis.mesh.platform import platform_of_abstract
from trellis.program import Body, Operation, Program, Value
from trellis.program.flow import VIEWS
from trellis.program.manual import COLLECTIVES
from trellis.program.reading import KERNELS, REDUCTIONS
from trellis.program.rules import CALLBACKS, Implied

# The lanes of a TPU's registers: a kernel's operands and results fill whole ones.
LANES = 128

# Operations that read operands from memory and write results there. Everything else is fused with what reads it.
_OPAQUE = KERNELS | CALLBACKS | set(COLLECTIVES) | set(
    "dot_general scaled_matmul_wrapper ragged_dot ragged_dot_general conv_general_dilated fft scan while cond sort "
    "gather reshard concatenate cumsum cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum "
    "reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add top_k optimization_barrier "
    "cholesky triangular_solve tridiagonal_solve lu qr geqrf householder_product eig eigh svd schur hessenberg "
    "tridiagonal".split()
)  # fmt: skip
# Elementwise work that a product does on its result before it writes it.
_EPILOGUES = {"add", "add_any", "sub", "mul", "convert_element_type", "neg", "div", "max"}
_VIEWS = VIEWS - {"transpose", "slice", "reduce_precision", "optimization_barrier"} | {
    "pcast", "mesh_cast", "bitcast_convert_type",
}  # fmt: skip


def writes(operation: Operation) -> bool:
    """Whether an operation's results are written to memory. Those of others exist once something that writes reads
    them, and until then keep alive what they are made of."""
    return operation.name in _OPAQUE or updates(operation) or reduces(operation) or operation.crosses


def reduces(operation: Operation) -> bool:
    """Whether it reduces its operands, which it reads as they are made: what is summed need not be in memory."""
    return operation.name in REDUCTIONS or operation.name.startswith("arg")


def read_in(body: Body, passes: tuple[str, ...]) -> set[Value]:
    """The values of a body that an operation of one of these passes reads, or that something is made of which is fused
    and read there."""
    found: set[Value] = set()
    for operation in reversed(body.operations):
        if operation.direction in passes or not (writes(operation) or found.isdisjoint(operation.results)):
            found.update(operation.operands)
    return found


def is_view(operation: Operation) -> bool:
    """Whether the result is the operand in memory, as it is."""
    if len(operation.inputs) != 1 or len(operation.results) != 1:
        return False
    if operation.name == "broadcast_in_dim":  # with further dimensions of size 1
        return operation.operands[0].num_bytes == operation.results[0].num_bytes
    return operation.name in _VIEWS or operation.name.endswith(("_cast", "_cast_p"))


def in_place(operation: Operation, position: int) -> Value | None:
    """The operand whose memory a result has: for updates, which write into their target, for fences, and for a reshard
    that moves nothing."""
    own = operation.operands[position if operation.name == "optimization_barrier" else 0]
    there = operation.name == "optimization_barrier" or updates(operation) or moves_nothing(operation)
    return own if own.literal is None and there else None


def updates(operation: Operation) -> bool:
    """Whether it writes a part of its first operand, and leaves the rest as it is."""
    return operation.name == "dynamic_update_slice" or operation.name.startswith("scatter")


def moves_nothing(operation: Operation) -> bool:
    """Whether this is a reshard that only changes the type: no device gets or gives anything."""
    if operation.name != "reshard":
        return False
    before, after = operation.operands[0], operation.results[0]
    return before.local_shape == after.local_shape and before.num_bytes == after.num_bytes and not before.state.pending


def stored_bytes(value: Value, in_lanes: bool = False) -> int:
    """Bytes of a device's memory that a value takes: 0 if it is in the host's.

    Args:
        value: an operand or result.
        in_lanes: whether its last dimension fills whole lanes, so that heads of 64 take twice their size.
    """
    if not in_lanes:
        return value.device_bytes
    last = value.local_shape[-1] if value.local_shape else LANES
    return value.num_bytes * (-(-last // LANES) * LANES) // max(last, 1)


def fused_results(body: Body) -> set[Operation]:
    """Operations that usually write but here do not: their results are made by what reads them."""
    return {o for o in body.operations if _partitioned_lookup(o) or _has_epilogue(o, body)}


def _partitioned_lookup(operation: Operation) -> bool:
    """A lookup by sharded indices, which is whole by its types and which the compiler partitions.

    `table.at[ids].get(out_sharding=...)` is traced as a lookup of everything and a slice of it, its gradient as a
    gather of all updates and a scatter of them into zeros; the compiler does the slice first, and does not gather the
    updates. Those of an array that is there are gathered.
    """
    result = operation.results[0] if operation.results else None
    readers = _readers(operation)
    names = {reader.name for reader in readers}
    if operation.name == "gather" and names == {"reshard"}:
        return all(reader.results[0].num_bytes < result.num_bytes for reader in readers)
    if operation.name == "reshard" and names and names <= {"scatter-add", "gather"}:
        return result.num_bytes > operation.operands[0].num_bytes and not any(map(_updates_an_array, readers))
    return False


def _updates_an_array(operation: Operation) -> bool:
    """Whether it scatters into something other than a constant's broadcast."""
    target = operation.operands[0]
    made = target.maker is not None and target.maker.name == "broadcast_in_dim"
    return operation.name.startswith("scatter") and not (made and target.maker.operands[0].literal is not None)


def _has_epilogue(operation: Operation, body: Body) -> bool:
    """A product whose result one elementwise operation reads: the compiler makes both as one."""
    if operation.name != "dot_general" or operation.results[0] in body.results:
        return False
    readers = _readers(operation)
    return len(readers) == 1 and readers[0].name in _EPILOGUES


def multiplies_as_read(program: Program) -> bool:
    """Whether products make their operands as they read them. On GPUs libraries' kernels read what is in memory."""
    return platform_of_abstract(program.device) != "cuda"


def _readers(operation: Operation) -> list[Operation]:
    """The operations that read the only result; none if it leaves the call that it is made in."""
    if len(operation.results) != 1:
        return []
    readers = operation.results[0].readers
    return readers if all(reader.frame is operation.frame for reader in readers) else []


def gathers_columns(operation: Operation) -> bool:
    """Whether the last of several dimensions is gathered: devices' parts come one after the other, so that the result
    is transposed and copied. (Inside layers the products take weights either way.)"""
    if operation.name != "reshard":
        return False
    before, after = operation.operands[0].local_shape, operation.results[0].local_shape
    return len(after) > 1 and after[-1] > before[-1] and after[:-1] == before[:-1]


def of_columns(implied: Implied) -> bool:
    """The same of a gather that an operation implies."""
    before, after = implied.before.axes, implied.after.axes
    last = len(after) > 1 and before[-1] != after[-1] and before[:-1] == after[:-1]
    return last and implied.move.kind == "all-gather"


def summed_whole(operation: Operation) -> int:
    """Bytes of a pending sum that a joint reduction over several mesh axes holds: it is made of all-reduces."""
    before, after = operation.operands[0].state.pending, operation.results[0].state.pending
    return operation.operands[0].num_bytes if len(before - after) > 1 else 0
