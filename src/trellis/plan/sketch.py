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
    there = {axis: sizes[axis] for axis in outer_to_inner(sizes) if sizes[axis] > 1}
    links: Links = links_of(there or {"data": 1}, target)
    chip, m = target.chip, run.model
    blocks, experts, tables, block = weight_counts(m)
    head = tables if m.tie_embeddings else tables / 2
    expert_y, per_token = sizes.get("expert_y", 1), m.experts_per_token
    expert = expert_y * sizes.get("expert", 1)
    active = experts * per_token / m.experts
    devices, model = target.num_devices, sizes.get("model", 1)
    shard = [axis for axis in ("data", "data_y", "data_z", "context") if sizes.get(axis, 1) > 1]
    ways = math.prod(sizes[axis] for axis in shard) if shard else 1
    sharded = run.layout.preset not in ("data", "single", "tensor")
    stages, groups = sizes.get("stage", 1), run.layout.pipeline_groups
    parts = run.layout.pipeline_microbatches or run.parts
    ticks, units = parts * groups + stages - 1, parts * groups
    largest = Parts(max(stacked(m), stages * groups), stages, groups)
    # How much longer a step takes than its parts, because stages wait for others, and for those with one layer more.
    idle = ticks / units * (largest.most * largest.count / largest.layers)
    once = run.accumulation == "pending"
    of_stage = (blocks + experts / expert) / stages  # weights of a stage's layers
    tokens = max(b.size for b in run.batch_sizes()) * run.data.sequence_length
    local = tokens / (devices / model)  # for the batch and positions of one group
    sequence = model if run.layout.preset in ("fsdp_tensor_sequence", "auto", "hybrid") else 1
    keep, again = _KEEP[run.remat.policy], _AGAIN[run.remat.policy]
    of_choice, of_rows = _EXPERTS.get(run.remat.policy, (0, 0))
    if run.remat.policy == "saved" and run.remat.names:
        named = set(run.remat.names) - {EXPERT_WEIGHTS}
        keep, again = _SOME.get(len(named), (keep, again)) if named else (_KEEP["full"], _AGAIN["full"])
        of_choice, of_rows = len({"mlp_gate", "mlp_up"} & named), "mlp_rows" in named
    gathered = 2.0 * experts / expert / stages / model if EXPERT_WEIGHTS in run.remat.names else 0.0
    gates_again = max(0, 2 - of_choice) / 3  # an expert's last product is not made again
    length = run.data.sequence_length
    seen = keys_seen(m, length)
    attention = 6.0 * attention_width(m) * seen * tokens
    flops = ((6 + 2 * again) * (blocks + head) + (6 + 2 * gates_again) * active) * tokens / devices
    narrow = max(1.0, 128 / (m.mlp / model))
    # A kernel's backward pass recomputes scores: once on GPUs, for queries and for keys on TPUs. Named results stay.
    kernel_again = 0.0 if run.remat.policy in ("none", "saved", "offload") else 1.0
    kernels = attention * ((1.5 if chip.kind == "tpu" else 7 / 6) + kernel_again / 3) / devices
    ring = sizes.get("context", 1) > 1 and run.layout.context == "ring"  # most of its tiles are seen whole
    kernels /= chip.attention_rate(seen / m.layers, ring)
    kernels *= idle
    compute = flops / (chip.bf16_flops * chip.matmul_efficiency) * 1.15 * narrow * idle + kernels
    if chip.kind == "tpu" and experts:  # what kernels make is copied to a loop's stack and back; else rows come again
        rows, choices = m.embed * per_token, m.mlp * per_token * of_choice
        passed = 2 * COPIED[chip.kind] * (choices + rows * of_rows) + rows * (not of_rows)
        compute += 2 * 2.0 * passed * m.layers * local / model / chip.streaming_bandwidth
    weights = activations = 0.0
    if shard and sharded:
        passes = 1 if parts > 1 and once else 2
        moved = (2.0 * (of_stage + tables) / model * (passes + 2) - gathered) * (1 if once else parts * idle)
        weights = moved / links.bandwidth(shard)
    elif shard:
        weights = 2 * 4.0 * (of_stage + tables) / model / links.bandwidth(shard)
    if model > 1:
        moved = (4 + 2 * again) * 2 * 2.0 * local * m.embed * m.layers * (model - 1) / model * idle
        activations = moved / links.bandwidth(["model"])
    if stages > 1:  # a part's stream and its gradient, every tick
        moved = ticks * 2 * 2.0 * local * stages / parts / sequence * m.embed
        activations += moved / links.bandwidth(["stage"], "permute")
    context, head_dim = sizes.get("context", 1), m.head_dim
    whole = 0.0  # bytes of one layer's keys and values that a device gathers
    if context > 1:
        keys = 2 * 2.0 * m.kv_heads / model * head_dim * local / parts
        queries = 2 * 2.0 * m.heads / model * head_dim * local / parts
        if run.layout.context == "gather":
            moved, whole = (2 + again) * keys * (context - 1), keys * context
            activations += parts * m.layers * moved / links.bandwidth(["context"])
        elif run.layout.context == "exchange":
            moved = (2 + again) * (keys + queries) * (context - 1) / context
            activations += parts * m.layers * moved / links.bandwidth(["context"], "all-to-all")
        else:  # what a ring moves is beside its kernels
            moved = (4 + again) * keys * (context - 1)
            activations += max(0.0, parts * m.layers * moved / links.bandwidth(["context"], "permute") - kernels)
    if expert > 1:  # tokens go to their experts and back in each pass
        moved = (4 + 2 * again) * 2.0 * local / model * m.embed * m.layers
        routing = getattr(m, "routing", Routing())
        moved *= (1 + _NARROW) / 2 if routing.dispatch else 1.0
        near = expert // expert_y
        activations += moved * per_token * (near - 1) / near / links.bandwidth(["expert"], "all-to-all")
        if expert_y > 1:
            copies = copies_of(per_token, expert_y, parts_met(expert_y, routing.groups, routing.groups_per_token))
            activations += moved * copies * (expert_y - 1) / expert_y / links.bandwidth(["expert_y"], "all-to-all")
    hidden = min(weights * (0.5 if len(chip.overlap) == 1 else 1.0), compute * 0.9) if chip.overlap else 0.0
    seconds = compute + activations + weights - hidden
    state = 12.0 * (of_stage + tables) / (ways * model if sharded else model)
    base, per_mlp, per_head = keep
    # Kernels for GPUs gather rows from tokens, or from the tokens of the few devices that share experts.
    rows_of = min(per_token, expert) if chip.kind == "gpu" else per_token
    of_mlp = per_token * of_choice * m.mlp + rows_of * of_rows * m.embed if experts else per_mlp * m.mlp
    width = base * m.embed + (of_mlp + per_head * m.embed) / model
    width -= base * m.embed * (1 - 1 / sequence)
    kept = gathered + 2.0 * width * m.layers * local / parts * (min(parts, 2 * stages) if stages > 1 else 1)
    accumulated = (8.0 if once else 8.0 / ways) * (of_stage + tables) / model if parts > 1 else 0.0
    rows = local * stages / parts
    working = 4.0 * block / model / expert * 2 + 6.0 * head / model + 2.0 * 8 * rows * m.embed + whole
    return Sketch(seconds, state + (1 + FRAGMENTATION) * (kept + accumulated + working))
