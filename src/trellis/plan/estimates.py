"""How long each instruction of a compiled step takes on its target, so that its schedule can be replayed.

TPU programs carry their compiler's estimate of each fusion. GPU programs carry none: there an instruction takes the
longer of its products at the matrix units' rate and its bytes at the memory's rate, and all of them together take as
long as the plan's computation. Kernels take what the plan has for their line of the program.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping

from jax.sharding import AbstractMesh, Mesh

from trellis.frames import in_a_library
from trellis.hardware.chips import Chip
from trellis.inspect.collective import Collective
from trellis.inspect.compiled import (
    collective_rows,
    cycles_of,
    direction_of,
    gathered_beside,
    gathered_by,
    gathered_bytes,
    product_of,
    program_of,
    scheduled_cycles,
)
from trellis.inspect.hlo import Instruction, Program
from trellis.inspect.replay import Replay, Sending, replay
from trellis.inspect.rows import Row
from trellis.inspect.touched import touched_bytes
from trellis.inspect.work import UNSCHEDULED
from trellis.plan.quick import Plan

# Names of kernels' custom calls: those of Mosaic, Triton and cuDNN.
_KERNELS = ("tpu_custom_call", "triton", "cudnn", "mosaic")


@dataclasses.dataclass(frozen=True)
class Estimates:
    """A compiled step, and how long each of its instructions takes.

    Attributes:
        program: the compiled step.
        computing: the seconds for which one run of an instruction computes.
        found: the collectives, each as the program has it and as a row of the ledger.
        sending: what the collectives need, and what the SparseCores do for gathers of rows, by the names of their
            instructions.
        gathers: the SparseCores' gathers of rows, and how often each runs.
        scheduled: seconds of everything but collectives and kernels by the compiler's own estimate; None if it gives
            none (GPU).
        kernels: seconds of what the compiler has no estimate for: kernels for attention and grouped products, as the
            plan has them, and gathers of rows that are not on SparseCores, by their bytes.
        load: as in `Program.walk`.
    """

    program: Program
    computing: Callable[[Instruction], float]
    found: tuple[tuple[Collective, Row], ...]
    sending: Mapping[str, Sending]
    gathers: tuple[tuple[Instruction, int], ...]
    scheduled: float | None
    kernels: float
    load: float

    def names_of(self, instruction: Instruction) -> list[str]:
        """An instruction's name, and the names of what an asynchronous start runs."""
        inside = self.program.inside(instruction) if instruction.op.endswith("-start") else ()
        return [instruction.name, *(inner.name for inner in inside)]

    def replay(self) -> Replay:
        """The step's schedule, replayed."""
        return replay(self.program, self.computing, self.sending, self.load)


def estimates(plan: Plan, text: str, mesh: Mesh | AbstractMesh) -> Estimates:
    """How long each instruction of a compiled step takes.

    Args:
        plan: the plan of the same step.
        text: the compiled step.
        mesh: the mesh that it was compiled for.
    """
    program, chip, load = program_of(text), plan.target.chip, plan.load
    kernels = kernel_seconds(plan)
    cycles = scheduled_cycles(program, load=load)
    scheduled = cycles / chip.clock if cycles and chip.clock else None
    known = _kernels(plan, program)
    if scheduled is None:
        bare = functools.cache(functools.partial(_by_rates, program, chip))  # keyed by the instruction's name
        others = lambda instruction: 0.0 if instruction.name in known else bare(instruction.name)
        longer = (plan.times.computation - kernels) / (replay(program, others, {}, load).computing or 1.0)
        computing = lambda instruction: known.get(instruction.name) or others(instruction) * longer
    else:
        kernels += sum(gathered_bytes(program, load=load).values()) / chip.streaming_bandwidth
        computing = lambda instruction: known.get(instruction.name) or _by_compiler(instruction, chip)
    found = tuple(collective_rows(program, mesh, load=load))
    sending = {collective.name: _sending(plan, row) for collective, row in found}
    beside = gathered_beside(program)
    gathers = tuple((i, times) for i, times, _ in program.walk(fusions=False, load=load) if i.name in beside)
    # One gather at a time has all of them, and the memory's rate.
    sending |= {
        name: Sending(moved / chip.streaming_bandwidth, ("SparseCores",), in_order=True)
        for name, moved in beside.items()
    }
    return Estimates(program, computing, found, sending, gathers, scheduled, kernels, load)


def kernel_seconds(plan: Plan) -> float:
    """Seconds of a step's kernels, by the plan."""
    return sum(line.seconds for line in plan.times.lines if line.kind in UNSCHEDULED)


def _sending(plan: Plan, row: Row) -> Sending:
    """What a collective needs: on GPUs, the one stream that all of NCCL's kernels run in; else its mesh axes' links."""
    seconds = plan.links.seconds(row.wire, row.axes, row.kind)
    return (
        Sending(seconds, ("stream",), in_order=True) if plan.target.chip.kind == "gpu" else Sending(seconds, row.axes)
    )


def _by_compiler(instruction: Instruction, chip: Chip) -> float:
    if cycles := cycles_of(instruction):
        return cycles / chip.clock if chip.clock else 0.0
    return gathered_by(instruction) / chip.streaming_bandwidth


def _by_rates(program: Program, chip: Chip, name: str) -> float:
    instruction = program.by_name[name]
    products = (product_of(program, i) for i in [instruction, *program.inside(instruction)])
    flops = sum(product.flops for product in products if product)
    return max(
        flops / (chip.bf16_flops * chip.matmul_efficiency),
        touched_bytes(program, instruction) / chip.streaming_bandwidth,
    )


def _kernels(plan: Plan, program: Program) -> dict[str, float]:
    """Seconds of one run of each kernel: what the plan has for its line and pass, shared by all runs of these.

    libtpu's own kernels for grouped products have lost their line: they share what the plan has for their pass and no
    other kernel accounts for.
    """
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for line in plan.times.lines:
        if line.kind in UNSCHEDULED:
            seconds[line.source, line.where] += line.seconds
    runs = collections.Counter[tuple[str, str]]()
    found = []
    for instruction, times, _ in program.walk(fusions=False, load=plan.load):
        target = instruction.quoted("custom_call_target") if instruction.op == "custom-call" else None
        if target and any(name in target for name in _KERNELS) and "metadata" not in instruction.name:
            line = program.source(instruction, in_a_library), direction_of(instruction.quoted("op_name"))
            runs[line] += times
            found.append((instruction.name, line))
    for (source, where), taken in list(seconds.items()):
        if (source, where) not in runs:
            seconds["", where] += taken
    return {name: seconds[line] / runs[line] for name, line in found if line in seconds}
