"""How many mistakes in compiled programs a proof finds: `python benchmarks/prove_mutations.py [EACH]`.

Recipes with shrunk sizes are compiled for targets, each compiled program is altered in EACH ways
(`tests/proof/mutations.py`), and executed.
"""

import collections
import sys
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.proof.mutations import outcomes  # noqa: E402

CASES = [
    ("tiny", "v5e:2x2", {"mesh.data": "2", "mesh.model": "2", "layout.preset": "auto"}),
    ("tiny", "v5p:2x2x2", {}),
    ("llama_84m", "v5e:2x2", {"mesh.data": "2", "mesh.context": "2", "layout.preset": "auto"}),
    ("llama_84m", "v6e:2x4", {}),
    ("llama_84m", "v5e:2x2", {"mesh.stage": "2", "mesh.data": "2", "layout.preset": "auto", "microbatches": "2"}),
    ("mixtral_8x7b", "v5p:2x2x1", {}),
]


def measured(recipe: str, on: str, options: dict[str, str], each: int) -> collections.Counter:
    """Of each kind of mistake, how many were made, how many change no result, and how many were found."""
    counts: collections.Counter = collections.Counter()
    for seen in outcomes(recipe, on, options, np.random.default_rng(0), each):
        counts[seen.kind, "made"] += 1
        counts[seen.kind, seen.result] += 1
        if seen.result == "within the bound":
            what = f"{seen.kind}, {recipe} on {on}, {seen.error:.1e} of {seen.right_error:.1e}"
            print(f"  within the bound: {what}", flush=True)
    return counts


def main() -> None:
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    total: collections.Counter = collections.Counter()
    columns = ("made", "found", "no result changes", "within the bound")
    for recipe, on, options in CASES:
        counts = measured(recipe, on, options, each)
        total += counts
        sums = [sum(n for (_, column), n in counts.items() if column == name) for name in columns]
        print(f"{recipe} on {on} {options}: " + ", ".join(f"{n} {c}" for n, c in zip(sums, columns)), flush=True)
    print(f"{'mistake':<32}" + "".join(f"{column:>20}" for column in columns))
    for kind in sorted({kind for kind, _ in total}):
        print(f"{kind:<32}" + "".join(f"{total[kind, column]:>20}" for column in columns))
    sums = [sum(n for (_, column), n in total.items() if column == name) for name in columns]
    print(f"{'all':<32}" + "".join(f"{n:>20}" for n in sums))


if __name__ == "__main__":
    main()
