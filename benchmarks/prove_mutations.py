"""How many mistakes in compiled programs a proof finds: `python benchmarks/prove_mutations.py [EACH] [WORD ...]`.

Recipes with shrunk sizes are compiled for targets, each compiled program is altered in EACH ways
(`tests/proof/mutations.py`), and executed. Programs for H100 need JAX's CUDA plugin; with words only those of a recipe
or a target are made.

A mistake is found where a result deviates from one device by more than rounding may. Where nothing changes, each result
is the same to the last bit on every device, metrics included; where it is rounding, results are as near to one device's
as those of the right program, as after sums in another order. Of mistakes in collectives that are found it is said how
many the structure of the program shows as well, without any numbers.
"""

import collections
import sys
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.proof.mutations import Outcome, outcomes  # noqa: E402

AUTO = {"mesh.data": "2", "mesh.model": "2", "layout.preset": "auto"}
CONTEXT = {"mesh.data": "2", "mesh.context": "2", "layout.preset": "auto"}
STAGES = {"mesh.stage": "2", "mesh.data": "2", "layout.preset": "auto", "microbatches": "2"}
CASES = [
    ("tiny", "v5e:2x2", AUTO),
    ("tiny", "v5p:2x2x2", {}),
    ("llama_84m", "v5e:2x2", CONTEXT),
    ("llama_84m", "v6e:2x4", {}),
    ("llama_84m", "v5e:2x2", STAGES),
    ("mixtral_8x7b", "v5p:2x2x1", {}),
    ("mixtral_8x7b", "4xH100", {}),
    ("deepseek_v3", "4xH100", {"mesh.data": "2", "mesh.expert": "2"}),
    ("tiny", "4xH100", AUTO),
    ("llama_84m", "4xH100", CONTEXT),
    ("llama_84m", "4xH100", STAGES),
]
COLUMNS = ("made", "found", "nothing changes", "rounding", "missed", "in collectives, found", "and by structure")


def measured(seen: Outcome, where: str) -> collections.Counter:
    """In which columns a mistake counts."""
    columns = ["made", seen.result]
    if seen.collective and seen.result == "found":
        columns += ["in collectives, found", *(["and by structure"] if seen.structure else [])]
        if not seen.structure:
            print(f"  not by structure: {seen.kind}, {where}: {seen.line[:110]}", flush=True)
    if seen.result in ("missed", "rounding"):
        print(f"  {seen.result}: {seen.kind}, {where}, {seen.error:.1e} of {seen.right_error:.1e}", flush=True)
    return collections.Counter((seen.kind, column) for column in columns)


def main() -> None:
    each = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    total: collections.Counter = collections.Counter()
    for recipe, on, options in CASES:
        if sys.argv[2:] and not {recipe, on} & set(sys.argv[2:]):
            continue
        counts: collections.Counter = collections.Counter()
        for seen in outcomes(recipe, on, options, np.random.default_rng(0), each):
            counts += measured(seen, f"{recipe} on {on}")
        total += counts
        jax.clear_caches()  # compiled steps are large
        sums = [sum(n for (_, column), n in counts.items() if column == name) for name in COLUMNS]
        print(f"{recipe} on {on} {options}: " + ", ".join(f"{n} {c}" for n, c in zip(sums, COLUMNS)), flush=True)
    print(f"{'mistake':<32}" + "".join(f"{column:>24}" for column in COLUMNS))
    for kind in sorted({kind for kind, _ in total}):
        print(f"{kind:<32}" + "".join(f"{total[kind, column]:>24}" for column in COLUMNS))
    sums = [sum(n for (_, column), n in total.items() if column == name) for name in COLUMNS]
    print(f"{'all':<32}" + "".join(f"{n:>24}" for n in sums))


if __name__ == "__main__":
    main()
