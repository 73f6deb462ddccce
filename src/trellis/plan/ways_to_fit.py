"""When a step does not fit: by how much, what is largest by name, and which planned changes would make it fit."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from trellis.errors import UserError
from trellis.figures import numbers
from trellis.hardware.chips import Target
from trellis.mesh.topology import slice_names
from trellis.plan.quick import Plan
from trellis.run.config import Run

# From what keeps the most for the backward pass to what keeps the least.
POLICIES = ("none", "dots", "saved", "full")
# For the policy `saved`: some of the names that every family of models marks.
_OF_ALL = (
    ("query", "key", "value", "attention", "mlp_up"),
    ("query", "key", "value", "attention"),
    ("attention",),
)
# And for mixtures of experts, in which what goes to experts takes as much room as what they make of it: all but that.
_OF_MIXTURES = (
    ("query", "key", "value", "attention", "mlp_gate", "mlp_up"),
    ("attention", "mlp_gate", "mlp_up"),
)

# Presets that leave parameters whole along some mesh axes, and those that slice them there, too.
_SLICING = {"data": "fsdp", "tensor": "fsdp_tensor", "expert": "auto", "hybrid": "auto"}

_NOT_ENOUGH = "no change of recomputation, microbatches (up to 8 times) or batch size (down to an eighth) is enough"


def some_names(run: Run) -> tuple[tuple[str, ...], ...]:
    """Sets of names to which a run's policy `saved` may be restricted, starting with the one that keeps the most."""
    return (*_OF_MIXTURES, *_OF_ALL) if run.model.experts > 1 else _OF_ALL


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A change that makes a step fit.

    Attributes:
        options: the options, as the command line takes them.
        peak: bytes on one device with the change.
        seconds: the seconds of a step, by the plan.
    """

    options: str
    peak: float
    seconds: float


def changes(run: Run) -> Iterator[tuple[str, Run]]:
    """Changes that lower memory, the cheapest first: one option, then two.

    A loop over layers keeps everything that the backward pass reads, also what a fusion would make anew as it reads it.
    Layers that are written out keep less of it, and take no longer, except to compile.
    """
    policy, names = run.remat.policy, run.remat.names
    if policy == "none" and run.scan_layers is not False and run.mesh.stage == 1:
        yield "--scan_layers false", dataclasses.replace(run, scan_layers=False)
    stronger = POLICIES[POLICIES.index(policy) + 1 :] if policy in POLICIES else ()
    none = " --remat.names ''" if names else ""  # names go with the policy that they were written for
    remats = [(f"--remat.policy {name}{none}", _with_policy(run, name)) for name in stronger]
    if policy in POLICIES[:3] and not names:  # between `saved` and `full`: some of the names
        before = "" if policy == "saved" else "--remat.policy saved "
        some = [(f"{before}--remat.names {','.join(n)}", _with_policy(run, "saved", n)) for n in some_names(run)]
        remats[-1:-1] = some
    sizes = [entry.size for entry in run.batch_sizes()]
    micro = [_micro(run, n) for n in (2, 4, 8) if not any(size % (run.parts * n) for size in sizes)]
    yield from remats
    yield from micro
    sliced = list(_slicing(run))
    yield from sliced
    if remats:
        both = [*micro, *sliced]
        yield from ((f"{remats[-1][0]} {words}", _with_policy(changed, stronger[-1])) for words, changed in both)
    if isinstance(run.batch_size, int):
        for factor in (2, 4, 8):
            if run.batch_size % factor == 0:
                size = run.batch_size // factor
                base = _with_policy(run, stronger[-1]) if remats else run
                words = f"{remats[-1][0]} " if remats else ""
                yield f"{words}--batch_size {size}", dataclasses.replace(base, batch_size=size)


def _slicing(run: Run) -> Iterator[tuple[str, Run]]:
    """The run with its parameters in slices where there are copies of them."""
    preset, mesh = run.layout.preset, run.mesh
    if mesh.replica > 1 and preset in ("auto", "hybrid"):
        data = mesh.data if mesh.data == -1 else mesh.data * mesh.replica
        words = "--mesh.replica 1" + f" --mesh.data {data}" * (data > 0) + " --layout.preset auto" * (preset != "auto")
        layout = dataclasses.replace(run.layout, preset="auto")
        yield words, dataclasses.replace(run, layout=layout, mesh=dataclasses.replace(mesh, replica=1, data=data))
    elif more := _SLICING.get(preset):
        yield f"--layout.preset {more}", dataclasses.replace(run, layout=dataclasses.replace(run.layout, preset=more))


def _micro(run: Run, factor: int) -> tuple[str, Run]:
    count = run.parts * factor
    return f"--microbatches {count}", dataclasses.replace(run, microbatches=count)


def _with_policy(run: Run, policy: str, names: tuple[str, ...] = ()) -> Run:
    return dataclasses.replace(run, remat=dataclasses.replace(run.remat, policy=policy, names=names))


def ways_to_fit(
    run: Run,
    planned: Callable[[Run], Plan],
    most: int = 3,
    plan: Plan | None = None,
    applied: Callable[[str], Run] | None = None,
) -> list[Way]:
    """The first changes under which the plan fits.

    Args:
        run: a run whose plan does not fit.
        planned: plans a run on the same hardware.
        most: how many changes to look for.
        plan: the run's own plan; if given, changes that cannot be enough are not planned.
        applied: the run that the user gets with these options; what is planned is then this run.
    """
    found: list[Way] = []
    for options, changed in changes(run):
        if len(found) == most:
            break
        if plan is not None and least(plan, run, changed) > plan.target.chip.hbm_bytes:
            continue
        try:
            new = planned(applied(options) if applied else changed)
        except (UserError, ValueError):  # a size that does not divide, or options that do not go together
            continue
        if new.fits:
            found.append(Way(options, new.memory.peak, new.seconds))
    return found


def least(plan: Plan, run: Run, changed: Run) -> float:
    """Bytes below which a changed run cannot be on a device: its state, and its share of everything else.

    With another recomputation, or without a loop over layers, anything that was computed may go. Microbatches keep
    parameters gathered and a float32 sum of gradients for the whole step, unless gradients are settled once a part.
    """
    if (changed.mesh, changed.layout) != (run.mesh, run.layout):  # how much of the state is then on a device?
        return plan.state / plan.target.num_devices
    state = plan.memory.bytes_of("parameters", "optimizer")
    rows = lambda r: max(b.size for b in r.batch_sizes()) / r.parts
    other = (plan.memory.peak - state) * rows(changed) / rows(run)
    if (changed.remat, changed.scan_layers) != (run.remat, run.scan_layers):
        other -= plan.memory.bytes_of("activations", "temporaries") * rows(changed) / rows(run)
    if changed.parts > run.parts and run.accumulation == "pending":
        slices = math.prod(plan.mesh.get(axis, 1) for axis in ("model", "stage", "expert", "expert_y"))
        other = max(other, 6.0 * plan.parameters / slices)
    return state + other


def excess_lines(plan: Plan, ways: list[Way]) -> list[str]:
    """What would make a step fit, in sentences."""
    if ways:
        return [
            f"fits with {way.options}: {numbers.size(way.peak)}, {numbers.seconds(way.seconds)} a step" for way in ways
        ]
    return [_alone(plan) or f"{_NOT_ENOUGH}: use more devices, or --search"]


def _alone(plan: Plan) -> str:
    """What to do about a step whose state alone does not fit; empty if that does."""
    state, room = plan.memory.bytes_of("parameters", "optimizer"), plan.target.chip.hbm_bytes
    if state <= room:
        return ""
    takes = f"parameters and optimizer alone take {numbers.size(state)} a device"
    count = _held_by(math.ceil(plan.state / room), plan.target)
    if count <= plan.target.num_devices:
        least = numbers.size(plan.state / plan.target.num_devices)
        return f"{takes}, and {least} if all slice them: use a layout or a mesh with fewer copies of them, or --search"
    return (
        f"{takes}, even sliced over all axes of the mesh and layout that can slice them: "
        f"use at least {count} devices of this kind"
    )


def _held_by(count: int, target: Target) -> int:
    """The devices of the smallest slice that has at least so many: TPUs do not come in any number."""
    if target.chip.kind != "tpu":
        return count
    shapes = [name.partition(":")[2].split("x") for name in slice_names() if name.startswith(f"{target.generation}:")]
    sizes = [math.prod(map(int, shape)) * target.chip.devices_per_chip for shape in shapes]
    return min((size for size in sizes if size >= count), default=count)


def excess_text(plan: Plan, ways: list[Way]) -> str:
    """The message that a step does not fit, in four parts."""
    room = plan.target.chip.hbm_bytes
    largest = "; ".join(f"{b.name} ({b.kind}) {numbers.size(b.num_bytes)}" for b in plan.memory.by_name()[:3])
    if ways:
        fix = "\n         ".join(f"{way.options}   peak {numbers.size(way.peak)}" for way in ways)
    else:
        fix = _alone(plan) or f"{_NOT_ENOUGH}: use more devices, or a smaller model"
    return (
        f"A step does not fit in a device's memory, by {numbers.size(plan.memory.peak - room)}.\n"
        f"  seen:  {numbers.size(plan.memory.peak)} at the highest point, {numbers.size(room)} on {plan.target.name}\n"
        f"  where: largest by name: {largest}\n"
        f"  fix:   {fix}"
    )
