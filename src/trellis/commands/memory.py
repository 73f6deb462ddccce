"""`trellis memory`."""

import argparse
import json
import sys
from pathlib import Path

from trellis.commands.command import Command, check_place, some_path, with_options
from trellis.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `trellis memory`."""
    parser.add_argument("--on", metavar="TARGET", help="hardware that is not here (default: this machine's devices)")
    parser.add_argument("--hardware", metavar="FILE.yaml", help="more chips, in the format of the built-in table")
    parser.add_argument(
        "--svg",
        type=some_path,
        metavar="FILE.svg",
        help="also write a picture, with an area for each named buffer",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Prints what each device holds at the peak of a step of `args.run`, by kind and by name."""
    from trellis.plan.adapt import adapt
    from trellis.plan.phases import fullest, phases_text, plan_phases
    from trellis.plan.prepared import prepare
    from trellis.plan.quick import plan_of
    from trellis.plan.text import as_json, headline, kept_table, memory_table
    from trellis.plan.ways_to_fit import excess_text, ways_to_fit
    from trellis.run.unheeded import check_given

    if args.svg:
        check_place(Path(args.svg))
    where, devices = _hardware(args)
    run, changed = adapt(args.run, where, args.given) if args.on else (args.run, [])
    check_given(run, args.given)
    planned = lambda run: plan_of(prepare(run, where, devices), where)
    plans = plan_phases(run, planned, every_size=True)
    plan = fullest(plans).plan
    if args.svg:
        Path(args.svg).write_text(plan.memory.svg(), encoding="utf-8")
        print(f"picture written to {args.svg}", file=sys.stderr)
    if args.json:
        print(json.dumps(as_json(plan)["memory"] | plan.memory.as_dict(), indent=1))
        return 0
    lines = headline(plan, changed).splitlines()
    lines = lines[: 3 + len(changed)] if args.on else lines[:2]
    if run.lengths:
        print(phases_text(plans) + "\n")
    print("\n".join(lines), memory_table(plan, 16), kept_table(plan), sep="\n\n")
    if not plan.fits:
        applied = lambda options: with_options(args, options, where if args.on else None)
        whole = lambda run: fullest(plan_phases(run, planned)).plan
        print("\n" + excess_text(plan, ways_to_fit(run, whole, plan=plan, applied=applied)))
    return 0


def _hardware(args: argparse.Namespace):
    """The target of `--on`, with devices that are only described, or this machine's own."""
    if args.on:
        from trellis.hardware.chips import target
        from trellis.hardware.described import described_devices

        where = target(args.on, args.hardware)
        return where, described_devices(where)
    from trellis.hardware.local import local_target
    from trellis.train.devices import find_devices

    if args.hardware:
        rule, fix = "`--hardware` needs a target.", "name one with --on, or leave it out"
        raise UserError(rule, seen=f"--hardware {args.hardware} without --on", where="--hardware", fix=fix)
    devices = find_devices(args.run)
    return local_target(devices), devices


COMMAND = Command(
    name="memory",
    summary="show what each device holds, by kind",
    arguments=arguments,
    execute=execute,
    recipe="",
)
