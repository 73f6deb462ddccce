"""A run: the one frozen value that says everything about a training run."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trellis.errors import UserError
from trellis.models import ModelConfig
from trellis.optim.config import WSD, Constant, InverseSqrt, Optimizer, Schedule
from trellis.run.data import Data
from trellis.run.layouts import AXES, PRESETS, LayoutChoice, MeshSizes
from trellis.run.schema import FrozenMap

DType = Literal["float32", "bfloat16", "float16"]


def _at_least(bound: int, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < bound:
            raise UserError(
                f"`{name}` is {bound} or more.", seen=f"{name}={value}", where=name, fix=f"use {bound} or more"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The number of sequences in a step, from one step on."""

    step: int
    """The first step with this size."""
    size: int
    """Sequences in a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """In which types numbers are kept and computed. Sums over a batch and the loss are float32 always."""

    params: DType = "float32"
    """Parameters and optimizer state."""
    compute: DType = "bfloat16"
    """Activations, and parameters in use."""
    exceptions: Mapping[str, DType] = dataclasses.field(default_factory=FrozenMap)
    """Computed in another type: a part of a parameter's name, and the type, as in norm: float32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remat:
    """What the forward pass keeps for the backward pass; the rest is computed again."""

    policy: Literal["none", "full", "saved", "offload", "dots"] = "none"
    """none recomputes nothing; full everything but a block's input; saved keeps what the model marks; offload moves
    that to the host's memory; dots keeps the results of matrix products."""
    names: tuple[str, ...] = ()
    """With saved and offload: the marked names that this is for; all of them where empty."""

    def __post_init__(self):
        if self.names and self.policy not in ("saved", "offload"):
            raise UserError(
                "Names of kept values belong to the policies saved and offload.",
                seen=f"policy={self.policy}, names={', '.join(self.names)}",
                where="names",
                fix="use --remat.policy saved",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """When a checkpoint is written and which are kept. The last step always writes one."""

    every: int | None = None
    """Steps between checkpoints; null writes one at the end only."""
    keep_latest: int = 2
    """The newest ones that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that this divides are kept too."""

    def __post_init__(self):
        _at_least(1, keep_latest=self.keep_latest, every=self.every, keep_every=self.keep_every)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """When the validation loss is measured, and on how much. The last step always measures it."""

    every: int | None = None
    """Steps between evaluations; null evaluates at the end only."""
    batches: int | None = 16
    """Validation batches; null takes all there are."""

    def __post_init__(self):
        _at_least(1, every=self.every, batches=self.batches)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """What is written about the run while it runs. metrics.jsonl always is."""

    every: int = 10
    """Steps between lines of metrics."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl. Weights & Biases reads its own variables, such as WANDB_MODE=offline."""

    def __post_init__(self):
        _at_least(1, every=self.every)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace of a few steps, for Perfetto or XProf."""

    start: int
    """The first step that is traced."""
    steps: int = 2
    """How many steps are traced."""

    def __post_init__(self):
        _at_least(1, steps=self.steps)
        _at_least(0, start=self.start)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """How several processes find each other. SLURM, Open MPI, Kubernetes and TPU pods are detected."""

    coordinator: str | None = None
    """Address and port of process 0, as in 10.0.0.1:8476. With it, give the other two, unless they are detected."""
    processes: int | None = None
    """Number of processes."""
    process: int | None = None
    """Number of this process, from 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything about a training run. Written to the run's folder as run.yaml, it alone reproduces the run."""

    name: str
    """Runs without --run-dir go to runs/NAME-DATE."""
    model: ModelConfig
    """The family of the model and its sizes."""
    data: Data
    """Where tokens come from, and how they become sequences."""
    batch_size: int | tuple[BatchSize, ...]
    """Sequences in a step, over all devices; or a list of {step, size} for a size that grows."""
    steps: int
    """Steps of the run."""
    optimizer: Optimizer
    """The update rule."""
    schedule: Schedule
    """The learning rate over the run, relative to the optimizer's."""
    microbatches: int | None = None
    """Parts that a device's share of a batch is cut into, one after the other, to save memory; null is one, and on a
    CPU parts of about 1,024 tokens in float32, 2,048 in bfloat16, which are the fastest there."""
    clip_norm: float | None = 1.0
    """Gradients with a larger norm, over all parameters, are scaled down to it; null clips nothing."""
    weight_decay_exclude: tuple[str, ...] = ("norm", "bias")
    """Parameters that are not decayed: those with one of these in their name or among their axes. vocab leaves out the
    embeddings. Vectors never are decayed."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's denominator in the loss."""
    ema: float | None = None
    """Decay of an exponential moving average of the parameters, which evaluation and export then use."""
    skip_nonfinite: int = 0
    """Steps in a row whose gradient is not finite that are skipped before the run stops."""
    precision: Precision = Precision()
    """In which types numbers are kept and computed."""
    remat: Remat = Remat()
    """What is kept for the backward pass."""
    mesh: MeshSizes = MeshSizes()
    """Devices along each mesh axis."""
    layout: LayoutChoice = LayoutChoice()
    """What is sliced over which mesh axis."""
    checkpoints: CheckpointRule = CheckpointRule()
    """When checkpoints are written, and which are kept."""
    evaluation: Evaluation = Evaluation()
    """When and on how much the validation loss is measured."""
    logging: Logging = Logging()
    """What is written while the run runs."""
    profile: Profile | None = None
    """A trace of some steps; null takes none."""
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap)
    """Options of the compiler for the step, as in xla_tpu_scoped_vmem_limit_kib: 65536. Those of other platforms than
    the run's (xla_tpu_..., xla_gpu_..., xla_cpu_...) are left out."""
    seed: int = 0
    """Of the initial parameters and of dropout."""
    devices: int | None = None
    """On a CPU: devices that the machine is split into; null picks one a core where the batch can be divided so."""
    distributed: Distributed = Distributed()
    """How several processes find each other."""

    def __post_init__(self):
        _at_least(1, steps=self.steps, microbatches=self.microbatches, devices=self.devices)
        _at_least(0, skip_nonfinite=self.skip_nonfinite, z_loss=self.z_loss)
        if self.clip_norm is not None and self.clip_norm <= 0:
            fix = "use 1.0, or null for no clipping"
            raise UserError("A norm to clip to is positive.", seen=self.clip_norm, where="clip_norm", fix=fix)
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(
                "The decay of a moving average is between 0 and 1.", seen=self.ema, where="ema", fix="0.999"
            )
        self._check_batch()
        self._check_schedule()
        self._check_sequence()

    def batch_sizes(self) -> tuple[BatchSize, ...]:
        """The batch size as a list, whichever way it is written."""
        return (BatchSize(step=0, size=self.batch_size),) if isinstance(self.batch_size, int) else self.batch_size

    @property
    def parts(self) -> int:
        """Microbatches of a batch where the device does not choose: one for null."""
        return self.microbatches or 1

    def _check_batch(self) -> None:
        sizes = self.batch_sizes()
        starts = [b.step for b in sizes]
        if not sizes or starts[0] != 0 or starts != sorted(set(starts)):
            raise UserError(
                "Batch sizes are listed from step 0 on, in the order of steps.",
                seen=f"steps {', '.join(map(str, starts)) or 'none'}",
                where="batch_size",
                fix="write [{step: 0, size: 64}, {step: 1000, size: 128}]",
            )
        parts = self.parts
        for size in (b.size for b in sizes):
            if size < 1 or size % parts:
                raise UserError(
                    "Microbatches divide the batch.",
                    seen=f"batch_size={size}, microbatches={parts}",
                    where="batch_size",
                    fix=f"use a multiple of {parts}, as in {-(-max(size, 1) // parts) * parts}",
                )

    def _check_schedule(self) -> None:
        warmup = self.schedule.warmup_steps
        needed = warmup + (self.schedule.decay_steps if isinstance(self.schedule, WSD) else 0)
        if needed > self.steps and not isinstance(self.schedule, Constant | InverseSqrt):
            raise UserError(
                "The parts of a schedule fit into the run.",
                seen=f"{needed} steps of {self.schedule.kind}, steps={self.steps}",
                where="schedule",
                fix=f"use --steps {needed} or more, or shorten schedule.warmup_steps",
            )

    def _check_sequence(self) -> None:
        positions = getattr(self.model, "positions", None)
        if positions is not None and self.data.sequence_length > positions:
            raise UserError(
                "A sequence is no longer than the model's learned positions.",
                seen=f"sequence_length={self.data.sequence_length}, positions={positions}",
                where="data.sequence_length",
                fix=f"use --data.sequence_length {positions}, or a model with more positions",
            )


__all__ = [
    "AXES",
    "PRESETS",
    "BatchSize",
    "CheckpointRule",
    "Data",
    "Distributed",
    "Evaluation",
    "LayoutChoice",
    "Logging",
    "MeshSizes",
    "Precision",
    "Profile",
    "Remat",
    "Run",
]
