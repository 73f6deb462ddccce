"""How much of a mixture's computation is routing, sorting and combining.

    python benchmarks/routing_share.py [--out benchmarks/results/routing_share.txt]

Every recipe with experts is planned from types for its hardware. What its lines in `nn/moe` compute is told in two
parts: products of experts with their gates, and the rest, which is scores, orders, rows on their way to experts and
back, and what rounds and packs them. Collectives are in neither. A minute for all; needs no device.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tables import aligned

import trellis.nn.moe
from trellis.plan import Plan, quick_plan, target
from trellis.recipes import RECIPES, hardware_of, load_run

FILES = {file.name for file in Path(trellis.nn.moe.__file__).parent.glob("*.py")}
HEADER = ("recipe", "on", "computation s", "experts", "routing, sorting, combining")


def shares(plan: Plan) -> tuple[float, float, float]:
    """Seconds of a step's computation, of experts' products and gates, and of the rest of `nn/moe`."""
    lines = [line for line in plan.times.lines if not line.axes]
    mixed = [line for line in lines if line.source.split(":")[0] in FILES]
    gates = lambda line: line.source.endswith(("(_hidden)", "(_activated)")) or line.source.startswith("experts.py:")
    products = [line for line in mixed if line.kind in ("grouped", "product") or gates(line)]
    whole, all_mixed, computed = (sum(line.seconds for line in found) for found in (lines, mixed, products))
    return whole, computed, all_mixed - computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table there")
    args = parser.parse_args()
    rows = []
    for name in RECIPES:
        run, on = load_run(name), hardware_of(name)
        if on is None or getattr(run.model, "routing", None) is None:
            continue
        whole, computed, rest = shares(quick_plan(run, target(on)))
        rows.append((name, on, f"{whole:.3f}", f"{computed / whole:.1%}", f"{rest / whole:.1%}"))
    text = aligned(HEADER, rows)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
