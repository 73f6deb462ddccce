"""Options that a user gave and that have no effect in the run. They are refused; the same in a recipe is accepted.

A recipe is for many meshes, and says what holds on each of them. A user who writes an option means this run.
"""

import math
from collections.abc import Collection, Iterator, Mapping

from trellis.errors import UserError
from trellis.nn.moe import Routing
from trellis.nn.moe.share import EXCHANGES
from trellis.run.config import Run


def check_given(run: Run, given: Collection[str]) -> None:
    """Refuses options of a command that would have no effect.

    A mesh axis that takes what is left counts as one of several devices, as it may have on another machine.

    Args:
        run: the run, with its mesh as it will be.
        given: names of the fields that the user set, dotted.

    Raises:
        UserError: one of them has no effect.
    """
    for name, error in _unheeded(run):
        if name in given:
            raise error


def _unheeded(run: Run) -> Iterator[tuple[str, UserError]]:
    """Fields that have no effect in a run, each with the error for a user who sets it."""
    at_rest, in_use = (_over_several(run, entries) for entries in run.layout.maps())
    yield from _of_layout(run, at_rest, in_use)
    if isinstance(routing := getattr(run.model, "routing", None), Routing):
        yield from _of_routing(routing, in_use.get("experts", ()))
    if not run.optimizer.weight_decay:
        rule = "`weight_decay_exclude` needs an optimizer with weight decay."
        seen = f"weight_decay_exclude={', '.join(run.weight_decay_exclude) or 'nothing'}, optimizer.weight_decay=0"
        yield _told("weight_decay_exclude", rule, seen, "use --optimizer.weight_decay 0.1 with it, or leave it out")
    if run.guard.every is None and not run.guard.replay:
        rule = "`guard.replay` needs `guard.every`."
        fix = "use --guard.every 100 with it, or leave it out"
        yield _told("guard.replay", rule, "replay=false, guard.every=null", fix)
    every, keep = run.checkpoints.every, run.checkpoints.keep_every
    if every is None and keep is not None:
        rule = "`checkpoints.keep_every` needs `checkpoints.every`."
        fix = f"use --checkpoints.every {keep} with it, or leave it out"
        yield _told("checkpoints.keep_every", rule, f"keep_every={keep}, checkpoints.every=null", fix)
    elif every and keep and keep <= run.steps < math.lcm(every, keep):
        rule = "`checkpoints.keep_every` keeps some of what `checkpoints.every` writes."
        multiple, divisor = -(-keep // every) * every, math.gcd(every, keep)
        fix = f"use --checkpoints.keep_every {multiple}, or --checkpoints.every {divisor}"
        seen = f"keep_every={keep}, checkpoints.every={every}, of which {run.steps} steps have no common multiple"
        yield _told("checkpoints.keep_every", rule, seen, fix)
    if run.evaluation.every is None and run.evaluation.sample:
        rule = "`evaluation.sample` needs `evaluation.every`; the end of a run always has a sample."
        fix = "use --evaluation.every 100 with it, or leave it out"
        yield _told("evaluation.sample", rule, "sample=true, evaluation.every=null", fix)
    if run.deadline.factor is None:
        rule = "`deadline.seconds` needs a `deadline.factor`."
        seen = f"seconds={run.deadline.seconds:g}, deadline.factor=null"
        yield _told("deadline.seconds", rule, seen, "use --deadline.factor 20 with it, or leave it out")


def _of_layout(run: Run, at_rest: Mapping[str, list], in_use: Mapping[str, list]) -> Iterator[tuple[str, UserError]]:
    layout, pos = run.layout, in_use.get("pos", [])
    yield from _of_entries(run)
    # Without a batch, only tables have positions.
    first, then = sorted(("batch", "pos"), key=[*in_use, "batch", "pos"].index)
    if in_use.get(then) and {*in_use[then]} <= {*in_use.get(first, ())}:
        rule = "Of two names of an activation the one that comes first in a layout gets a mesh axis of both."
        seen = f"{then}={'/'.join(in_use[then])}, {first}={'/'.join(in_use[first])}"
        other = "context" if then == "pos" else "data"
        yield _told(f"layout.compute.{then}", rule, seen, f"use --layout.compute.{then} {other}, or leave it out")
    rule = "How attention reaches keys can be set only for a mesh axis that slices positions."
    heeding = {"context": ["context", "context_y"], "context_y": ["context_y"]}
    for name, axes in heeding.items():
        of = [axis for axis in axes if axis == name or layout.context_y is None]
        if (kind := getattr(layout, name)) is not None and not {*of} & {*pos}:
            one = [axis for axis in of if getattr(run.mesh, axis) == 1]
            seen = f"{name}={kind}, " + (f"mesh.{name}=1" if name in one else f"pos over {'/'.join(pos) or 'nothing'}")
            fix = f"use --mesh.{name} 2 or more" if name in one else f"use --layout.compute.pos {name}"
            yield _told(f"layout.{name}", rule, seen, f"{fix}, or leave it out")
    if layout.mode == "auto":
        rule = "How parameters are gathered can be set only in layout mode explicit."
        seen = f"gather={layout.gather} with mode=auto, where the compiler places it"
        yield _told("layout.gather", rule, seen, "use --layout.mode explicit, or leave it out")
        if layout.strict:
            rule = "A strict layout needs layout mode explicit, in which types say what is sliced."
            yield _told("layout.strict", rule, "strict=true, mode=auto", "use --layout.mode explicit, or leave it out")
        return
    gathered = [axis for name, axes in at_rest.items() for axis in axes if axis not in in_use.get(name, ())]
    if layout.gather == "per_axis" and len({*gathered}) < 2:
        rule = "`gather=per_axis` needs parameters that are gathered over several mesh axes."
        seen = f"gather=per_axis, parameters gathered over {next(iter(gathered), 'nothing')}"
        yield _told("layout.gather", rule, seen, "use --mesh.data_y 2 or more with it, or leave it out")
    if layout.overlap and not any(in_use.get(name) for name in layout.overlap):
        axes = sorted({axis for name in layout.overlap for axis in layout.maps()[1].get(name, ())})
        rule = "An overlapped product needs a mesh axis that slices its name over several devices."
        seen = f"overlap={', '.join(layout.overlap)}, {', '.join(f'mesh.{axis}=1' for axis in axes)}"
        yield _told("layout.overlap", rule, seen, f"use --mesh.{axes[0]} 2 or more, or leave it out")


def _of_entries(run: Run) -> Iterator[tuple[str, UserError]]:
    """Entries of a layout that slice nothing: all of their mesh axes have one device."""
    rule = "A layout entry needs a mesh axis of several devices."
    hosts = {"replica"} if run.layout.preset == "hybrid" else set()  # as many replicas as hosts
    for which in ("params", "compute"):
        for name, over in getattr(run.layout, which).items():
            axes = [axis for axis in over.split("/") if axis]
            if axes and not hosts & {*axes} and all(getattr(run.mesh, axis) == 1 for axis in axes):
                seen = f"{name}={over}, " + ", ".join(f"mesh.{axis}=1" for axis in axes)
                fix = f"use --mesh.{axes[0]} 2 or more, or leave it out"
                yield _told(f"layout.{which}.{name}", rule, seen, fix)


def _of_routing(routing: Routing, experts: list[str]) -> Iterator[tuple[str, UserError]]:
    where, fix = "experts over no mesh axis", "use --mesh.expert 2 or more"
    if not experts and routing.way in ("gather", *EXCHANGES):
        rule = "This routing needs experts that are sliced over mesh axes."
        yield _told("model.routing.way", rule, f"way={routing.way}, {where}", f"{fix}, or leave it out")
    if not experts or routing.way not in ("auto", *EXCHANGES):
        seen = f"slack={routing.slack:g}, " + (where if not experts else f"way={routing.way}")
        rule = "`routing.slack` is for tokens that are exchanged over mesh axes."
        other = fix if not experts else "use --model.routing.way auto"
        yield _told("model.routing.slack", rule, seen, f"{other}, or leave it out")


def _told(name: str, rule: str, seen: str, fix: str) -> tuple[str, UserError]:
    return name, UserError(rule, seen=f"{seen}: it has no effect", where=f"--{name}", fix=fix)


def _over_several(run: Run, entries: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """A map of a layout, with only the mesh axes that have, or may have, several devices."""
    return {name: [axis for axis in axes if getattr(run.mesh, axis) != 1] for name, axes in entries.items()}
