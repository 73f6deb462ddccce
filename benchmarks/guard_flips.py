"""A bit flipped in each array of a state and of a batch, for every layout of the equivalence suite: what a guard says.

    python benchmarks/guard_flips.py

Each array is flipped on one device, and the guard has to name it, the device and the mesh axes, and nothing else. What
is held once has nothing to be compared with: there steps are made twice, where the layout holds a part of its state
once on every mesh axis.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

import conftest  # noqa: F401  eight CPU devices
from tests.proof.cases import layouts
from tests.train.flips import flipped_in


def main() -> None:
    cases = {(case.name, case.family): case for case in layouts()}  # of each kind of hardware the same
    for (name, family), case in cases.items():
        count = 4 if case.on.startswith("4x") else 8
        found, alone, twice = flipped_in(case.run, jax.devices()[:count])
        sizes = dataclasses.asdict(case.run.mesh).items()
        mesh = " ".join(f"{axis}={size}" for axis, size in sizes if size and size > 1)
        steps = ", steps are made twice" if twice else ""
        print(f"{name:<26}{family:<11}{mesh:<31}{found} found and named, {alone} held once{steps}", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
