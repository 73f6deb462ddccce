"""`trellis plan`."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trellis.commands.command import Command, check_folder, check_place, some_path, whole, with_options
from trellis.errors import UserError

if TYPE_CHECKING:
    from trellis.hardware.chips import Target
    from trellis.plan.quick import Plan
    from trellis.plan.search import Found
    from trellis.run.config import Run

# How many settings a search compiles, if it is not said.
_TOP = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `trellis plan`."""
    parser.add_argument(
        "--on", required=True, metavar="TARGET", help="v5e:16x16, v5p:4x4x8, 2xv5e:16x16, 8xH100, 4x8xH100"
    )
    parser.add_argument(
        "--compile", action="store_true", help="use the hardware's own compiler (takes minutes; needs no hardware)"
    )
    parser.add_argument(
        "--search", action="store_true", help="try meshes, layouts, microbatches and checkpoint policies"
    )
    parser.add_argument(
        "--top", type=whole(), metavar="N", help="with --search --compile: how many to compile (default: 3)"
    )
    parser.add_argument(
        "--price", type=float, metavar="DOLLARS", help="the price of a device for an hour; adds the price of tokens"
    )
    parser.add_argument(
        "--load", type=float, default=1.0, metavar="TIMES",
        help="of experts: rows of the fullest device, relative to an even load (default: 1)",
    )  # fmt: skip
    parser.add_argument("--hardware", metavar="FILE.yaml", help="more chips, in the format of the built-in table")
    parser.add_argument(
        "--page",
        type=some_path,
        metavar="FILE.html",
        nargs="?",
        const="plan.html",
        help="also write a page; plan.html if no file is named",
    )
    parser.add_argument(
        "--costs", type=some_path, metavar="FOLDER",
        help="with --compile, for GPUs: schedule the step by its estimates, and print the option to train with",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=some_path, metavar="FILE", help="with --compile: save what the compiler made, for --against"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="with --compile: show what is slower, larger or moves more than in a saved plan",
    )
    parser.add_argument(
        "--bound", type=float, metavar="PERCENT",
        help="with --against: exit with code 3 if anything is worse by more (default: 2)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--formulas", action="store_true", help="show how each time is computed, with its numbers")


