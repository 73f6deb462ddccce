"""A rough time and memory for a run's variants in microseconds, to choose which ones are worth tracing."""

import dataclasses
import functools
import math

from trellis.hardware.chips import Target
from trellis.inspect.timeline import FRAGMENTATION
from trellis.inspect.work import COPIED
from trellis.mesh.meshes import outer_to_inner
from trellis.models.protocol import FamilyConfig, stacked
from trellis.named.pipeline.parts import Parts
from trellis.nn import Role, parameters
from trellis.nn.moe.config import EXPERT_WEIGHTS, Routing
from trellis.nn.moe.hierarchical import copies_of, parts_met
from trellis.plan.links import Links, links_of
from trellis.run.config import Run
from trellis.train.assemble import model_types
from trellis.train.flops import attention_width, keys_seen

# What is kept for each token and layer, by checkpoint policy: the block's input, in widths of the residual stream; and
# what the named saves, the products, or everything add, in widths of mlp and of heads.
_KEEP = {"full": (1, 0, 0), "saved": (2, 2, 2), "offload": (1, 0, 0), "dots": (3, 2, 2), "none": (8, 5, 4)}
# The share of the forward pass that is computed again.
_AGAIN = {"full": 1.0, "offload": 1.0, "saved": 0.35, "dots": 0.15, "none": 0.0}
# The same for `saved` with only this many names: attention's result; latents too, or both of the mlp's products; its
# operands; and one of the mlp's products, or both.
_SOME = {
    1: ((1, 0, 1), 0.9), 2: ((1, 0, 1), 0.85), 3: ((1, 2, 1), 0.5), 4: ((1, 0, 2), 0.75), 5: ((1, 1, 2), 0.55),
    6: ((1, 2, 2), 0.4),
}  # fmt: skip
# For experts: what is kept of a choice, in widths of an expert and of its rows. `dots` keeps no product of a kernel.
_EXPERTS = {"saved": (2, 1), "none": (5, 2)}
# Rows in eight bits, with a scale for each 32 numbers, take this share of those in bfloat16.
_NARROW = (1 + 1 / 32) / 2


@dataclasses.dataclass(frozen=True, slots=True)
class Sketch:
    """Rough figures of one variant.

    Attributes:
        seconds: the seconds of a step.
        peak: the bytes of a device.
    """

    seconds: float
    peak: float


@functools.cache
def weight_counts(config: FamilyConfig) -> tuple[float, float, float, float]:
    """Numbers of weights in blocks outside experts, in all experts, in the vocabulary's tables, and in one block."""
    model = model_types(config)
    found = [p for p in parameters(model) if p.role == Role.WEIGHT and not {"vocab", "routes"}.intersection(p.names)]
    size = lambda chosen: float(sum(p.size for p in chosen))
    experts, stack = (size(p for p in found if name in p.names) for name in ("experts", "layers"))
    tables = size(p for p in parameters(model) if "vocab" in p.names and p.ndim == 2)
    apart = 0 if model.first_layers is None else model.first_layers.axis.size
    return size(found) - experts, experts, tables, stack / (config.layers - apart)


def sketch(run: Run, target: Target, sizes: dict[str, int]) -> Sketch:
    """The rough time and memory of a run whose mesh has these sizes."""
    step = _Step(run, target, sizes)
    kernels, weights = step.kernels(), step.weights_moved()
    compute = step.products() + kernels + step.rows_copied()
    activations = step.tensor_moved() + step.stages_moved() + step.context_moved(kernels) + step.experts_moved()
    chip = target.chip
    hidden = min(weights * (0.5 if len(chip.overlap) == 1 else 1.0), compute * 0.9) if chip.overlap else 0.0
    return Sketch(compute + activations + weights - hidden, step.peak())


