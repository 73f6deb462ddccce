"""Every recipe, proven for the hardware that it is written for: `python benchmarks/prove_recipes.py [RECIPE|TARGET]`.

`trellis prove` with each of them, on the smallest slice of its family that has the recipe's mesh axes. GPU nodes need
JAX's CUDA plugin; without it their rows say so.
"""

import json
import subprocess
import sys
from importlib import metadata

SMALL = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
CASES = [
    *(("tiny", on) for on in SMALL),
    *(("starter", on) for on in SMALL),
    *(("gpt2_small", on) for on in (*SMALL, "8xH100")),
    *((f"llama_{size}", on) for size in ("84m", "270m", "540m", "1b", "2b") for on in ("v5e:2x4", "8xH100")),
    ("llama32_1b_v5e_16", "v5e:4x4"),
    ("llama_8b", "8xH100"),
    ("llama_8b_v5e_256", "v5e:2x4"),
    ("llama_8b_v5p_64", "v5p:2x2x2"),
    ("llama_8b_v6e_256", "v6e:2x4"),
    ("llama_70b", "2x8xH100"),
    ("llama_70b_v5p_512", "v5p:2x2x2"),
    ("mixtral_8x7b", "8xH100"),
    ("mixtral_8x7b_v5p_64", "v5p:2x2x2"),
]


def row(recipe: str, on: str) -> tuple[str, ...]:
    """A line of the table."""
    program = "import sys; from trellis.commands.line import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "prove", recipe, "--on", on, "--no-reason", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        seen = [line for line in done.stderr.splitlines() if "seen:" in line] or done.stderr.splitlines()[-1:]
        return recipe, on, "", "not proven", "", " ".join(seen).strip()[:110]
    proof = json.loads(done.stdout)
    mesh = " ".join(f"{axis}={size}" for axis, size in proof["mesh"].items() if size > 1)
    error = "does not end" if proof["error"] is None else f"{proof['error']:.1e}"
    matched, faults = proof["structure"], proof["structure"]["faults"]
    there = f"{matched['rows'] - sum(fault.startswith('missing') for fault in faults)}/{matched['rows']}"
    more = "; ".join(faults) or f"{sum(proof['seconds'].values()):.0f} s"
    verdict = f"{'proven' if proof['proven'] else 'WRONG'} {error}"
    return recipe, on, mesh, verdict, f"{there} in {matched['collectives']}", more


def main() -> None:
    asked = sys.argv[1:]
    packages = {package.name: package.version for package in metadata.distributions()}
    compilers = ("jax", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
    versions = ", ".join(f"{name} {packages[name]}" for name in compilers if name in packages)
    print(f"{versions}; rows of the ledger that are in so many collectives; seconds beside other work")
    for case in CASES:
        if not asked or case[0] in asked or case[1] in asked:
            print("{:<20} {:<10} {:<24} {:<16} {:<14} {}".format(*row(*case)), flush=True)


if __name__ == "__main__":
    main()