def execute(args: argparse.Namespace) -> int:
    """Plans `args.run` on `args.on`; returns 3 if what was compiled is worse than before, or not as written."""
    from trellis.hardware.chips import target
    from trellis.plan.adapt import adapt
    from trellis.plan.advice import advice
    from trellis.plan.changes import changes_text
    from trellis.plan.costs import check_takes_costs, costs_said, schedule_by_costs
    from trellis.plan.narrow import brought, brought_text
    from trellis.plan.phases import fullest, phases_json, phases_text, plan_phases
    from trellis.plan.quick import quick_plan
    from trellis.plan.text import as_json, text
    from trellis.plan.ways_to_fit import excess_lines, ways_to_fit
    from trellis.run.unheeded import check_given

    before = _before(args)
    for file in filter(None, (args.page, args.save)):
        check_place(Path(file))
    if args.costs:
        check_folder(Path(args.costs))
    where = target(args.on, args.hardware)
    if args.costs:
        check_takes_costs(where)
    run, changed = adapt(args.run, where, args.given)
    if not args.search:  # a search looks at other meshes
        check_given(run, args.given)
    assumed = {"price": _price(args.price), "load": _load(args.load, run, where, args.search)}
    out: dict[str, Any] = {"fitted": changed}
    quick = lambda run: quick_plan(run, where, **assumed)
    planned = lambda run: fullest(plan_phases(run, quick)).plan
    applied = lambda options: with_options(args, options, where)
    plan, plans, more, narrow, advised, asked = None, [], [], [], [], run
    try:
        plans = plan_phases(run, quick, every_size=True)
        if run.lengths:  # from here on it is about the phase that decides whether the run fits
            out["lengths"] = phases_json(plans)
            if not args.json:
                print(phases_text(plans) + "\n")
        start, run, plan = fullest(plans).phase.start, fullest(plans).phase.run, fullest(plans).plan
    except (UserError, ValueError) as error:
        if not args.search:  # the search looks for settings that do divide
            raise
        start, run = run.phases()[-1].start, run.phases()[-1].run
        print(f"the run cannot be planned as it is: {error}\n", file=sys.stderr)
    if plan is not None:
        larger = f"--batch_size {2 * asked.batch_size}" if isinstance(asked.batch_size, int) else ""
        advised = advice(plan, lambda options: planned(applied(options)), larger)
        out["plan"] = as_json(plan, advised)
        ways = [] if plan.fits else ways_to_fit(asked, planned, most=2, plan=plan, applied=applied)
        out["ways_to_fit"] = [dataclasses.asdict(way) for way in ways]
        more = [] if plan.fits else excess_lines(plan, ways)
        if not args.json:
            print(text(plan, formulas=args.formulas, fitted=changed, ways=more, advised=advised))
        narrow = brought(run, plan, quick)
        out["narrow"] = [dataclasses.asdict(each) for each in narrow]
        if narrow and not args.json:
            print("\n" + brought_text(narrow))
    verdict = found = None
    if args.compile and not args.search:
        from trellis.plan.compile import compile_run
        from trellis.plan.verdict import judge, verdict_text

        prepared, compiled = compile_run(run, where, progress=True)
        first = verdict = judge(plan, prepared, compiled)
        if args.costs:
            verdict = schedule_by_costs(plan, prepared, first, args.costs)
        out["compiled"] = _compiled_json(verdict)
        if not args.json:
            print("\n" + verdict_text(plan, verdict))
            if args.costs:
                print("\n" + costs_said(first, verdict))
    held = _held(args, run, plan, verdict, before)
    if held is not None:
        out["against"] = held.as_dict()
        if not args.json:
            print("\n" + changes_text(held))
    if args.search:
        from trellis.plan.frontier import frontier_text, search_json
        from trellis.plan.search import search

        best = (args.top or _TOP) if args.compile else 0
        showing = sys.stderr.isatty()
        found = search(asked, where, written=args.run, start=start, compile_best=best, progress=showing, **assumed)
        out["search"] = search_json(found)
        if not args.json:
            print("\n" + frontier_text(found))
    if args.json:
        print(json.dumps(out, indent=1))
    if args.page:
        from trellis.pages.plan import page

        plan = plan or _any_plan(found, where)
        Path(args.page).write_text(
            page(plan, verdict, found, fitted=changed, ways=more, narrow=narrow, advised=advised, phases=plans),
            encoding="utf-8",
        )
        print(f"page written to {args.page}", file=sys.stderr)
    faulty = verdict is not None and verdict.structure is not None and not verdict.structure.right
    return 3 if faulty or (held is not None and held.worse) else 0


def _before(args: argparse.Namespace) -> Any:
    """The saved plan to compare with, or None. It is read before anything that takes time."""
    from trellis.plan.saved import read_plan

    for option in ("save", "against", "costs"):
        if getattr(args, option) and (args.search or not args.compile):
            rule = "Only a compiled plan can be saved, compared with a saved one, or scheduled by costs."
            seen = f"--{option} with --search" if args.search else f"--{option} without --compile"
            raise UserError(rule, seen=seen, where=f"--{option}", fix="use --compile, without --search")
    if args.bound is not None and not args.against:
        rule = "`--bound` needs a saved plan to compare with."
        raise UserError(rule, seen="no --against", where="--bound", fix="use --compile --against FILE")
    if args.top is not None and not (args.search and args.compile and args.top > 0):
        rule = "`--top` must be 1 or more, and needs a search that compiles."
        seen = f"--top {args.top}" + ("" if args.search and args.compile else " without --search --compile")
        raise UserError(rule, seen=seen, where="--top", fix="use --search --compile --top 3")
    if args.bound is not None and not 0 <= args.bound < math.inf:
        raise UserError(
            "`--bound` must be a percentage, 0 or more.", seen=args.bound, where="--bound", fix="use --bound 2"
        )
    return read_plan(Path(args.against)) if args.against else None


