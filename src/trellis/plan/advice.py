"""Advice on what to change in a run, from its plan: the largest cause first, with the option that changes it."""

import math

from trellis.figures import numbers
from trellis.inspect.work import ANEW
from trellis.nn.moe.dispatch import WORDS
from trellis.plan.quick import Plan
from trellis.plan.roofline import work_line


def advice(plan: Plan) -> list[str]:
    """Changes worth trying, the most important first; empty if nothing stands out."""
    found = []
    if not plan.fits:
        found += _to_fit(plan)
    total = max(plan.seconds, 1e-30)
    bound = plan.times.by_bound()
    for axes, seconds in plan.times.by_axes().items():
        if seconds / total > 0.1:
            found += _links(plan, axes, seconds / total)
    recomputed = sum(line.seconds for line in plan.times.lines if line.where == "recomputed" and not line.moves)
    free = plan.target.chip.hbm_bytes - plan.memory.peak
    if plan.fits and recomputed > 0.1 * total and free > 0.2 * plan.target.chip.hbm_bytes:
        found.append(
            f"recomputation takes {recomputed / total:.0%} of the step and {numbers.size(free)} are free: keep more "
            "for the backward pass (--remat.policy saved or dots)"
        )
    if (waits := sum(line.seconds - line.hidden for line in plan.times.copies)) > 0.1 * total:
        found.append(
            f"{waits / total:.0%} of the step waits for the host's memory: keep fewer activations there "
            "(--remat.names), or compute them again (--remat.policy full)"
        )
    if bound.get("memory", 0.0) / total > 0.3:
        found.append(
            f"{bound['memory'] / total:.0%} of the step waits for memory bandwidth: more tokens a device make products "
            "larger, which read each weight for more tokens"
        )
    anew = sum(work_line(piece, plan.target.chip).seconds for piece in plan.work if piece.alone == ANEW)
    if anew > 0.03 * total:
        found.append(
            f"{anew / total:.0%} of the step lays experts out anew, slices of whose widths are gathered in another "
            "order: slice them by number (--layout.params.experts, over mesh axes that divide it)"
        )
    return found + _products(plan, total)


def _products(plan: Plan, total: float) -> list[str]:
    """What to do about products that are slow on matrix units: those in float32, and those too small to fill them."""
    chip, model = plan.target.chip, plan.mesh.get("model", 1)
    slow: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for piece in plan.work:
        line = work_line(piece, chip)
        if piece.kind in ("product", "grouped") and 0 < line.rate < 0.67 * chip.bf16_flops * chip.matmul_efficiency:
            of = slow[piece.dtype == "float32"]
            of[line.label] = of.get(line.label, 0.0) + line.seconds
    whole, small = (sum(of.values()) / total for of in (slow[True], slow[False]))
    found = []
    if whole > 0.1:
        found.append(
            f"{whole:.0%} of the step are products in float32, at {chip.float32_share:.0%} of bfloat16's rate: "
            "--precision.compute bfloat16"
        )
    if small > 0.1:
        most = max(slow[False], key=lambda label: slow[False][label])
        less = f", or less tensor parallelism (--mesh.model {model // 2})" if model > 1 else ""
        found.append(
            f"{small:.0%} of the step are products that are too small to fill the matrix units, most of it {most}: a "
            f"wider model, or wider heads{less}"
        )
    return found


def _to_fit(plan: Plan) -> list[str]:
    """What takes the memory. The options that make it fit are those of `ways_to_fit`, which tries them."""
    found = []
    fewer = ": fewer sequences at a time take less" if plan.schedule is None else ""  # not what its stages keep
    peak = max(plan.memory.peak, 1)
    state = plan.memory.bytes_of("parameters", "optimizer")
    if state > 0.5 * plan.target.chip.hbm_bytes:
        found.append(f"parameters and optimizer take {numbers.size(state)} a device: slice them over more devices")
    if (kept := plan.memory.bytes_of("activations")) > 0.2 * peak:
        found.append(f"kept activations take {numbers.size(kept)}{fewer}")
    if (temporaries := plan.memory.bytes_of("temporaries")) > 0.3 * peak:
        largest = next(b for b in plan.memory.buffers if b.kind == "temporaries")
        found.append(f"temporaries take {numbers.size(temporaries)}, the largest {largest.what}, {largest.name}{fewer}")
    if (gathered := plan.memory.bytes_of("gathered weights")) > 0.3 * peak:
        found.append(f"gathered weights take {numbers.size(gathered)}: slice widths too, or gather for each microbatch")
    return found


def _links(plan: Plan, axes: tuple[str, ...], share: float) -> list[str]:
    axis = ",".join(axes)
    waits = [(line.kind, line.seconds - line.hidden) for line in plan.times.lines if line.axes == axes]
    exchanged = sum(seconds for kind, seconds in waits if kind == "all-to-all")
    if {"expert", "expert_y"}.intersection(axes) and exchanged > 0.5 * sum(seconds for _, seconds in waits):
        return [_exchange(plan, axes, share)]
    if plan.links.crosses_network(axes):
        return [
            f"{share:.0%} of the step waits for the network between hosts or slices ({axis}): keep weights inside "
            "(--layout.preset hybrid), or give each device more tokens a step"
        ]
    if "model" in axes:
        kinds = {line.kind for line in plan.times.lines if "model" in line.axes and line.role == "activations"}
        sliced, rings = "reduce-scatter" in kinds, "permute" in kinds
        by_types = "--layout.mode explicit " if plan.ledger.auto else ""  # an overlapped product needs it
        more = f"{by_types}--layout.overlap mlp,heads" if sliced else "--layout.preset fsdp_tensor_sequence"
        return [
            f"{share:.0%} of the step waits for activations over {axis}: use less of it (--mesh.model "
            f"{max(plan.mesh.get('model', 1) // 2, 1)}){'' if rings else f', or {more}'}"
        ]
    return [
        f"{share:.0%} of the step waits for weights and gradients over {axis}: more tokens a device (a larger "
        "--batch_size), or compiler options that move them under computation"
    ]


def _exchange(plan: Plan, axes: tuple[str, ...], share: float) -> str:
    waits = f"{share:.0%} of the step waits for tokens on their way to experts over {','.join(axes)}: "
    inside = {part.size for part in plan.links.parts.get("expert", ()) if part.where == "NVLink"}
    if not plan.links.crosses_network(axes):
        return waits + "a smaller --mesh.expert, since the middle of its links carries what half of the devices send"
    if "expert" in axes and inside:
        (near,) = inside
        return (
            f"{waits}a token crosses hosts once for each of its experts, and once for each host with --mesh.expert_y "
            f"{math.prod(plan.mesh[a] for a in axes if a in ('expert', 'expert_y')) // near} --mesh.expert {near}"
        )
    able = []
    if plan.target.chip.kind == "gpu":  # on TPUs rounding costs half of what fewer bytes save, and no schedule was seen
        if all(row.parts == 1 for row in plan.ledger.rows):
            able.append("two parts of a batch side by side, one on its way (--model.routing.interleave 2)")
        if not any(row.kind == "all-to-all" and row.dtype == WORDS for row in plan.ledger.rows):
            able.append("tokens in eight bits (--model.routing.dispatch mxfp8)")
    able.append("fewer hosts that share experts, or a router with experts of a token in fewer of them")
    return waits + "; ".join(able)
