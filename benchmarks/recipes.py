"""Every recipe beside what the search finds for the hardware that it is for: `python benchmarks/recipes.py [NAME ...]`.

Each is planned from types as it is, and with other meshes, layouts, microbatches and checkpoint policies. A recipe is
to be within 3 % of the fastest that leaves a tenth of the memory free. Minutes a recipe, and hours for all; needs no
device. The exit status is 1 where one is not.

Each row is kept in `benchmarks/results/recipes.txt` as soon as it is found, in the order of the recipes: a table that
was cut short goes on. A row is made anew where the recipe has other settings since, or its plan another time or memory,
as after a change of the planner, and where it is named; tests fail until it is. `--out FILE` keeps rows elsewhere.

With `--compile` the compilers of TPUs and GPUs are asked instead whether each recipe fits, in
`benchmarks/results/recipes_compiled.txt`: a minute a recipe on GPUs, up to an hour on TPUs (`trellis[plan]`, and JAX's
CUDA plugin). Step times are made from compiled programs as `trellis plan --compile` does; nothing runs.

With `--winner` they are asked about what the search prefers to a recipe, in `recipes_contested.txt` there. Where that
takes longer by their schedules, or leaves no tenth of the memory free, the recipe is not behind.
"""

import argparse
import dataclasses
import gc
import hashlib
import math
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tables import aligned

from trellis.plan import Plan, compile_run, judge, quick_plan, search, target
from trellis.recipes import RECIPES, hardware_of, load_run
from trellis.train import Run

RESULTS = Path(__file__).parent / "results" / "recipes.txt"
COMPILED = RESULTS.with_stem("recipes_compiled")
BEHIND, ROOM = 0.03, 0.9
# What a row says of a plan is today's within a hundredth, as settings within a hundredth are alike to the search.
SAME = 0.01
CONTESTED = RESULTS.with_stem("recipes_contested")
# Of a run, what its plan is made from.
PLANNED = ("model", "batch_size", "microbatches", "accumulation", "precision", "optimizer", "remat", "mesh", "layout")
HEADER = (
    "recipe",
    "on",
    "settings",
    "step s",
    "tokens/s a device",
    "MFU",
    "GiB",
    "of",
    "behind",
    "the search's winner",
)
BY_COMPILERS = (
    "recipe",
    "on",
    "settings",
    "GiB by types",
    "compiled",
    "of",
    "error",
    "step s",
    "compiled",
    "exposed",
    "by",
)
BY_SCHEDULES = ("recipe", "on", "settings", "compiled: step s", "the winner's", "the search's winner")


def row(name: str) -> tuple[str, ...]:
    """A recipe's line of the table: by how much it is slower than the winner, or that it has no room."""
    where = target(hardware_of(name))
    run = load_run(name)
    plan, best = quick_plan(run, where), search(run, where).roomy(ROOM)
    room = plan.memory.peak <= ROOM * where.chip.hbm_bytes
    speed = plan.tokens_per_second / where.num_devices
    gib = (f"{size / 2**30:.1f}" for size in (plan.memory.peak, where.chip.hbm_bytes))
    late = f"{plan.seconds / best.seconds - 1:+.1%}" if room and best is not None else "no room"
    words = "nothing has room" if best is None else "itself" if plan.seconds <= best.seconds and room else best.words()
    said = (f"{plan.seconds:.3f}", f"{speed:,.0f}", f"{plan.mfu:.1%}", *gib, late, words)
    return (name, where.name, settings_of(run), *said)


def settings_of(run: Run) -> str:
    """Tells runs apart whose plans may differ; a field that is new, and has its default, makes no difference."""
    given = {name: _given(getattr(run, name)) for name in PLANNED}
    given |= {} if run.scan_layers is None else {"scan_layers": run.scan_layers}
    given |= {"length": run.data.sequence_length, "options": sorted(run.compiler_options.items())}
    return hashlib.sha256(repr(given).encode()).hexdigest()[:8]


def _given(value):
    """What is not a field's default, of a record and of those in it."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [(field.name, field.default, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return type(value).__name__, {name: _given(own) for name, default, own in fields if own != default}


def has_settings(line: tuple[str, ...]) -> bool:
    """Whether a row is of the recipe's settings, on its hardware."""
    return line[1:3] == (target(hardware_of(line[0])).name, settings_of(load_run(line[0])))


def is_plan(line: tuple[str, ...], plan: Plan) -> bool:
    """Whether a row's time and memory are this plan's."""
    near = lambda column, now, digit: abs(float(line[HEADER.index(column)]) - now) <= max(SAME * now, digit)
    return near("step s", plan.seconds, 0.0005) and near("GiB", plan.memory.peak / 2**30, 0.05)


