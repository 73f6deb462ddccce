"""A plan from types alone, made in seconds: what a step needs, moves and costs on hardware that is not here."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trellis.hardware.chips import Target
from trellis.hardware.described import described_devices
from trellis.inspect.ledger import ledger_of
from trellis.inspect.memory import Memory, memory_of
from trellis.inspect.moved import Moved
from trellis.inspect.rows import Ledger
from trellis.inspect.work import Alone, Piece, work
from trellis.named.pipeline.parts import Parts
from trellis.named.pipeline.schedule import Schedule
from trellis.plan.links import Links, links_of
from trellis.plan.prepared import Prepared, prepare
from trellis.plan.roofline import HIDING_OPTIONS, Times, times, work_line
from trellis.plan.turns import turns_of
from trellis.program import Program, trace
from trellis.program.said import refused_said
from trellis.program.sizes import itemsize
from trellis.run.config import Run
from trellis.train.checks import check_marks
from trellis.train.compilation import options_for
from trellis.train.flops import flops_per_token, num_parameters
from trellis.train.stages import schedule_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """A prediction of what a run needs on a target.

    Attributes:
        name: the run's name.
        target: the hardware.
        mesh: mesh axes and sizes.
        links: the links that each mesh axis runs over.
        tokens: tokens of a step.
        parameters: parameters of the model, without the padding of a vocabulary if it is a run's.
        model_flops: FLOPs of a step that count for MFU, over all devices, as the trainer counts them.
        memory: a device's memory at its highest point.
        ledger: what moves, at the assumed load.
        times: how long everything takes.
        work: every piece of work of a device.
        price: dollars for one device and hour, or None.
        load: rows that experts on the fullest device get, relative to an even load.
        schedule: the schedule of a pipeline's stages, or None.
        layers: the layers of each part of the pipeline, if their numbers differ.
        refused: why attention does without its platform's kernel, where it does.
        sequences: the sequences of a microbatch on a device; None if that is not known.
        state: bytes of all parameters and of what the optimizer keeps, each counted once.
    """

    name: str
    target: Target
    mesh: Mapping[str, int]
    links: Links
    tokens: int
    parameters: int
    model_flops: float
    memory: Memory
    ledger: Ledger
    times: Times
    work: tuple[Piece, ...]
    price: float | None = None
    load: float = 1.0
    schedule: Schedule | None = None
    layers: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()
    sequences: int | None = None
    state: int = 0

    @property
    def fits(self) -> bool:
        """Whether the memory's highest point is below what a program can allocate."""
        return self.memory.peak <= self.target.chip.hbm_bytes

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return self.times.seconds

    def alone(self, what: Alone) -> float:
        """Seconds of a step in which work is by itself that might be part of other work, of this kind."""
        return sum(work_line(piece, self.target.chip).seconds for piece in self.work if piece.alone == what)

    @property
    def mfu(self) -> float:
        """The model's FLOPs over what the devices could do at their bfloat16 peak in the predicted time; 0.0 if that is
        none."""
        able = self.seconds * self.target.num_devices * self.target.chip.bf16_flops
        return self.model_flops / able if able else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all devices; 0.0 if the step takes no time, because it computes and moves nothing."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """The cost at the given price for a device and hour."""
        if self.price is None:
            return None
        return self.price * self.target.num_devices / 3600 * 1e9 * self.seconds / max(self.tokens, 1)


def quick_plan(
    run: Run,
    target: Target,
    *,
    price: float | None = None,
    options: Sequence[str] | None = None,
    load: float = 1.0,
) -> Plan:
    """Plans a run from types, without compiling.

    Args:
        run: the run; the longest of several sequence lengths is planned.
        target: the hardware.
        price: dollars for one device and hour.
        options: names of compiler options in use, which may hide communication; the run's own if None.
        load: for a mixture of experts, the rows that the fullest device gets, relative to an even load.

    Raises:
        UserError: the mesh does not fill the target, or a size does not divide.
    """
    return plan_of(prepare(run, target, described_devices(target)), target, price=price, options=options, load=load)


def plan_of(
    prepared: Prepared,
    target: Target,
    *,
    price: float | None = None,
    options: Sequence[str] | None = None,
    load: float = 1.0,
) -> Plan:
    """The same for a train step that is already prepared.

    Raises:
        UserError: a name of kept values is not one of the model's.
    """
    run = prepared.run
    if options is None:
        given = options_for(target.chip.kind, run.compiler_options, target.num_devices)
        options = [name for name, value in given.items() if value.lower() not in ("false", "0")]
    program = prepared.traced()
    check_marks(run, program)
    plan = plan_program(
        program,
        target,
        name=run.name,
        tokens=prepared.tokens,
        model_flops=flops_per_token(prepared.state.model, run.data.sequence_length) * prepared.tokens,
        price=price,
        options=options,
        load=load,
    )
    with prepared.layout:
        schedule = schedule_of(prepared.state.model, prepared.batch.tokens.shape[0], prepared.parts)
    layers = prepared.state.model.layers.axis.size
    parts = None if schedule is None else Parts(layers, schedule.stages, schedule.groups)
    tokens = prepared.batch.tokens
    return dataclasses.replace(
        plan,
        parameters=num_parameters(prepared.state.model),
        schedule=schedule,
        layers=parts.sizes if parts and parts.uneven else (),
        sequences=tokens.sharding.shard_shape(tokens.shape)[0] // prepared.parts,
    )


def plan_step(
    step: Callable, state: Any, batch: Any, target: Target, *, name: str, tokens: int, model_flops: float
) -> Plan:
    """The same for any train step, such as that of your own model and loop.

    Args:
        step: `step(state, batch)`, under `jax.jit` if it donates its state.
        state: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        batch: likewise.
        target: the hardware.
        name: the plan's name.
        tokens: tokens of a step.
        model_flops: FLOPs of a step that count for MFU, over all devices.
    """
    return plan_program(trace(step, state, batch), target, name=name, tokens=tokens, model_flops=model_flops)


def _made_once(piece: Piece) -> bool:
    """Whether XLA's CPU compiler computes this once: outside loops it sees that the forward pass already did it."""
    return piece.direction == "recomputed" and not piece.looped


