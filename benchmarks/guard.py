"""What comparing copies costs: the time of a comparison against the time of a step.

    python benchmarks/guard.py [RECIPE] [--devices 2] [--layout.preset data] [--FIELD VALUE ...]

Times alternate, so that what else the machine does meets both. Prints medians, the share of the time of a run at
`guard.every: 100`, where every second comparison comes with a step that is made twice if a part of the state is held
once, and the bytes that a device sends. A comparison puts the batch on the devices once more; reading it is not in.
"""

import argparse
import json
import statistics
import sys
import time

import jax
import numpy as np

from trellis.recipes import load_run
from trellis.train import CompiledStep, Guard, LastGood, assemble, find_devices

ROUNDS, EVERY = 15, 100


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    _, words = parser.parse_known_args(words)
    recipe = words.pop(0) if words and not words[0].startswith("--") else "starter"
    if len(words) % 2 or not all(name.startswith("--") for name in words[::2]):
        parser.error(f"fields are given as --FIELD VALUE, got {' '.join(words)}")
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    run = load_run(recipe, {"layout.preset": "data", **options, "guard.every": str(EVERY)})
    assembled = assemble(run, find_devices(run))
    step, guard = CompiledStep(assembled.step, assembled.compiler_options), Guard(assembled)
    times: dict[str, list[float]] = {"step": [], "comparison": [], "replay": []}
    ones = lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding)
    with assembled.layout:
        put = lambda: jax.tree.map(ones, assembled.abstract_batch())
        state, batch = assembled.init(), put()
        for n in range(ROUNDS + 1):
            begun = time.perf_counter()
            replayed = jax.block_until_ready(guard.replay(step, state, batch, 2 * EVERY))
            times["replay"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            times["step"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            digests = jax.block_until_ready(guard.digests(state, batch, EVERY, save=False, again=put))
            times["comparison"].append(time.perf_counter() - begun)
            guard.check({k: np.asarray(v) for k, v in (digests | replayed).items()}, n, lambda: LastGood("", ""))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    once = medians["comparison"] + (medians["replay"] / 2 if replayed else 0)  # of every second one
    result = {
        "recipe": recipe,
        "mesh": dict(assembled.layout.mesh.shape),
        "step_seconds": round(medians["step"], 4),
        "comparison_seconds": round(medians["comparison"], 5),
        "replay_seconds": round(medians["replay"], 4) if replayed else None,
        f"percent_of_the_time_at_every_{EVERY}": round(100 * once / (EVERY * medians["step"]), 3),
        "bytes_from_a_device": guard.ledger().total(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
