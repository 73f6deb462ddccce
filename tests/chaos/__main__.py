"""`python -m tests.chaos`: faults at random moments in real runs, each of which is to be told, and to lose nothing.

A seed is one run with up to four faults in a row. Afterwards the run goes on to its end, undisturbed, and its losses
are those of the run that nothing happened to, to the bit.
"""

import argparse
import collections
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.bench import Bench, Case
from tests.chaos.faults import FAULTS

MOST = 4


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"in {folder}", flush=True)
    begun = time.monotonic()
    bench = Bench(folder / "bench")
    print(f"a start takes {bench.seconds:.1f} s", flush=True)
    tally: collections.Counter[tuple[str, str]] = collections.Counter()
    failures = []
    seed = options.seed
    while seed < options.seed + options.count and time.monotonic() - begun < 60 * options.minutes:
        try:
            tried(bench, seed, tally, options.only)
        except Exception as error:
            failures.append(seed)
            print(f"\nseed {seed}: {type(error).__name__}: {error}\n", flush=True)
        seed += 1
    bench.close()
    if not failures:
        shutil.rmtree(folder)
    print(f"\n{table(tally)}\n{seed - options.seed} runs, {tally.total()} faults, {len(failures)} wrong", end="")
    print(f": seeds {failures}" if failures else "")
    return 1 if failures else 0


def tried(bench: Bench, seed: int, tally: collections.Counter[tuple[str, str]], only: str = "") -> None:
    """One seed: its faults, and the end of its run."""
    rng = random.Random(seed)
    case = Case(bench, rng, f"seed-{seed}")
    names = [name for name in FAULTS if only in name]
    said = []
    for name in rng.choices(names, k=rng.randint(1, MOST)):
        print(f"seed {seed}: {name} ...", end="", flush=True)
        outcome = FAULTS[name](case)
        print(f" {outcome}", flush=True)
        said.append((name, outcome))
    case.finish()
    tally.update(said)


def table(tally: collections.Counter[tuple[str, str]]) -> str:
    """How often each fault ended how."""
    width = max((len(name) for name, _ in tally), default=0)
    return "\n".join(f"{name:<{width}}  {times:>4}  {outcome}" for (name, outcome), times in sorted(tally.items()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10**9, help="how many seeds at most")
    parser.add_argument("--minutes", type=float, default=10, help="stop after so long (default %(default)s)")
    parser.add_argument("--only", default="", help="only faults with this in their name")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