def _held(args: argparse.Namespace, run: Any, plan: Any, verdict: Any, before: Any) -> Any:
    """Saves the plan on request, and compares it with the one before, if there is one."""
    from trellis.plan.changes import BOUND, changes
    from trellis.plan.saved import saved_plan

    if not args.save and before is None:
        return None
    after = saved_plan(run, plan, verdict)
    if args.save:
        after.write(Path(args.save))
        print(f"plan written to {args.save}", file=sys.stderr)
    return changes(before, after, BOUND if args.bound is None else args.bound) if before is not None else None


def _any_plan(found: "Found", where: "Target") -> "Plan":
    """The first plan of a search, for the page of a run that cannot be planned as it is."""
    plan = next((c.plan for c in found.candidates if c.plan), None)
    if plan is None:
        raise UserError(
            "A page must be about a run that can be planned.",
            seen=f"none of the {len(found.candidates)} settings that the search tried can be planned",
            where=f"--page, on {where.name}",
            fix="change what holds the settings back, as the search says beside each, or leave --page out",
        )
    return plan


def _price(price: float | None) -> float | None:
    if price is not None and not 0 < price < math.inf:
        raise UserError(
            "`--price` must be a positive number of dollars.", seen=price, where="--price", fix="use --price 1.20"
        )
    return price


def _load(load: float, run: "Run", where: "Target", search: bool) -> float:
    """The value of `--load`, if it is possible. A search looks at several numbers of devices for experts."""
    if not 1 <= load < math.inf:
        rule = "`--load` must be 1 or more: the fullest device has at least an even load."
        raise UserError(rule, seen=load, where="--load", fix="use 1 for an even load, 1.5 for half as many rows more")
    if load == 1 or (search and run.model.experts > 1):
        return load
    sizes, (_, compute) = run.mesh.resolve(where.num_devices), run.layout.maps()
    devices = math.prod(sizes[axis] for axis in compute.get("experts", ())) if run.model.experts > 1 else 1
    if load > devices:
        rule = "`--load` cannot exceed the number of devices that experts are sliced over."
        most = math.gcd(run.model.experts, where.num_devices)
        fix = f"use --load {devices} or less" if devices > 1 else "leave it out"
        less = f" --load {most}" if load > most else ""
        fix += f", or use --mesh.expert {most}{less}" if devices == 1 < most else ""
        experts = "no experts" if run.model.experts == 1 else f"experts over {devices} device{'s' * (devices > 1)}"
        raise UserError(rule, seen=f"{load:g}, {experts}", where="--load", fix=fix)
    return load


def _compiled_json(verdict) -> dict:
    compiled = verdict.compiled
    return {
        "fits": compiled.fits,
        "excess": compiled.excess,
        "peak": compiled.peak,
        "memory": dict(compiled.memory),
        "largest": [dataclasses.asdict(allocation) for allocation in compiled.largest],
        "compile_seconds": compiled.seconds,
        "versions": dict(compiled.versions),
        "options": dict(compiled.options),
        "scheduled_seconds": verdict.scheduled,
        "kernel_seconds": verdict.kernels,
        "exposed_seconds": verdict.exposed,
        "hidden_seconds": verdict.hidden,
        "gather_seconds": sum(verdict.gathers.values()),
        "copy_seconds": verdict.copies,
        "step_seconds": verdict.seconds,
        "mfu": verdict.mfu,
        "structure": verdict.structure and verdict.structure.as_dict(),
        "per_axis": {axis: list(both) for axis, both in verdict.comparison.axes.items()} if verdict.comparison else {},
    }


COMMAND = Command(
    name="plan",
    summary="plan memory, communication and time on hardware that is not here",
    arguments=arguments,
    execute=execute,
    recipe="",
)
