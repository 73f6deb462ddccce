"""Steps of GPU recipes scheduled by the plan's estimates, beside the compiler's own schedule.

    python benchmarks/schedules.py [--names mixtral_8x7b] [--folder costs]

Compiles each recipe ahead of time for its GPUs (needs JAX's CUDA plugin, no GPU) as `trellis plan --compile --costs`
does: once as it is, then with a file of costs, what each instruction takes by the plan, which XLA's scheduler takes
instead of its guesses. Both schedules are replayed in their order with the same estimates, so a row says by how much
the order is better, and not what a GPU does. Nothing ran.

`step s` is the step replayed, `open` what of it waits for collectives, `of` how long these take in all; `types` is the
quick plan. Rows are kept in `benchmarks/results/schedules.txt` as they are made.
"""

import argparse
import sys
from pathlib import Path

from recipes import keep, kept

from trellis.plan import Verdict, compile_run, judge, quick_plan, schedule_by_costs, target
from trellis.recipes import RECIPES, hardware_of, load_run

OUT = Path(__file__).parent / "results" / "schedules.txt"
HEADER = ("recipe", "on", "types", "step s", "open", "of", "GiB", "by costs", "open", "of", "GiB", "saves")


def said(verdict: Verdict) -> tuple[str, ...]:
    """Seconds of a step, of waiting, of collectives in all, and memory."""
    taken = (verdict.seconds or 0.0, verdict.exposed, verdict.exposed + verdict.hidden)
    return (*(f"{seconds:.3f}" for seconds in taken), f"{verdict.compiled.peak / 2**30:.2f}")


def row(name: str, folder: Path) -> tuple[str, ...]:
    """A recipe's line."""
    run, where = load_run(name), target(hardware_of(name))
    plan = quick_plan(run, where)
    prepared, compiled = compile_run(run, where, progress=True)
    first = judge(plan, prepared, compiled)
    best = schedule_by_costs(plan, prepared, first, folder)
    saved = f"{1 - best.seconds / first.seconds:.1%}" if best.seconds and first.seconds else "-"
    return (name, where.name, f"{plan.seconds:.3f}", *said(first), *said(best), saved)


def main() -> int:
    """Makes the rows of the names given; without, of all recipes for GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--folder", type=Path, default=Path("costs"), help="where files of costs are written")
    args = parser.parse_args()
    gpus = [name for name in RECIPES if (on := hardware_of(name)) and target(on).chip.kind == "gpu"]
    for name in args.names or gpus:
        line = row(name, args.folder)
        print("  ".join(line), flush=True)
        keep(OUT, kept(OUT, HEADER) | {name: line}, HEADER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
