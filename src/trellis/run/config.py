"""A run: the one frozen value that says everything about a training run."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trellis.choices import check_choices
from trellis.errors import UserError
from trellis.frozen import FrozenMap
from trellis.models import ModelConfig
from trellis.models.protocol import stacked
from trellis.nn import Precision
from trellis.optim.config import Optimizer, Schedule, check_clip_norm, check_fits, is_below_one
from trellis.optim.groups import check_words
from trellis.run.cpu import Cpu
from trellis.run.data import Data, MixtureSource
from trellis.run.layouts import AXES, PRESETS, LayoutChoice, MeshSizes
from trellis.run.lengths import Phase, SequenceLength, phases
from trellis.run.processes import check_processes
from trellis.run.schema import at_least

# On the usual file systems the name of a file has at most 255 bytes, of which a date takes a few.
_LONGEST_NAME = 60
# More devices than any one process drives.
_MOST_DEVICES = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The number of sequences in a step, from one step on."""

    step: int
    """The first step with this size, counted from 0. Choose the one where the loss has stopped falling fast."""
    size: int
    """Sequences in a step. Raise it over the run: late steps gain more from large batches."""

    def __post_init__(self):
        check_choices(self)
        at_least(0, step=self.step)
        at_least(1, size=self.size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remat:
    """What the forward pass keeps for the backward pass; the rest is computed again."""

    policy: Literal["none", "full", "saved", "offload", "dots"] = "none"
    """none recomputes nothing; full everything but a block's input; saved keeps what the model marks; offload moves
    that to the host's memory; dots keeps the results of matrix products. Choose saved if a step does not fit in memory,
    and full if saved is not enough."""
    names: tuple[str, ...] = ()
    """With saved and offload: the marked names to keep; empty means all of them. Name some if all are too many to
    keep."""

    def __post_init__(self):
        check_choices(self)
        if self.names and self.policy not in ("saved", "offload"):
            raise UserError(
                "Names of values to keep can be given only with the policies saved and offload.",
                seen=f"policy={self.policy}, names={', '.join(self.names)}",
                where="names",
                fix="use --remat.policy saved, or --remat.names '' to keep what the policy says",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRule:
    """When checkpoints are written, and which are kept. The last step always writes one."""

    every: int | None = None
    """Steps between checkpoints; null writes one at the end only. Set it to what you can afford to lose when a machine
    fails."""
    keep_latest: int = 2
    """How many of the newest ones are kept. Raise it to be able to go back further; lower it if the disk is small."""
    keep_every: int | None = None
    """Checkpoints of multiples of this step are kept too. Set it to compare states of the run later."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, keep_latest=self.keep_latest, every=self.every, keep_every=self.keep_every)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """When the validation loss is measured, and on how much. The last step always measures it."""

    every: int | None = None
    """Steps between evaluations; null evaluates at the end only. Set it to see during the run whether the validation
    loss still improves."""
    batches: int | None = 16
    """Validation batches; null takes all there are. Raise it if the validation loss is noisy; lower it if evaluations
    take too long."""
    sample: bool = False
    """A text from the model at each evaluation, not only at the end. Set it to true to see how it learns to write."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, every=self.every, batches=self.batches)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """What is written about the run while it runs. metrics.jsonl is always written."""

    every: int = 10
    """Steps between lines of metrics. Lower it for a finer curve; raise it if steps are very short."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl. Weights & Biases reads its own variables, such as WANDB_MODE=offline.
    Name those that your group looks at."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, every=self.every)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuardRule:
    """When the state's copies on several devices are compared."""

    every: int | None = None
    """Steps between comparisons, which are also made before each checkpoint; null makes none. Set it, to 100 or so, for
    long runs on many devices: memory and links do flip bits."""
    replay: bool = True
    """If a part of the state has no copy, as in pure FSDP, make every second of these steps twice and compare the
    results. It takes the time of a step and the memory of another state. Set it to false if there is no room for
    that."""
    structure: bool = True
    """End a run at its first step if the compiled program sums over the wrong devices, or leaves copies that differ.
    Set it to false to continue with a warning, once `trellis prove` has shown that the program's numbers are right."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, every=self.every)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineRule:
    """How long a step may take before the run ends itself. A step that is very late usually never ends."""

    factor: float | None = 20.0
    """The deadline, in medians of the steps so far; null sets none. Lower it to hear of a hanging process sooner; raise
    it if steps differ much."""
    seconds: float = 600.0
    """The shortest deadline. Lower it if steps are short and machines are expensive; raise it if data may be
    unavailable for longer."""

    def __post_init__(self):
        check_choices(self)
        at_least(2, factor=self.factor)
        at_least(1, seconds=self.seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace of a few steps, for Perfetto or XProf."""

    start: int
    """The first step that is traced, counted from 0. Choose one after the first few, which compile and warm up."""
    steps: int = 2
    """How many steps are traced. Raise it if steps differ from each other."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, steps=self.steps)
        at_least(0, start=self.start)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """How several processes find each other. SLURM, Open MPI, Kubernetes and TPU pods are detected."""

    coordinator: str | None = None
    """Address and port of process 0, as in 10.0.0.1:8476. Give the other two with it, unless they are detected. Set it
    if the processes are started by hand."""
    processes: int | None = None
    """Number of processes. Set it with the coordinator; or to 1, by itself, for one process that a cluster's variables
    would take for one of several."""
    process: int | None = None
    """Number of this process, from 0. Set it with the coordinator, to its own number in each process."""

    def __post_init__(self):
        check_choices(self)
        check_processes(self.coordinator, self.processes, self.process)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything about a training run. It is written to the run's folder as run.yaml, which by itself reproduces the
    run."""

    name: str
    """Runs without --run-dir go to runs/NAME-DATE. Set it to tell several runs of a recipe apart."""
    model: ModelConfig
    """The family of the model and its sizes."""
    data: Data
    """Where tokens come from, and how they become sequences."""
    batch_size: int | tuple[BatchSize, ...]
    """Sequences in a step, over all devices; or a list of {step, size} for a size that grows. Raise it for steadier
    steps or for more devices; lower it for more steps from the same tokens."""
    lengths: tuple[SequenceLength, ...] = ()
    """Other sequence lengths later in the run, as a list of {step, length}; the run starts with data.sequence_length.
    Set it to learn from short sequences first, which are cheaper, and from long ones at the end."""
    steps: int
    """Steps of the run. Raise it for a better model, as long as that does not repeat the text many times."""
    optimizer: Optimizer
    """The update rule."""
    schedule: Schedule
    """The learning rate over the run, relative to the optimizer's."""
    microbatches: int | None = None
    """Parts that a device's share of a batch is cut into, to save memory; they are computed one after the other. null
    is one, and on a CPU what was measured to be fastest, or parts of about 1,024 tokens in float32, 2,048 in bfloat16.
    Raise it if a step does not fit in memory."""
    accumulation: Literal["pending", "sharded"] = "pending"
    """For steps in several parts (microbatches or stages): pending gathers parameters and settles gradients once a
    step, and holds both whole meanwhile; sharded does so once a part. Choose sharded if a step does not fit."""
    clip_norm: float | None = 1.0
    """Gradients with a larger norm, over all parameters, are scaled down to it; null clips nothing. Lower it if single
    batches make the loss jump."""
    weight_decay_exclude: tuple[str, ...] = ("norm", "bias")
    """Parameters with one of these in their name or among their axes are not decayed. vocab leaves out the embeddings.
    Vectors are never decayed. Add vocab if embeddings are to keep their size."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's denominator in the loss. Set it to 1e-4 or so if logits grow over a
    long run, above all in bfloat16."""
    ema: float | None = None
    """Decay of an exponential moving average of the parameters, which evaluation and export then use. Set it, for
    example to 0.999, for a better model without a decay of the learning rate."""
    skip_nonfinite: int = 0
    """How many steps in a row without a finite gradient are skipped before the run stops. Raise it to let a long run
    pass over single bad batches."""
    precision: Precision = Precision()
    """The types in which numbers are kept and computed."""
    remat: Remat = Remat()
    """What is kept for the backward pass."""
    scan_layers: bool | None = None
    """Whether the compiled step has a loop over layers, which compiles once for all of them, or has them written out.
    null writes them out where that was measured to be faster: up to 16 on a CPU or on several GPUs, 64 on one GPU, and
    on several if all layers have at most ten billion parameters. Set it to false if much of what is kept is made by
    kernels, on GPUs also by products: a loop copies that, and a plan says how much. Set it to true if compiling takes
    too long."""
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
    guard: GuardRule = GuardRule()
    """When copies on several devices are compared."""
    deadline: DeadlineRule = DeadlineRule()
    """How long a step may take."""
    profile: Profile | None = None
    """A trace of some steps; null takes none. Set it if steps are slower than planned."""
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=FrozenMap)
    """Options of the compiler for the step, as in xla_tpu_scoped_vmem_limit_kib: '65536'. Those of platforms other than
    the run's (xla_tpu_..., xla_gpu_..., xla_cpu_...) are left out. Set them to try what a compiler can do for a step;
    the recipes for TPU slices set their own."""
    cpu: Cpu = Cpu()
    """What is faster on one CPU and slower on another."""
    seed: int = 0
    """The seed of the initial parameters and of dropout. Change it to see how much of a difference is chance."""
    devices: int | None = None
    """On a CPU: devices of each process; null picks one a core if the batch can be divided that way. Set it to rehearse
    a larger mesh on a CPU, or to leave processors to others."""
    distributed: Distributed = Distributed()
    """How several processes find each other."""

    def __post_init__(self):
        check_choices(self)
        at_least(1, steps=self.steps, microbatches=self.microbatches, devices=self.devices)
        at_least(0, skip_nonfinite=self.skip_nonfinite, z_loss=self.z_loss, seed=self.seed)
        self._check_name()
        if self.devices is not None and self.devices > _MOST_DEVICES:
            rule = f"A process can drive at most {_MOST_DEVICES:,} devices."
            raise UserError(
                rule, seen=self.devices, where="devices", fix="use fewer, or `trellis plan`, which needs none"
            )
        check_clip_norm(self.clip_norm)
        if self.ema is not None and not (self.ema > 0 and is_below_one(self.ema)):
            rule = "`ema` must be between 0 and 1, in float32 too."
            raise UserError(rule, seen=self.ema, where="ema", fix="use a decay such as 0.999")
        self._check_batch()
        self._check_weights()
        check_fits(self.schedule, self.steps)
        check_words(self.weight_decay_exclude)
        self._check_sequence()
        self._check_profile()
        self._check_pipeline()
        phases(self)  # each of them is a run, and is checked like one

    def phases(self) -> tuple[Phase, ...]:
        """The phases of the run: the run as it is while sequences have one length."""
        return phases(self)

    def at(self, step: int) -> "Run":
        """The run as it is in the step of this index, with one length."""
        return [phase.run for phase in phases(self) if phase.start <= step][-1]

    def batch_sizes(self) -> tuple[BatchSize, ...]:
        """The batch size as a list, whichever way it is written."""
        return (BatchSize(step=0, size=self.batch_size),) if isinstance(self.batch_size, int) else self.batch_size

    @property
    def parts(self) -> int:
        """Microbatches of a batch if the device does not choose: one for null."""
        return self.microbatches or 1

    def _check_name(self) -> None:
        if not (self.name and self.name.isprintable()) or "/" in self.name or len(self.name) > _LONGEST_NAME:
            raise UserError(
                f"A run's name must have 1 to {_LONGEST_NAME} printable characters and no slash: it names the folder.",
                seen=f"{self.name[:_LONGEST_NAME]!r}, {len(self.name)} characters",
                where="name",
                fix="use a word, as in starter; --run-dir sets where the folder is",
            )

    def _check_profile(self) -> None:
        if self.profile is not None and self.profile.start >= self.steps:
            raise UserError(
                "Profiling must start at a step of the run.",
                seen=f"start={self.profile.start}, steps={self.steps}",
                where="profile.start",
                fix=f"use --profile.start {self.steps - 1} or less",
            )

    def _check_pipeline(self) -> None:
        if self.mesh.stage > 1 and self.layout.mode == "auto":
            raise UserError(
                "A pipeline needs layout mode explicit: the compiler cannot place its communication.",
                seen=f"layout.mode=auto, mesh.stage={self.mesh.stage}",
                where="layout.mode",
                fix="use --layout.mode explicit, or --mesh.stage 1",
            )
        if self.mesh.stage > 1 and self.remat.policy == "offload":
            raise UserError(
                "Pipeline stages cannot offload activations to the host.",
                seen=f"remat.policy=offload, mesh.stage={self.mesh.stage}",
                where="remat.policy",
                fix="use --remat.policy saved, or full",
            )
        if self.layout.pipeline_microbatches is not None and self.mesh.stage == 1:
            raise UserError(
                "`layout.pipeline_microbatches` needs a pipeline of several stages.",
                seen=f"pipeline_microbatches={self.layout.pipeline_microbatches}, mesh.stage=1",
                where="layout.pipeline_microbatches",
                fix="use --mesh.stage 2 or more, or --microbatches to split the batch without a pipeline",
            )
        if self.accumulation == "sharded" and self.parts == 1 and self.mesh.stage == 1:
            raise UserError(
                "Sharded accumulation needs a step with several microbatches or pipeline stages.",
                seen="accumulation=sharded, microbatches=1, mesh.stage=1",
                where="accumulation",
                fix="use --accumulation pending, or --microbatches 2 or more",
            )
        groups, stages, blocks = self.layout.pipeline_groups, self.mesh.stage, stacked(self.model)
        if groups > 1 and stages == 1:
            raise UserError(
                "`layout.pipeline_groups` above 1 needs a pipeline of several stages.",
                seen=f"pipeline_groups={groups}, mesh.stage=1",
                where="layout.pipeline_groups",
                fix="use --mesh.stage 2 or more",
            )
        if blocks < stages * groups:
            of_blocks = "" if blocks == self.model.layers else f" in {blocks} blocks"
            raise UserError(
                "Every group of layers on every pipeline stage needs at least one layer.",
                seen=f"mesh.stage={stages}, pipeline_groups={groups}, model.layers={self.model.layers}{of_blocks}",
                where="mesh.stage",
                fix=f"use numbers of stages and groups whose product is {blocks} or less",
            )

    def _check_batch(self) -> None:
        if isinstance(self.batch_size, int):
            at_least(1, batch_size=self.batch_size)
        sizes = self.batch_sizes()
        starts = [b.step for b in sizes]
        if not sizes or starts[0] != 0 or starts != sorted(set(starts)):
            raise UserError(
                "Batch sizes must be listed in order of their steps, starting at step 0.",
                seen=f"steps {', '.join(map(str, starts)) or 'none'}",
                where="batch_size",
                fix="write [{step: 0, size: 64}, {step: 1000, size: 128}]",
            )
        if starts[-1] >= self.steps:
            raise UserError(
                "Every batch size must start before the run ends.",
                seen=f"a size from step {starts[-1]} on, steps={self.steps}",
                where="batch_size",
                fix=f"use --steps {starts[-1] + 1} or more, with --until {self.steps} to pause there, or leave that "
                "size out of a new run",
            )
        parts = self.parts
        for size in (b.size for b in sizes):
            if size % parts:
                raise UserError(
                    "The number of microbatches must divide the batch size.",
                    seen=f"batch_size={size}, microbatches={parts}",
                    where="batch_size",
                    fix=f"use a multiple of {parts}, as in {-(-size // parts) * parts}, or --microbatches that "
                    "divide the batch",
                )

    def _check_weights(self) -> None:
        parts = self.data.source.parts if isinstance(self.data.source, MixtureSource) else ()
        for part in parts:
            last = 0 if isinstance(part.weight, int | float) else part.weight[-1].step
            if last >= self.steps:
                raise UserError(
                    "Every mixture weight must start before the run ends.",
                    seen=f"a weight of {part.name} from step {last} on, steps={self.steps}",
                    where="data.source.parts",
                    fix=f"use --steps {last + 1} or more, with --until {self.steps} to pause there, or leave that "
                    "weight out of a new run",
                )

    def _check_sequence(self) -> None:
        positions = self.model.positions
        if positions is not None and self.data.sequence_length > positions:
            raise UserError(
                "A sequence cannot be longer than the model's learned positions.",
                seen=f"sequence_length={self.data.sequence_length}, positions={positions}",
                where="data.sequence_length",
                fix=f"use --data.sequence_length {positions}, or a model with more positions",
            )


__all__ = [
    "AXES",
    "PRESETS",
    "BatchSize",
    "CheckpointRule",
    "Cpu",
    "Data",
    "DeadlineRule",
    "Distributed",
    "Evaluation",
    "GuardRule",
    "LayoutChoice",
    "Logging",
    "MeshSizes",
    "Precision",
    "Profile",
    "Remat",
    "Run",
    "SequenceLength",
]
