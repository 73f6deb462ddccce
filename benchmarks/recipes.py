"""Every recipe beside what the search finds for the hardware that it is for: `python benchmarks/recipes.py [NAME ...]`.

Each is planned from types as it is, and with other meshes, layouts, microbatches and checkpoint policies. A recipe is
to be within 3 % of the fastest that leaves a tenth of the memory free. Minutes a recipe, and hours for all; needs no
device. The exit status is 1 where one is not.

Each row is kept in `benchmarks/results/recipes.txt` as soon as it is found, in the order of the recipes, and a recipe
that has one there is not planned again: a table that was cut short goes on. Naming a recipe plans it anew.
`--out FILE` keeps them elsewhere; begin with an empty file where recipes or the planner have changed.
"""

import argparse
import gc
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tables import aligned

from trellis.plan import quick_plan, search, target
from trellis.recipes import RECIPES, hardware_of, load_run

RESULTS = Path(__file__).parent / "results" / "recipes.txt"
BEHIND, ROOM = 0.03, 0.9
HEADER = ("recipe", "on", "step s", "tokens/s a device", "MFU", "GiB", "of", "behind", "the search's winner")


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
    return (name, where.name, f"{plan.seconds:.3f}", f"{speed:,.0f}", f"{plan.mfu:.1%}", *gib, late, words)


def is_behind(line: tuple[str, ...]) -> bool:
    """Whether a row says that the recipe is not what the search finds."""
    late = line[HEADER.index("behind")]
    return late == "no room" or float(late.rstrip("%")) > 100 * BEHIND


def kept(path: Path) -> dict[str, tuple[str, ...]]:
    """The rows of a table, by recipe."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    rows = (tuple(re.split(r" {2,}", line.strip(), maxsplit=len(HEADER) - 1)) for line in lines)
    return {row[0]: row for row in rows if len(row) == len(HEADER)}


def keep(path: Path, rows: dict[str, tuple[str, ...]]) -> None:
    """Writes a table of rows in the order of the recipes, whole or not at all."""
    lines = [rows[name] for name in RECIPES if name in rows]
    beside = path.with_suffix(".tmp")
    beside.write_text(aligned(HEADER, lines, right=tuple(range(2, 8))) + "\n")
    beside.replace(path)


def main() -> int:
    """Plans the recipes of the names given; without, all that say what they are for and have no row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args()
    gc.set_threshold(20_000, 20, 20)  # as the commands have it
    wanted = args.names or [name for name in RECIPES if hardware_of(name)]
    for name in wanted:
        rows = kept(args.out)
        if name in rows and not args.names:
            continue
        line = row(name)
        print("  ".join(line), flush=True)
        keep(args.out, rows | {name: line})
    rows = kept(args.out)
    return int(any(is_behind(rows[name]) for name in wanted))


if __name__ == "__main__":
    sys.exit(main())
