"""What transitions between shardings send: `tr.reshard`, one collective at a time, against one `jax.reshard`.

    python benchmarks/transitions.py [COUNT]

Draws COUNT (300) pairs of shardings for each mesh and rank, compiles both ways for CPU devices (XLA's partitioner is
the same for all platforms) and adds up the bytes that a device sends by the compiled collectives. The ledger's bytes of
the first way are held against what was compiled. Counts, exact on any machine.
"""

import argparse
import itertools
import random
import statistics

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import trellis as tr
from trellis import inspect

SIZE = 16  # of each dimension
NAMES = ("rows", "columns", "depth")
CASES = [({"x": 2, "y": 2, "z": 2}, 2), ({"x": 2, "y": 2, "z": 2}, 3), ({"x": 4, "y": 2}, 2), ({"x": 4, "y": 2}, 3)]


def placements(axes, rank: int):
    """All ways to slice `rank` dimensions over some of the mesh axes."""
    for homes in itertools.product(range(-1, rank), repeat=len(axes)):
        held = [[axis for axis, home in zip(axes, homes, strict=True) if home == i] for i in range(rank)]
        yield from itertools.product(*map(itertools.permutations, held))


def text(place) -> str:
    """In the notation: `rows/x columns/y/z`."""
    return " ".join("/".join((name, *axes)) for name, axes in zip(NAMES, place))


def spec(place) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in place))


def both(mesh, before, after) -> tuple[int, int, int]:
    """Bytes that a device sends: in steps, by the ledger, and at once."""
    like = jax.ShapeDtypeStruct((SIZE,) * len(before), jnp.float32, sharding=NamedSharding(mesh, spec(before)))
    in_steps = lambda x: tr.reshard(f"{text(before)} -> {text(after)}", x)
    at_once = lambda x: jax.reshard(x, NamedSharding(mesh, spec(after)))
    with jax.set_mesh(mesh):
        compiled = [inspect.collectives(jax.jit(f).lower(like).compile(), mesh) for f in (in_steps, at_once)]
        told = inspect.ledger(in_steps, like)
    return compiled[0].total(), told.total(), compiled[1].total()


def main(count: int) -> None:
    print(
        f"{'mesh':<16}dimensions  transitions  same bytes  fewer  more  at once / in steps: median, most  ledger right"
    )
    for sizes, rank in CASES:
        mesh = tr.make_mesh(**sizes)
        every = sorted(placements(tuple(sizes), rank))
        pairs = [(before, after) for before in every for after in every if before != after]
        found = [both(mesh, *pair) for pair in random.Random(0).sample(pairs, min(count, len(pairs)))]
        fewer = [once / steps for steps, _, once in found if steps < once]
        same, more = sum(s == o for s, _, o in found), sum(s > o for s, _, o in found)
        right = sum(steps == told for steps, told, _ in found)
        shape = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        print(
            f"{shape:<16}{rank:>10}{len(found):>13}{same:>12}{len(fewer):>7}{more:>6}"
            f"{f'{statistics.median(fewer):.2f}, {max(fewer):.1f}' if fewer else '':>33}{right:>14}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=300, metavar="COUNT")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    main(args.count)
