"""A plan from types alone: what a step needs, moves and costs, on hardware that is not here, in seconds."""

import dataclasses
from collections.abc import Mapping, Sequence

from trellis.hardware.chips import Target
from trellis.hardware.described import described_devices
from trellis.inspect.rows import Ledger
from trellis.run.config import Run
from trellis.train.compilation import options_for
from trellis.train.flops import flops_per_token

from .links import Links, place
from .memory import Memory, memory
from .program import Program, program
from .roofline import HIDING_OPTIONS, Times, roles, times
from .trace import Step, ledger_of
from .work import Op, operations


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs on a target, predicted.

    Attributes:
        name: the run's.
        target: the hardware.
        mesh: mesh axes and sizes.
        links: what each mesh axis runs over.
        tokens: tokens of a step.
        parameters: parameters of the model.
        model_flops: FLOPs of a step that count for MFU, over all devices: three times the forward pass.
        memory: the highest point of a device.
        ledger: what moves.
        times: what takes how long.
        work: every piece of work of a device.
        price: dollars for one device and hour, or None.
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
    work: tuple[Op, ...]
    price: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the highest point is below what a program can allocate."""
        return self.memory.peak <= self.target.chip.hbm_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.times.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could do at their bfloat16 peak in the predicted time."""
        return self.model_flops / (self.seconds * self.target.num_devices * self.target.chip.bf16_flops)

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.tokens / self.seconds

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """At the price given for a device and hour."""
        if self.price is None:
            return None
        return self.price * self.target.num_devices / 3600 * 1e9 / self.tokens_per_second


def model_flops(ops: Sequence[Op], devices: int) -> float:
    """FLOPs of a step that count for MFU: three times the forward pass's products and causal attention.

    The loss makes its gradients in the forward pass; what it does beyond its own logits does not count again.
    """
    forward = sum(op.flops * op.times for op in ops if op.direction == "forward" and op.kind != "elementwise")
    extra = _gradient_products(ops)
    return 3.0 * (forward - extra) * devices


def _gradient_products(ops: Sequence[Op]) -> float:
    """FLOPs of the loss's gradient products, made in the forward pass: two as large as that of the logits."""
    files = ("token_chunks.py", "vocab_chunks.py")
    made = (op for op in ops if op.direction == "forward" and op.kind == "product" and op.source.startswith(files))
    return sum(op.flops * op.times for op in made) * 2 / 3


def quick_plan(run: Run, target: Target, *, price: float | None = None, options: Sequence[str] | None = None) -> Plan:
    """Plans a run from types, without compiling.

    Args:
        run: the run.
        target: the hardware.
        price: dollars for one device and hour.
        options: names of compiler options in use, which may hide communication; the run's own if None.

    Raises:
        UserError: the mesh does not fill the target, or a size does not divide.
    """
    return plan_of(program(run, target, described_devices(target)), target, price=price, options=options)


def plan_of(prog: Program, target: Target, *, price: float | None = None, options: Sequence[str] | None = None) -> Plan:
    """The same for a program whose devices were chosen before."""
    if options is None:
        given = options_for(target.chip.kind, prog.run.compiler_options, target.num_devices)
        options = [name for name, value in given.items() if value.lower() not in ("false", "0")]
    with prog.layout:
        step = prog.traced()
        ledger = ledger_of(step)
    plan = plan_step(step, ledger, target, name=prog.run.name, price=price, options=options)
    if getattr(prog.run.model, "experts", None):
        # what the program multiplies depends on the layout: buffers have room for uneven loads
        per_token = flops_per_token(prog.state.model, prog.run.data.sequence_length)
        plan = dataclasses.replace(plan, model_flops=per_token * prog.tokens)
    return plan


def _merged(op: Op) -> bool:
    """Whether XLA's CPU compiler makes this once: outside of loops it sees that the forward pass did it before."""
    return op.direction == "recomputed" and not op.looped


def plan_step(
    step: Step,
    ledger: Ledger,
    target: Target,
    *,
    name: str = "",
    price: float | None = None,
    options: Sequence[str] = (),
) -> Plan:
    """A plan of any traced train step."""
    links = place(step.mesh, target)
    ops = tuple(operations(step))
    if target.chip.name == "cpu":
        ops = tuple(op for op in ops if not _merged(op))
    hides = {HIDING_OPTIONS[option] for option in options if option in HIDING_OPTIONS}
    count = 0
    for var, kind, path in zip(step.jaxpr.jaxpr.invars, step.kinds, step.names):
        if kind == "parameters" and not path.startswith(".average"):
            size = 1
            for side in var.aval.shape:
                size *= side
            count += size
    return Plan(
        name=name,
        target=target,
        mesh=dict(step.mesh),
        links=links,
        tokens=step.tokens,
        parameters=count,
        model_flops=model_flops(ops, target.num_devices),
        memory=memory(step, held=any("sparse_core" in option for option in options)),
        ledger=ledger,
        times=times(ops, ledger, links, roles(step), sorted(hides)),
        work=ops,
        price=price,
    )