def plan_program(
    program: Program,
    target: Target,
    *,
    name: str,
    tokens: int,
    model_flops: float,
    price: float | None = None,
    options: Sequence[str] = (),
    load: float = 1.0,
) -> Plan:
    """A plan of any traced train step.

    Args:
        program: the step.
        target: the hardware.
        name: the plan's name.
        tokens: tokens of a step.
        model_flops: FLOPs of a step that count for MFU, over all devices.
        price: dollars for one device and hour.
        options: names of compiler options in use.
        load: rows that experts on the fullest device get, relative to an even load.
    """
    moved = Moved(program)
    links, ledger = links_of(program.mesh, target), ledger_of(program, load, moved=moved)
    on_tpus = target.chip.kind == "tpu"
    pieces = tuple(work(program, load, target.chip.kind))
    if target.chip.kind == "cpu":
        pieces = tuple(piece for piece in pieces if not _made_once(piece))
    hides = {HIDING_OPTIONS[option] for option in options if option in HIDING_OPTIONS}
    took = times(pieces, ledger, links, sorted(hides), tuple(turns_of(program)) if on_tpus else ())
    held_beside = any("sparse_core" in option for option in options)
    arguments = list(zip(program.inputs, program.arguments))
    state = [value for value, argument in arguments if argument.kind in ("parameters", "optimizer")]
    return Plan(
        name=name,
        target=target,
        mesh=dict(program.mesh),
        links=links,
        tokens=tokens,
        parameters=sum(math.prod(value.shape) for value, argument in arguments if argument.kind == "parameters"),
        model_flops=model_flops,
        memory=memory_of(program, held_beside=held_beside, ahead=took.ahead, moved=moved),
        ledger=ledger,
        times=took,
        work=pieces,
        price=price,
        load=load,
        refused=tuple(dict.fromkeys(filter(None, map(refused_said, program.walk())))),
        state=int(sum(math.prod(value.shape) * itemsize(value.aval.dtype) for value in state)),
    )