class _Step:
    """A step of a run on a mesh of some sizes: counts that its time and memory are made of.

    Attributes:
        chip, links: of the target.
        m: the model.
        blocks, experts, tables, block: as `weight_counts` has them.
        head: weights of the unembedding.
        model, stages, context, expert, expert_y: how many devices slice each; of experts, in all, and across hosts.
        shard: the mesh axes that slice the weights of FSDP.
        sharded: whether they do, and not only the batch.
        parts: microbatches, or what goes through stages one after the other.
        idle: how much longer a step takes than its parts, because stages wait for others, and for those with one layer
            more.
        once: whether weights are gathered once a step, and gradients are summed once.
        of_stage: weights of a stage's layers on a device that has its experts alone.
        tokens, local: of a batch, and of the devices that share a batch's part.
        keep: what is kept of each token and layer (`_KEEP`).
        again: the share of the forward pass that is computed again.
        of_choice, of_rows: of a choice of experts (`_EXPERTS`).
        gathered: bytes of gathered experts that are kept.
    """

    def __init__(self, run: Run, target: Target, sizes: dict[str, int]):
        self.run, self.sizes, self.chip, self.m = run, sizes, target.chip, run.model
        self.devices = target.num_devices
        there = {axis: sizes[axis] for axis in outer_to_inner(sizes) if sizes[axis] > 1}
        self.links: Links = links_of(there or {"data": 1}, target)
        self.blocks, self.experts, self.tables, self.block = weight_counts(self.m)
        self.head = self.tables if self.m.tie_embeddings else self.tables / 2
        self.model, self.stages, self.context = (sizes.get(axis, 1) for axis in ("model", "stage", "context"))
        self.expert_y = sizes.get("expert_y", 1)
        self.expert = self.expert_y * sizes.get("expert", 1)
        self.shard = [axis for axis in ("data", "data_y", "data_z", "context") if sizes.get(axis, 1) > 1]
        self.sharded = run.layout.preset not in ("data", "single", "tensor")
        groups, self.parts = run.layout.pipeline_groups, run.layout.pipeline_microbatches or run.parts
        self.ticks, units = self.parts * groups + self.stages - 1, self.parts * groups
        largest = Parts(max(stacked(self.m), self.stages * groups), self.stages, groups)
        self.idle = self.ticks / units * (largest.most * largest.count / largest.layers)
        self.once = run.accumulation == "pending"
        self.of_stage = (self.blocks + self.experts / self.expert) / self.stages
        self.tokens = max(b.size for b in run.batch_sizes()) * run.data.sequence_length
        self.local = self.tokens / (self.devices / self.model)
        self.sequence = self.model if run.layout.preset in ("fsdp_tensor_sequence", "auto", "hybrid") else 1
        self.keep, self.again = _KEEP[run.remat.policy], _AGAIN[run.remat.policy]
        self.of_choice, self.of_rows = _EXPERTS.get(run.remat.policy, (0, 0))
        if run.remat.policy == "saved" and run.remat.names:
            named = set(run.remat.names) - {EXPERT_WEIGHTS}
            some = _SOME.get(len(named), (self.keep, self.again))
            self.keep, self.again = some if named else (_KEEP["full"], _AGAIN["full"])
            self.of_choice, self.of_rows = len({"mlp_gate", "mlp_up"} & named), "mlp_rows" in named
        kept = EXPERT_WEIGHTS in run.remat.names
        self.gathered = 2.0 * self.experts / self.expert / self.stages / self.model if kept else 0.0

    def products(self) -> float:
        """Seconds of products with weights."""
        m = self.m
        gates_again = max(0, 2 - self.of_choice) / 3  # an expert's last product is not made again
        active = self.experts * m.experts_per_token / m.experts
        dense = (6 + 2 * self.again) * (self.blocks + self.head)
        flops = (dense + (6 + 2 * gates_again) * active) * self.tokens / self.devices
        narrow = max(1.0, 128 / (m.mlp / self.model))
        return flops / (self.chip.bf16_flops * self.chip.matmul_efficiency) * 1.15 * narrow * self.idle

    def kernels(self) -> float:
        """Seconds of attention's kernels."""
        m, chip, policy = self.m, self.chip, self.run.remat.policy
        seen = keys_seen(m, self.run.data.sequence_length)
        attention = 6.0 * attention_width(m) * seen * self.tokens
        # The backward pass makes scores again: once on GPUs, for queries and for keys on TPUs. Named results stay.
        kernel_again = 0.0 if policy in ("none", "saved", "offload") else 1.0
        kernels = attention * ((1.5 if chip.kind == "tpu" else 7 / 6) + kernel_again / 3) / self.devices
        ring = self.context > 1 and self.run.layout.context == "ring"  # most of its tiles are seen whole
        kernels /= chip.attention_rate(seen / m.layers, ring)
        return kernels * self.idle

    def rows_copied(self) -> float:
        """Seconds in which TPUs copy what experts' kernels make to a loop's stack and back; else rows come again."""
        m, chip = self.m, self.chip
        if chip.kind != "tpu" or not self.experts:
            return 0.0
        rows, choices = m.embed * m.experts_per_token, m.mlp * m.experts_per_token * self.of_choice
        passed = 2 * COPIED[chip.kind] * (choices + rows * self.of_rows) + rows * (not self.of_rows)
        return 2 * 2.0 * passed * m.layers * self.local / self.model / chip.streaming_bandwidth

    def weights_moved(self) -> float:
        """Seconds of gathered weights and summed gradients."""
        if not self.shard:
            return 0.0
        weights, bandwidth = self.of_stage + self.tables, self.links.bandwidth(self.shard)
        if not self.sharded:
            return 2 * 4.0 * weights / self.model / bandwidth
        passes = 1 if self.parts > 1 and self.once else 2
        moved = 2.0 * weights / self.model * (passes + 2) - self.gathered
        return moved * (1 if self.once else self.parts * self.idle) / bandwidth

    def tensor_moved(self) -> float:
        """Seconds of activations along the axis of tensors."""
        m, model = self.m, self.model
        if model == 1:
            return 0.0
        moved = (4 + 2 * self.again) * 2 * 2.0 * self.local * m.embed * m.layers * (model - 1) / model * self.idle
        return moved / self.links.bandwidth(["model"])

    def stages_moved(self) -> float:
        """Seconds of a part's stream and its gradient, every tick."""
        if self.stages == 1:
            return 0.0
        moved = self.ticks * 2 * 2.0 * self.local * self.stages / self.parts / self.sequence * self.m.embed
        return moved / self.links.bandwidth(["stage"], "permute")

    def keys_and_queries(self) -> tuple[float, float]:
        """Bytes of one layer's keys and values in a device's slice of positions, and of its queries and results."""
        keys = 2 * 2.0 * self.m.kv_heads / self.model * self.m.head_dim * self.local / self.parts
        queries = 2 * 2.0 * self.m.heads / self.model * self.m.head_dim * self.local / self.parts
        return keys, queries

    def context_moved(self, kernels: float) -> float:
        """Seconds of keys, values and queries between slices of a sequence; a ring moves them beside its kernels."""
        if self.context == 1:
            return 0.0
        (keys, queries), times = self.keys_and_queries(), self.parts * self.m.layers
        if self.run.layout.context == "gather":
            return times * ((2 + self.again) * keys * (self.context - 1)) / self.links.bandwidth(["context"])
        if self.run.layout.context == "exchange":
            moved = (2 + self.again) * (keys + queries) * (self.context - 1) / self.context
            return times * moved / self.links.bandwidth(["context"], "all-to-all")
        moved = (4 + self.again) * keys * (self.context - 1)
        return max(0.0, times * moved / self.links.bandwidth(["context"], "permute") - kernels)

    def experts_moved(self) -> float:
        """Seconds of tokens on their way to their experts and back, in each pass."""
        m, per_token = self.m, self.m.experts_per_token
        if self.expert == 1:
            return 0.0
        routing = getattr(m, "routing", Routing())
        moved = (4 + 2 * self.again) * 2.0 * self.local / self.model * m.embed * m.layers
        moved *= (1 + _NARROW) / 2 if routing.dispatch else 1.0
        near = self.expert // self.expert_y
        seconds = moved * per_token * (near - 1) / near / self.links.bandwidth(["expert"], "all-to-all")
        if self.expert_y > 1:
            met = parts_met(self.expert_y, routing.groups, routing.groups_per_token)
            sent = moved * copies_of(per_token, self.expert_y, met) * (self.expert_y - 1) / self.expert_y
            seconds += sent / self.links.bandwidth(["expert_y"], "all-to-all")
        return seconds

    def peak(self) -> float:
        """Bytes of a device."""
        m, model, run = self.m, self.model, self.run
        ways = math.prod(self.sizes[axis] for axis in self.shard)
        state = 12.0 * (self.of_stage + self.tables) / (ways * model if self.sharded else model)
        base, per_mlp, per_head = self.keep
        # Kernels for GPUs gather rows from tokens, or from the tokens of the few devices that share experts.
        per_token = m.experts_per_token
        rows_of = min(per_token, self.expert) if self.chip.kind == "gpu" else per_token
        of_experts = per_token * self.of_choice * m.mlp + rows_of * self.of_rows * m.embed
        width = base * m.embed + ((of_experts if self.experts else per_mlp * m.mlp) + per_head * m.embed) / model
        width -= base * m.embed * (1 - 1 / self.sequence)
        at_once = min(self.parts, 2 * self.stages) if self.stages > 1 else 1
        kept = self.gathered + 2.0 * width * m.layers * self.local / self.parts * at_once
        several = self.parts > 1
        accumulated = (8.0 if self.once else 8.0 / ways) * (self.of_stage + self.tables) / model if several else 0.0
        rows = self.local * self.stages / self.parts
        working = 4.0 * self.block / model / self.expert * 2 + 6.0 * self.head / model + 2.0 * 8 * rows * m.embed
        if self.context > 1 and run.layout.context == "gather":
            working += self.keys_and_queries()[0] * self.context  # of one layer
        return state + (1 + FRAGMENTATION) * (kept + accumulated + working)
