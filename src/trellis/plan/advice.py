"""Advice on what to change in a run, from its plan: the largest cause first, with the option that changes it."""

import dataclasses
import math
from collections.abc import Callable

from trellis.errors import UserError
from trellis.figures import numbers
from trellis.inspect.work import ANEW, STACKED, TURNED
from trellis.named.hadamard import SIDE
from trellis.nn.moe.dispatch import WORDS
from trellis.plan.adapt import DATA_AXES
from trellis.plan.quick import Plan
from trellis.plan.roofline import work_line

_AGAIN = "--remat.policy full --remat.names ''"
_NARROW = "--precision.compute bfloat16"
_NETWORK = "the network between hosts or slices"
# Mesh axes over which activations move.
_OF_ACTIVATIONS = ("model", "context", "context_y", "stage")
# How attention reaches keys of other slices, and what moves then.
_REACHES = {"ring": "permute", "gather": "all-gather", "exchange": "all-to-all"}
# What a change must gain for it to be offered: below it, the model of time cannot tell.
_WORTH = 1.01


@dataclasses.dataclass(frozen=True)
class Trial:
    """Which options help a plan.

    Attributes:
        plan: the plan.
        planned: the plan with more options, as the command line takes them; a `UserError` if it refuses them. None:
            nothing can be tried, and what might help is offered.
        larger: the options of a larger batch; empty if it is not known what sets it.
    """

    plan: Plan
    planned: Callable[[str], Plan] | None = None
    larger: str = ""

    def more_tokens(self) -> list[str]:
        """More tokens a device, if they help; a step that does not fit has too many already."""
        if not self.plan.fits:
            return []
        if not self.larger:
            return ["more tokens a device (a larger --batch_size)"]
        return self.helping((f"more tokens a device ({self.larger})", self.larger))

    def inside(self, words: str) -> list[tuple[str, str]]:
        """A copy of the model on each host or slice, in words with `{}` for the option; nothing if that is so."""
        plan, target = self.plan, self.plan.target
        hosts, copies = target.shape[0] if target.chip.kind == "gpu" else target.num_slices, plan.mesh.get("replica", 1)
        option = "--layout.preset hybrid" if copies == 1 else f"--mesh.replica {hosts}"
        return [(words.format(option), option)] if copies < hosts else []

    def helping(self, *offers: tuple[str, str]) -> list[str]:
        """The sentences, of pairs with options, whose options make the step faster, and let it fit if it does; if not,
        they take no more memory."""
        return [sentence for sentence, options in offers if self._helps(options)]

    def shortens(self, wait: str, options: str) -> bool:
        """Whether these options help, and a smaller share of the step then waits for this."""
        new, share = self._tried(options), lambda plan: plan.times.by_bound().get(wait, 0.0) / max(plan.seconds, 1e-30)
        return new is not None and share(new) < share(self.plan) and self._better(new)

    def _helps(self, options: str) -> bool:
        return self.planned is None or ((new := self._tried(options)) is not None and self._better(new))

    def _better(self, new: Plan) -> bool:
        plan = self.plan
        fits = new.fits or (not plan.fits and new.memory.peak <= plan.memory.peak)
        return fits and new.tokens_per_second > _WORTH * plan.tokens_per_second

    def _tried(self, options: str) -> Plan | None:
        try:
            return self.planned(options) if self.planned is not None else None
        except (UserError, ValueError):  # a size that does not divide, or options that do not go together
            return None


def advice(plan: Plan, planned: Callable[[str], Plan] | None = None, larger: str = "") -> list[str]:
    """Changes worth making, the most important first; empty if nothing stands out.

    Args:
        plan: the plan.
        planned: the same run's plan with more options, as the command line takes them. If given, options are advised
            only if they make the step faster.
        larger: the options of a larger batch, to try; empty if it is not known what sets it.
    """
    found, trial = [], Trial(plan, planned, larger)
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
    of_memory = plan.fits and bound.get("memory", 0.0) / total > 0.3
    if of_memory and (not larger or trial.shortens("memory", larger)):
        found.append(
            f"{bound['memory'] / total:.0%} of the step waits for memory bandwidth: more tokens a device make products "
            f"larger, which read each weight for more tokens{f' ({larger})' * bool(larger)}"
        )
    if (turns := plan.alone(TURNED)) > 0.03 * total:
        axes = "/".join(axis for axis in DATA_AXES if plan.mesh.get(axis, 1) > 1)
        by_words = f"--layout.preset data --layout.params.vocab {axes} --layout.params.embed {axes}"
        found += trial.helping(
            (
                f"{turns / total:.0%} of the step turns tables, slices of whose width end within a tile: slice them by "
                f"words ({by_words})",
                by_words,
            )
        )
    if (anew := plan.alone(ANEW)) > 0.03 * total:
        found.append(
            f"{anew / total:.0%} of the step lays experts out anew, slices of whose widths are gathered in another "
            "order: slice them by number (--layout.params.experts, over mesh axes that divide it)"
        )
    if (copies := plan.alone(STACKED)) > 0.03 * total:
        makes = "kernels make" if plan.target.chip.kind == "tpu" else "products and kernels make"
        found += trial.helping(
            (
                f"{copies / total:.0%} of the step copies what {makes} for the backward pass, because layers are "
                "a loop: write them out (--scan_layers false), which takes longer to compile",
                "--scan_layers false",
            )
        )
    return found + _products(trial, total) + _update(trial, total)


