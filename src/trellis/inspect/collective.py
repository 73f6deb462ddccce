"""A collective of a compiled program, whichever compiler wrote it, and in whichever form."""

import dataclasses
from collections.abc import Iterator

from trellis.inspect.hlo import Array, Instruction, Program, source_target_pairs
from trellis.program.said import share_sent

# A collective's operation, and the ledger's kind.
KINDS = {
    "all-gather": "all-gather",
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        name: of its instruction.
        kind: one of the ledger's.
        groups: the devices that take part together; for a permute, who sends to whom.
        arrays: what a device gives into it; several if the compiler has combined several into one, even as one long
            array.
        times: how often it runs.
        origin: the instruction that says where it is from: its own, or that of the fusion it is in.
        asynchronous: whether it runs beside other work, as far as the text says.
        reduction: what it takes of what devices hold, if it reduces: "sum", "maximum" or "minimum".
        sent: the share of its arrays that is sent, for an exchange of as many rows as there are.
    """

    name: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    arrays: tuple[Array, ...]
    times: int
    origin: Instruction
    asynchronous: bool
    reduction: str = "sum"
    sent: float = 1.0

    @property
    def size(self) -> int:
        """How many devices take part together."""
        return len(self.groups[0])

    @property
    def op_name(self) -> str:
        """JAX's name of what it is from."""
        return self.origin.quoted("op_name") or ""

    def payload(self, array: Array) -> int:
        """Bytes of one of its arrays, as `trellis.program.moves` counts them."""
        return round(array.num_bytes * (self.size if self.kind == "all-gather" else 1) * self.sent)


def collectives_in(program: Program, num_devices: int, load: float | None = None) -> Iterator[Collective]:
    """The collectives of a compiled program.

    An asynchronous pair counts once, at its start; a loop's body counts as often as the loop runs; an all-reduce that
    a TPU program slices inside the same fusion is the reduce-scatter that it is.
    """
    for instruction, times, computation in program.walk(load=load):
        kind = KINDS.get(instruction.op.removesuffix("-start"))
        if kind is None or _continued(program, computation, instruction):
            continue
        arrays = [a for name in instruction.operands if (i := program.by_name.get(name)) for a in i.results]
        if instruction.op.startswith("collective-permute"):
            if not _combined(instruction, len(arrays)):
                arrays = arrays[:1]  # the in-place form has buffers and indices after it
            groups = source_target_pairs(instruction.attribute("source_target_pairs") or "")
        else:
            if instruction.op.startswith("ragged"):
                arrays = arrays[:1]
            groups = instruction.groups() or [tuple(range(num_devices))]
        if not arrays or not groups:
            continue
        if kind == "all-reduce" and len(instruction.operands) == 1:
            arrays = _laid_end_to_end(program, instruction.operands[0]) or arrays
        if kind == "all-reduce" and _scattered(program, computation, instruction):
            kind = "reduce-scatter"
        origin = instruction if instruction.quoted("op_name") else program.callers.get(computation, instruction)
        beside = _is_async(program, computation, instruction)
        combine = program.combined_by(instruction)
        taken = combine if combine in ("maximum", "minimum") else "sum"
        ragged = instruction.op.startswith("ragged")
        sent = share_sent(origin.quoted("op_name") or "", arrays[0].shape[0], load) if ragged else 1.0
        yield Collective(instruction.name, kind, tuple(groups), tuple(arrays), times, origin, beside, taken, sent)


def _combined(permute: Instruction, arrays: int) -> bool:
    """Whether a permute sends several arrays at once: each of them is among its results, too."""
    results = len(permute.results)
    if permute.op == "collective-permute":
        return results == arrays
    return permute.type.startswith("((") and results >= 2 * arrays


def _laid_end_to_end(program: Program, operand: str) -> list[Array]:
    """The arrays that CUDA's compiler has laid end to end to sum them as one; none if the user has."""
    made = program.by_name.get(operand)
    if made is not None and made.op == "fusion":
        (inside,) = made.called().get("calls", [""])
        made = program.root(inside)
    if made is None or made.op != "concatenate" or (made.quoted("op_name") or "").endswith("/concatenate"):
        return []
    pieces = [piece for name in made.operands if (i := program.by_name.get(name)) for piece in i.results]
    return pieces if all(len(piece.shape) == 1 for piece in pieces) else []


def _scattered(program: Program, computation: str, reduce: Instruction) -> bool:
    """Whether an all-reduce inside a fused computation is sliced there: a TPU's fused reduce-scatter."""
    if computation == program.entry:
        return False
    instructions = program.computations[computation]
    results = {reduce.name} | {
        i.name for i in instructions if i.op == "get-tuple-element" and reduce.name in i.operands
    }
    return any(i.op == "dynamic-slice" and i.operands[0] in results for i in instructions)


def _continued(program: Program, computation: str, instruction: Instruction) -> bool:
    """Whether this is a later step of a TPU's asynchronous collective fusion, which repeats its collective in the
    fusion that starts it, in the products it runs beside, and in the fusion that waits for it."""
    if '"async_collective_fusion_config"' not in instruction.attributes:
        return False
    return not any("AsyncCollectiveStart" in i.attributes for i in program.computations[computation])


def _is_async(program: Program, computation: str, instruction: Instruction) -> bool:
    """Whether it runs beside other work, as far as the text says."""
    if '"is_sync":true' in instruction.attributes:
        return False
    caller = program.callers.get(computation)
    wrapped = caller is not None and caller.op in ("async-start", "call-start")
    return wrapped or instruction.op.endswith("-start") or '"async_collective_fusion_config"' in instruction.attributes