def is_todays(line: tuple[str, ...]) -> bool:
    """Whether a row is of the recipe and the planner as they are."""
    return has_settings(line) and is_plan(line, quick_plan(load_run(line[0]), target(hardware_of(line[0]))))


def compiled_row(name: str) -> tuple[str, ...]:
    """A recipe's line of the other table: memory and time of a step by types and by the compiler."""
    where = target(hardware_of(name))
    run = load_run(name)
    plan = quick_plan(run, where)
    verdict = judge(plan, *compile_run(run, where, progress=True))
    peak, seconds = verdict.compiled.peak, verdict.seconds
    gib = (f"{size / 2**30:.2f}" for size in (plan.memory.peak, peak, where.chip.hbm_bytes))
    step = ("does not fit", "-") if seconds is None else (f"{seconds:.3f}", f"{verdict.exposed / seconds:.0%}")
    by = ", ".join(f"{package} {version}" for package, version in verdict.compiled.versions.items())
    error = f"{plan.memory.peak / peak - 1:+.1%}"
    return (name, where.name, settings_of(run), *gib, error, f"{plan.seconds:.3f}", *step, by)


def contested_row(name: str) -> tuple[str, ...]:
    """A recipe and what the search prefers to it, by their compiled schedules."""
    where, run = target(hardware_of(name)), load_run(name)
    best = search(run, where).roomy(ROOM)
    if best is None or best.plan is None:
        raise SystemExit(f"the search finds no setting with room for {name}")
    said = []
    for r in (run, best.run):
        prepared, compiled = compile_run(r, where, progress=True)
        step = judge(quick_plan(r, where), prepared, compiled).seconds
        tight = r is best.run and compiled.peak > ROOM * where.chip.hbm_bytes
        said.append("does not fit" if step is None else "no room" if tight else f"{step:.3f}")
    return (name, where.name, settings_of(run), *said, best.words())


def is_behind(line: tuple[str, ...], contested: Path = CONTESTED) -> bool:
    """Whether a row says that the recipe is not what the search finds, and the compilers' schedules agree."""
    late = line[HEADER.index("behind")]
    if late == "no room" or float(late.rstrip("%")) <= 100 * BEHIND:
        return late == "no room"
    asked = kept(contested, BY_SCHEDULES).get(line[0])
    same = asked is not None and (*asked[:3], asked[-1]) == (*line[:3], line[-1])
    return is_slower(asked) if asked is not None and same else True


def is_slower(asked: tuple[str, ...]) -> bool:
    """Whether a row of contested recipes says that the search's winner takes no longer."""
    mine, winner = (math.inf if step in ("does not fit", "no room") else float(step) for step in asked[3:5])
    return mine >= winner


def has_no_room(line: tuple[str, ...]) -> bool:
    """Whether a row of the other table says that the compiler found no room."""
    compiled, most = (float(line[BY_COMPILERS.index(column)]) for column in ("compiled", "of"))
    return "does not fit" in line or compiled > most


def kept(path: Path, header: tuple[str, ...] = HEADER) -> dict[str, tuple[str, ...]]:
    """The rows of a table, by recipe."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    rows = (tuple(re.split(r" {2,}", line.strip(), maxsplit=len(header) - 1)) for line in lines)
    return {row[0]: row for row in rows if len(row) == len(header)}


def keep(path: Path, rows: dict[str, tuple[str, ...]], header: tuple[str, ...] = HEADER) -> None:
    """Writes a table of rows in the order of the recipes, whole or not at all."""
    lines = [rows[name] for name in RECIPES if name in rows]
    beside = path.with_suffix(".tmp")
    beside.write_text(aligned(header, lines, right=tuple(range(3, len(header) - 1))) + "\n")
    beside.replace(path)


def main() -> int:
    """Makes the rows of the names given; without, of all recipes that say what they are for and have none of today."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--winner", action="store_true")
    args = parser.parse_args()
    if args.winner and not args.names:
        parser.error("--winner needs the names of recipes")
    gc.set_threshold(20_000, 20, 20)  # as the commands have it
    make, header, out, wrong, current = row, HEADER, RESULTS, is_behind, is_todays
    if args.compile:
        make, header, out, wrong, current = compiled_row, BY_COMPILERS, COMPILED, has_no_room, has_settings
    if args.winner:
        make, header, out, wrong = contested_row, BY_SCHEDULES, CONTESTED, is_slower
    out = args.out or out
    wanted = args.names or [name for name in RECIPES if hardware_of(name)]
    for name in wanted:
        rows = kept(out, header)
        if name in rows and not args.names and current(rows[name]):
            continue
        line = make(name)
        print("  ".join(line), flush=True)
        keep(out, kept(out, header) | {name: line}, header)
    rows = kept(out, header)
    return int(any(wrong(rows[name]) for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
