"""Every recipe beside what the search finds for the hardware that it is for: `python benchmarks/recipes.py [NAME ...]`.

Each is planned from types as it is, and with other meshes, layouts, microbatches and checkpoint policies. A recipe is
to be within 3 % of the fastest that leaves a tenth of the memory free. Minutes; needs no device. The exit status is 1
where one is not. The table is written to `benchmarks/results/recipes.txt` where all recipes are planned.
"""

import sys
from pathlib import Path

from tables import aligned

from trellis.plan import quick_plan, search, target
from trellis.recipes import RECIPES, hardware_of, load_run

RESULTS = Path(__file__).parent / "results" / "recipes.txt"
BEHIND, ROOM = 0.03, 0.9
HEADER = ("recipe", "on", "step s", "tokens/s a device", "MFU", "GiB", "of", "behind", "the search's winner")


def row(name: str) -> tuple[tuple[str, ...], float]:
    """A recipe's line of the table, and by how much it is slower than the winner; infinite where it has no room."""
    where = target(hardware_of(name))
    run = load_run(name)
    plan, best = quick_plan(run, where), search(run, where).roomy(ROOM)
    room = plan.memory.peak <= ROOM * where.chip.hbm_bytes
    late = plan.seconds / best.seconds - 1 if room else float("inf")
    speed = plan.tokens_per_second / where.num_devices
    gib = (f"{size / 2**30:.1f}" for size in (plan.memory.peak, where.chip.hbm_bytes))
    words = "nothing has room" if best is None else "itself" if late <= 0 else best.words()
    figures = (f"{plan.seconds:.3f}", f"{speed:,.0f}", f"{plan.mfu:.1%}", *gib, f"{late:+.1%}")
    return (name, where.name, *figures, words), late


def main(names: list[str]) -> int:
    """Plans the recipes of these names; all that say what they are for, if there is none."""
    rows, late = [HEADER], 0.0
    for name in names or [name for name in RECIPES if hardware_of(name)]:
        line, slower = row(name)
        print("  ".join(line), flush=True)
        rows.append(line)
        late = max(late, slower)
    if not names:
        RESULTS.write_text(aligned(rows[0], rows[1:], right=tuple(range(2, 8))) + "\n")
    return int(late > BEHIND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
