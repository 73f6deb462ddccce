"""Advice on what to change in a run, from its plan: the largest cause first, with the option that changes it."""

import dataclasses
import math
from collections.abc import Callable

from trellis.errors import UserError
from trellis.figures import numbers
from trellis.inspect.work import ANEW
from trellis.nn.moe.dispatch import WORDS
from trellis.plan.quick import Plan
from trellis.plan.roofline import work_line

_AGAIN = "--remat.policy full --remat.names ''"
_NARROW = "--precision.compute bfloat16"
_INSIDE = "--layout.preset hybrid"
# What a change must gain for it to be offered: below it, the model of time cannot tell.
_WORTH = 1.01


@dataclasses.dataclass(frozen=True)
class Trial:
    """Which options help a plan.

    Attributes:
        plan: the plan.
        planned: the plan with more options, as the command line takes them; a `UserError` if it refuses them. None:
            nothing can be tried, and what might help is offered.
    """

    plan: Plan
    planned: Callable[[str], Plan] | None = None

    def helping(self, *offers: tuple[str, str]) -> list[str]:
        """The sentences, of pairs with options, whose options make the step faster, and let it fit if it does."""
        return [sentence for sentence, options in offers if self._helps(options)]

    def _helps(self, options: str) -> bool:
        if self.planned is None:
            return True
        try:
            new = self.planned(options)
        except (UserError, ValueError):  # a size that does not divide, or options that do not go together
            return False
        return new.tokens_per_second > _WORTH * self.plan.tokens_per_second and (new.fits or not self.plan.fits)


def advice(plan: Plan, planned: Callable[[str], Plan] | None = None) -> list[str]:
    """Changes worth making, the most important first; empty if nothing stands out.

    Args:
        plan: the plan.
        planned: the same run's plan with more options, as the command line takes them. If given, options are advised
            only if they make the step faster.
    """
    found, trial = [], Trial(plan, planned)
    if not plan.fits:
        found += _to_fit(plan)
    found += [f"attention does without its kernel: {why}" for why in plan.refused]
    total = max(plan.seconds, 1e-30)
    bound = plan.times.by_bound()
    for axes, seconds in plan.times.by_axes().items():
        if seconds / total > 0.1:
            found += _links(trial, axes, seconds / total)
    recomputed = sum(line.seconds for line in plan.times.lines if line.where == "recomputed" and not line.moves)
    free = plan.target.chip.hbm_bytes - plan.memory.peak
    if plan.fits and recomputed > 0.1 * total and free > 0.2 * plan.target.chip.hbm_bytes:
        able = []
        for more in ("--remat.policy saved", "--remat.policy dots"):
            bare = f"{more} --remat.names ''"  # for a run that names what it keeps
            able += trial.helping((more, more)) or trial.helping((bare, bare))
        if able:
            found.append(
                f"recomputation takes {recomputed / total:.0%} of the step and {numbers.size(free)} are free: keep "
                f"more for the backward pass ({' or '.join(able)})"
            )
    if (waits := sum(line.seconds - line.hidden for line in plan.times.copies)) > 0.1 * total:
        found.append(
            f"{waits / total:.0%} of the step waits for the host's memory: keep fewer activations there "
            "(--remat.names)" + "".join(trial.helping((f", or compute them again ({_AGAIN})", _AGAIN)))
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
    return found + _products(trial, total)


def _products(trial: Trial, total: float) -> list[str]:
    """What to do about products that are slow on matrix units: those in float32, and those too small to fill them."""
    plan = trial.plan
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
        share = f"{whole:.0%} of the step are products in float32, at {chip.float32_share:.0%} of bfloat16's rate: "
        found += trial.helping((f"{share}{_NARROW}", _NARROW))
    if small > 0.1:
        most = max(slow[False], key=lambda label: slow[False][label])
        option = f"--mesh.model {model // 2}"
        less = "".join(trial.helping((f", or less tensor parallelism ({option})", option))) if model > 1 else ""
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
    if (used := plan.memory.bytes_of("weights in use")) > 0.3 * peak:
        found.append(f"weights in use take {numbers.size(used)}: slice widths too, or gather for each microbatch")
    return found


def _links(trial: Trial, axes: tuple[str, ...], share: float) -> list[str]:
    plan, axis = trial.plan, ",".join(axes)
    waits = [(line.kind, line.seconds - line.hidden) for line in plan.times.lines if line.axes == axes]
    exchanged = sum(seconds for kind, seconds in waits if kind == "all-to-all")
    if {"expert", "expert_y"}.intersection(axes) and exchanged > 0.5 * sum(seconds for _, seconds in waits):
        return _exchange(trial, axes, share)
    if plan.links.crosses_network(axes):
        inside = "".join(trial.helping((f"keep weights inside ({_INSIDE}), or ", _INSIDE)))
        return [
            f"{share:.0%} of the step waits for the network between hosts or slices ({axis}): {inside}give each device "
            "more tokens a step"
        ]
    if "model" in axes:
        kinds = {line.kind for line in plan.times.lines if "model" in line.axes and line.role == "activations"}
        sliced, rings = "reduce-scatter" in kinds, "permute" in kinds
        by_types = "--layout.mode explicit " if plan.ledger.auto else ""  # an overlapped product needs it
        more = f"{by_types}--layout.overlap mlp,heads" if sliced else "--layout.preset fsdp_tensor_sequence"
        less = f"--mesh.model {max(plan.mesh.get('model', 1) // 2, 1)}"
        offers = [(f"use less of it ({less})", less), *([] if rings else [(more, more)])]
        able = trial.helping(*offers)
        return [f"{share:.0%} of the step waits for activations over {axis}: {', or '.join(able)}"] if able else []
    return [
        f"{share:.0%} of the step waits for weights and gradients over {axis}: more tokens a device (a larger "
        "--batch_size), or compiler options that move them under computation"
    ]


def _exchange(trial: Trial, axes: tuple[str, ...], share: float) -> list[str]:
    plan = trial.plan
    waits = f"{share:.0%} of the step waits for tokens on their way to experts over {','.join(axes)}: "
    inside = {part.size for part in plan.links.parts.get("expert", ()) if part.where == "NVLink"}
    if not plan.links.crosses_network(axes):
        smaller = f"--mesh.expert {max(plan.mesh.get('expert', 1) // 2, 1)}"
        why = "a smaller --mesh.expert, since the middle of its links carries what half of the devices send"
        return trial.helping((waits + why, smaller))
    if "expert" in axes and inside:
        (near,) = inside
        hosts = math.prod(plan.mesh[a] for a in axes if a in ("expert", "expert_y")) // near
        apart = f"--mesh.expert_y {hosts} --mesh.expert {near}"
        crosses = "a token crosses hosts once for each of its experts, and once for each host with "
        return trial.helping((f"{waits}{crosses}{apart}", apart))
    able = []
    if plan.target.chip.kind == "gpu":  # on TPUs rounding costs half of what fewer bytes save, and no schedule was seen
        if all(row.parts == 1 for row in plan.ledger.rows):
            beside = "--model.routing.interleave 2"
            able += trial.helping((f"two parts of a batch side by side, one on its way ({beside})", beside))
        if not any(row.kind == "all-to-all" and row.dtype == WORDS for row in plan.ledger.rows):
            narrow = "--model.routing.dispatch mxfp8"
            able += trial.helping((f"tokens in eight bits ({narrow})", narrow))
    able.append("fewer hosts that share experts, or a router with experts of a token in fewer of them")
    return [waits + "; ".join(able)]