def _products(trial: Trial, total: float) -> list[str]:
    """What to do about products that are slow on matrix units: those in float32, and those too small to fill them."""
    plan = trial.plan
    chip, model = plan.target.chip, plan.mesh.get("model", 1)
    slow: dict[bool, dict[str, float]] = {True: {}, False: {}}
    rotates = any(piece.dtype.startswith("float4") for piece in plan.work)
    for piece in plan.work:
        line = work_line(piece, chip)
        if rotates and piece.dims[1:] == (SIDE, SIDE):  # blocks of what is rounded to four bits, at any width
            continue
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


def _update(trial: Trial, total: float) -> list[str]:
    """What to do about an optimizer's products, of matrices that are whole on a device: Muon's."""
    plan = trial.plan
    pieces = [piece for piece in plan.work if (piece.kind, piece.direction) == ("product", "update")]
    share = sum(work_line(piece, plan.target.chip).seconds for piece in pieces) / total
    ways = math.prod(plan.mesh.get(axis, 1) for axis in DATA_AXES)
    if share < 0.1 or trial.planned is None:
        return []
    for first in (ways // other for other in range(2, ways // 2 + 1) if ways % other == 0):
        sizes = f"--mesh.data {first} --mesh.data_y {ways // first} --mesh.data_z 1"
        if trial.helping((sizes, sizes)):
            return [
                f"{share:.0%} of the step are the optimizer's products of whole matrices, which devices along a mesh "
                f"axis that does not divide the layers repeat: use axes that do ({sizes})"
            ]
    return []


def _to_fit(plan: Plan) -> list[str]:
    """What takes the memory. The options that make it fit are those of `ways_to_fit`, which tries them."""
    found = []
    several = plan.schedule is None and plan.sequences != 1  # fewer take no less of what stages keep
    fewer = ": fewer sequences at a time take less" if several else ""
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
    moved = [line for line in plan.times.lines if line.axes == axes and line.role == "activations"]
    sliced = next((axis for axis in _OF_ACTIVATIONS if axis in axes), None)
    if sliced and sum(line.seconds - line.hidden for line in moved) > 0.5 * sum(seconds for _, seconds in waits):
        return _activations(trial, axes, sliced, share)
    if plan.links.crosses_network(axes):
        waits_for = f"{_NETWORK} ({axis})"
        able = trial.helping(*trial.inside("keep weights inside ({})")) + trial.more_tokens()
    else:
        waits_for, able = f"weights and gradients over {axis}", trial.more_tokens()
        roles = {line.role for line in plan.times.lines if line.axes == axes and line.role != "activations"}
        sides = plan.links.sides(axes)
        hidden = {line.role for line in plan.times.lines if line.hidden and plan.links.sides(line.axes) == sides}
        if plan.target.chip.kind == "tpu" and not roles <= hidden:  # on GPUs a run asks for what there is
            gathers = sides > 1 and "weights" in roles - hidden
            offload = f"; gathers over {sides} sides of the torus need one with `{sides}d_all_gather`" * gathers
            able.append(
                "compiler options that move them under computation (`compiler_options` of this chip's recipes"
                f"{offload})"
            )
    return [f"{share:.0%} of the step waits for {waits_for}: {', or '.join(able)}"] if able else []


def _activations(trial: Trial, axes: tuple[str, ...], sliced: str, share: float) -> list[str]:
    """What to do about activations, of which more tokens a device move more."""
    plan = trial.plan
    less = f"--mesh.{sliced} {max(plan.mesh[sliced] // 2, 1)}"
    offers = [(f"use less of it ({less})", less)]
    kinds = {line.kind for line in plan.times.lines if sliced in line.axes and line.role == "activations"}
    if sliced == "model" and "permute" not in kinds:
        by_types = "--layout.mode explicit " if plan.ledger.auto else ""  # an overlapped product needs it
        rings = f"{by_types}--layout.overlap mlp,heads"
        more = rings if "reduce-scatter" in kinds else "--layout.preset fsdp_tensor_sequence"
        offers.append((more, more))
    if sliced == "context":
        others = [f"--layout.context {how}" for how, kind in _REACHES.items() if kind not in kinds]
        offers += zip(others, others)
    over = ",".join(axes)
    if plan.links.crosses_network(axes):
        over = f"{over}, {_NETWORK}"
        offers += trial.inside("a copy of the model on each host ({})")
    able = trial.helping(*offers)
    return [f"{share:.0%} of the step waits for activations over {over}: {', or '.join(able)}"] if able else []


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
