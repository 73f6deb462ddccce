"""`trellis plan` and `trellis memory`."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from trellis.errors import UserError


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `trellis plan`."""
    parser.add_argument(
        "--on", required=True, metavar="TARGET", help="v5e:16x16, v5p:4x4x8, 2xv5e:16x16, 8xH100, 4x8xH100"
    )
    parser.add_argument(
        "--compile", action="store_true", help="ask the hardware's compiler (minutes; needs no hardware)"
    )
    parser.add_argument(
        "--search", action="store_true", help="try meshes, layouts, microbatches and checkpoint policies"
    )
    parser.add_argument("--top", type=int, default=3, metavar="N", help="with --search --compile: how many to compile")
    parser.add_argument(
        "--price", type=float, metavar="DOLLARS", help="for one device and hour: adds the price of tokens"
    )
    parser.add_argument("--hardware", metavar="FILE.yaml", help="more chips, in the form of the built-in table")
    parser.add_argument(
        "--page", metavar="FILE.html", nargs="?", const="plan.html", help="write a page too; plan.html if no value"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON on stdout")
    parser.add_argument("--formulas", action="store_true", help="how each time comes about, with its numbers")


def run_plan(args: argparse.Namespace) -> int:
    """Plans `args.run` on `args.on`."""
    from .adapting import adapt
    from .fitting import excess_lines, ways_to_fit
    from .hardware import target
    from .quick import quick_plan
    from .show import as_json, text

    where = target(args.on, args.hardware)
    run, changed = adapt(args.run, where, args.given)
    out: dict[str, Any] = {"fitted": changed}
    plan, more = None, []
    try:
        plan = quick_plan(run, where, price=_price(args.price))
    except (UserError, ValueError) as error:
        if not args.search:  # the search looks for settings that do divide
            raise
        print(f"the run as it is cannot be planned: {error}\n", file=sys.stderr)
    if plan is not None:
        out["plan"] = as_json(plan)
        ways = [] if plan.fits else ways_to_fit(run, lambda r: quick_plan(r, where), most=2, plan=plan)
        out["ways_to_fit"] = [dataclasses.asdict(way) for way in ways]
        more = [] if plan.fits else excess_lines(plan, ways)
        if not args.json:
            print(text(plan, formulas=args.formulas, fitted=changed, ways=more))
    verdict = found = None
    if args.compile and not args.search:
        from .compile import compile_run
        from .verdict import judge, verdict_text

        prepared, compiled = compile_run(run, where, progress=True)
        verdict = judge(plan, prepared, compiled)
        out["compiled"] = _compiled_json(verdict)
        if not args.json:
            print("\n" + verdict_text(plan, verdict))
    if args.search:
        from .search import frontier_text, search, search_json

        best = args.top if args.compile else 0
        found = search(run, where, written=args.run, compile_best=best, progress=sys.stderr.isatty(), price=args.price)
        out["search"] = search_json(found)
        if not args.json:
            print("\n" + frontier_text(found))
    if args.page:
        from .page import page

        plan = plan or next(c.plan for c in found.candidates if c.plan)
        Path(args.page).write_text(page(plan, verdict, found, fitted=changed, ways=more), encoding="utf-8")
        print(f"page written to {args.page}", file=sys.stderr)
    if args.json:
        print(json.dumps(out, indent=1))
    return 0


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `trellis memory`."""
    parser.add_argument("--on", metavar="TARGET", help="hardware that is not here; this machine's devices if not given")
    parser.add_argument("--hardware", metavar="FILE.yaml", help="more chips, in the form of the built-in table")
    parser.add_argument("--svg", metavar="FILE.svg", help="write a picture too: an area for each named buffer")
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")


def run_memory(args: argparse.Namespace) -> int:
    """What each device holds at the highest point of a step of `args.run`, by kind, and by name."""
    from .adapting import adapt
    from .fitting import excess_text, ways_to_fit
    from .prepared import prepare
    from .quick import plan_of
    from .show import as_json, headline, kept_table, memory_table

    where, devices = _hardware(args)
    run, changed = adapt(args.run, where, args.given) if args.on else (args.run, [])
    planned = lambda run: plan_of(prepare(run, where, devices), where)
    plan = planned(run)
    if args.svg:
        Path(args.svg).write_text(plan.memory.svg(), encoding="utf-8")
        print(f"picture written to {args.svg}", file=sys.stderr)
    if args.json:
        print(json.dumps({**as_json(plan)["memory"], "buffers": plan.memory.as_dict()["buffers"]}, indent=1))
        return 0
    lines = headline(plan, changed).splitlines()
    lines = lines[: 3 + len(changed)] if args.on else lines[:2]
    print("\n".join(lines), memory_table(plan, 16), kept_table(plan), sep="\n\n")
    if not plan.fits:
        print("\n" + excess_text(plan, ways_to_fit(run, planned)))
    return 0


def _hardware(args: argparse.Namespace):
    """The target of `--on` with devices that are only described, or this machine's own."""
    if args.on:
        from .described import described_devices
        from .hardware import target

        where = target(args.on, args.hardware)
        return where, described_devices(where)
    from trellis.train.devices import find_devices

    from .local import local_target

    devices = find_devices(args.run)
    return local_target(devices), devices


def _price(price: float | None) -> float | None:
    if price is not None and price <= 0:
        raise UserError("A price is a positive number of dollars.", seen=price, where="--price", fix="use --price 1.20")
    return price


def _compiled_json(verdict) -> dict:
    compiled = verdict.compiled
    return {
        "fits": compiled.fits,
        "excess": compiled.excess,
        "peak": compiled.peak,
        "memory": dict(compiled.memory),
        "largest": [{"num_bytes": a.num_bytes, "what": a.what, "source": a.source} for a in compiled.largest],
        "compile_seconds": compiled.seconds,
        "versions": dict(compiled.versions),
        "options": dict(compiled.options),
        "scheduled_seconds": verdict.scheduled,
        "kernel_seconds": verdict.kernels,
        "exposed_seconds": verdict.exposed,
        "hidden_seconds": verdict.hidden,
        "step_seconds": verdict.seconds,
        "mfu": verdict.mfu,
        "per_axis": {axis: list(both) for axis, both in verdict.comparison.axes.items()} if verdict.comparison else {},
    }
