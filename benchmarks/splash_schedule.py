"""How much of a TPU's peak splash attention reaches, and a ring's own kernels, by libtpu's schedule of them.

    python benchmarks/splash_schedule.py [CHIP ...]        v5e, v5p, v6e; needs libtpu 0.0.42.*, no TPU

libtpu writes the bundles of instructions that it schedules for a kernel. Of these the largest region is what is
computed for one block of scores; it runs for blocks that are seen, what stands around it for all blocks, and the other
regions, which begin and end a row of blocks, once a row. Of a ring's backward kernel all regions count for each block
of queries, those too that run once for all of them. FLOPs are of what is seen: two products forward and five backward
for each pair of a query and a key. What waits for memory is not counted. The rates in
`src/trellis/hardware/chips.yaml` come from here.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tables import aligned

RESULTS = Path(__file__).parent / "results" / "splash_schedule.txt"
SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# Positions, whether the mask is causal.
TILES = (8192, False), (8192, True), (4096, True)
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 128
# Positions of a tile of a ring.
RING = 8192
# libtpu without a TPU, beside others.
ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# Products of a kernel, and what its sides are called.
PRODUCTS = {"fwd": 2, "dkv": 5}
SIDES = {"fwd": ('"block_q', '"block_kv'), "dkv": ("block_q_dkv", "block_kv_dkv")}


def measure(chip: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """The lines of one chip: the share of its peak that each tile's kernels reach."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.topologies import get_topology_desc
    from jax.sharding import NamedSharding, PartitionSpec

    import trellis as tr
    from trellis.nn import dot_product_attention
    from trellis.plan import target

    mesh = tr.make_mesh(get_topology_desc(platform="tpu", topology_name=SLICES[chip]).devices[:1], data=1)
    rates = target(SLICES[chip]).chip
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def compiled(length: int, causal: bool) -> str:
        some = lambda heads: jax.ShapeDtypeStruct((BATCH, length, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding)
        total = lambda q, k, v: jnp.sum(jnp.sin(dot_product_attention(q, k, v, causal=causal).astype(jnp.float32)))
        with jax.set_mesh(mesh):
            step = jax.jit(jax.grad(total, (0, 1, 2))).lower(some(HEADS), some(KV_HEADS), some(KV_HEADS))
            return step.compile().as_text()

    for length, causal in TILES:
        for file in folder.iterdir():
            file.unlink()
        text = compiled(length, causal)
        pairs = length * (length + 1) / 2 if causal else length**2
        shares, blocks = [], []
        for kernel, products in PRODUCTS.items():
            sides = tuple(int(re.search(rf"{side}\W+(\d+)", text)[1]) for side in SIDES[kernel])
            bundles, grid = scheduled_bundles(folder, f"splash_mha_{kernel}_"), (length // sides[0], length // sides[1])
            cycles = cycles_of(bundles, grid, sides, causal=causal, columns=kernel == "fwd")
            flops = products * 2.0 * BATCH * HEADS * pairs * HEAD_DIM
            shares.append(flops / cycles / (rates.bf16_flops / rates.clock))
            blocks.append("{} x {}".format(*sides))
        both = sum(PRODUCTS.values()) / sum(n / share for n, share in zip(PRODUCTS.values(), shares))
        shown = (f"{share:.2f}" for share in (*shares, both))
        yield chip, f"{length:,}", "causal" if causal else "whole", *dict.fromkeys(blocks), *shown
    yield from ring(chip, folder, rates)


def ring(chip: str, folder: Path, rates) -> Iterator[tuple[str, ...]]:
    """The line of a tile that every query of a ring sees whole: of two devices, each with one tile of its own keys."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.topologies import get_topology_desc
    from jax.sharding import NamedSharding, PartitionSpec

    import trellis as tr
    from trellis.nn import dot_product_attention

    mesh = tr.make_mesh(get_topology_desc(platform="tpu", topology_name=SLICES[chip]).devices[:2], context=2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    some = lambda heads: jax.ShapeDtypeStruct((BATCH, 2 * RING, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding)
    total = lambda q, k, v: jnp.sum(jnp.sin(dot_product_attention(q, k, v, causal=False).astype(jnp.float32)))
    for file in folder.iterdir():
        file.unlink()
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(total, (0, 1, 2))).lower(some(HEADS), some(KV_HEADS), some(KV_HEADS))
        text = step.compile().as_text()
    shares, blocks = [], []
    for name, products in zip(("attention_further", "attention_gradient_further"), PRODUCTS.values()):
        call = re.search(rf"%{name}[.\d]* = ", text).start()
        queries, keys = (
            int(re.compile(rf"block_{side}\W+(\d+)").search(text, call)[1]) for side in ("queries", "keys")
        )
        bundles, grid = scheduled_bundles(folder, f"{name}."), (RING // queries, RING // keys)
        if name == "attention_further":
            cycles = cycles_of(bundles, grid, (queries, keys), causal=False, columns=True)
        else:  # a kernel for each block of keys
            cycles = grid[1] * all_of(bundles)
        flops = products * 2.0 * BATCH * HEADS * RING**2 * HEAD_DIM
        shares.append(flops / cycles / (rates.bf16_flops / rates.clock))
        blocks.append(f"{queries} x {keys}")
    both = sum(PRODUCTS.values()) / sum(n / share for n, share in zip(PRODUCTS.values(), shares))
    yield chip, f"{RING:,}", "ring", ", ".join(dict.fromkeys(blocks)), *(f"{share:.2f}" for share in (*shares, both))


def scheduled_bundles(folder: Path, name: str) -> list[tuple[int, str]]:
    """The numbered bundles of the first kernel of a name in a dump."""
    found = sorted(folder.glob(f"*{name}*final_bundles.txt"))
    path, *_ = (file for file in found if "schedule-analysis" not in file.name)
    numbered = (re.match(r"\s*0x([0-9a-f]+)\s", line) for line in path.read_text().splitlines())
    return [(int(m[1], 16), m.string) for m in numbered if m]


def all_of(bundles: list[tuple[int, str]]) -> float:
    """Cycles of a kernel of a loop, on each core of a chip: of all that stands in it at each turn."""
    begin, *within = [number for number, line in bundles if re.search(r"0x[0-9a-f]+\s+LB", line)]
    exits = [(number, re.search(r", (\d+) /\* loop exit test", line)) for number, line in bundles]
    turns = {number: int(found[1]) for number, found in exits if found}
    end = max(turns)
    cycles = end - begin
    for inner in within:
        here = " ".join(line for number, line in bundles if number == inner)
        names = set(re.findall(r"Start region (\d+)", here))
        last = max(n for n, line in bundles if names.intersection(re.findall(r"End region (\d+)", line)))
        cycles += (turns[min(number for number in turns if number >= inner)] - 1) * (last - inner)
    return (turns[end] - 2) * cycles  # it begins before the first block


def cycles_of(bundles: list[tuple[int, str]], grid, sides, *, causal: bool, columns: bool) -> float:
    """Cycles of a kernel, on each core of a chip.

    Args:
        bundles: as it is scheduled.
        grid: how many blocks of queries and of keys there are.
        sides: of a block.
        causal: whether some blocks are hidden.
        columns: whether a row of blocks is along the keys.
    """
    start = next(number for number, line in bundles if re.search(r"0x[0-9a-f]+\s+LB", line))
    exits = ((number, re.search(r", (\d+) /\* loop exit test", line)) for number, line in bundles)
    end, steps = next((number, int(m[1]) - 2) for number, m in exits if m)  # it begins before the first block
    opened, regions = {}, []
    for number, line in bundles:
        for kind, name in re.findall(r"(Start|End) region (\d+)", line):
            if kind == "Start":
                opened[name] = number
            elif start <= opened.get(name, -1) < number - 30 and number <= end:
                regions.append((opened[name], number))
    leaves = [r for r in regions if not any(r != s and r[0] <= s[0] and s[1] <= r[1] for s in regions)]
    *ends, block = sorted(b - a for a, b in leaves)
    rows, blocks = grid
    seen = sum(math.ceil((i + 1) * sides[0] / sides[1]) for i in range(rows)) if causal else rows * blocks
    around = end - start - block - sum(ends)
    return steps * (around + block * seen / (rows * blocks) + sum(ends) / (blocks if columns else rows))


def main(names: list[str]) -> None:
    """Measures each chip in a process of its own, since libtpu reads its options once, and writes the table.

    Chips that are not named keep their lines.
    """
    if os.environ.get("LIBTPU_INIT_ARGS", "").startswith("--xla_jf_dump_to="):
        folder = Path(os.environ["LIBTPU_INIT_ARGS"].split()[0].partition("=")[2])
        for line in measure(names[0], folder):
            print(" | ".join(line), flush=True)
        return
    lines = []
    kept = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    for chip in SLICES:
        if names and chip not in names:
            lines += [tuple(re.split("  +", line)) for line in kept if line.startswith(f"{chip} ")]
            continue
        with tempfile.TemporaryDirectory() as folder:
            options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
            done = subprocess.run(
                [sys.executable, __file__, chip],
                env=os.environ | ALONE | {"LIBTPU_INIT_ARGS": options},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        lines += [tuple(line.split(" | ")) for line in done.stdout.splitlines() if line.startswith(f"{chip} | ")]
    header = "chip", "positions", "mask", "blocks", "forward", "backward", "together"
    text = [
        f"jax {version('jax')}, libtpu {version('libtpu')}; the compiler's schedule, nothing ran",
        f"{HEADS} heads of {HEAD_DIM}, {KV_HEADS} of keys; share of the chip's bfloat16 peak, of FLOPs that are seen",
        "",
        aligned(header, lines, right=range(4, 7)),
    ]
    RESULTS.write_text("\n".join(text) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=", ".join(SLICES))
    args = parser.parse_args()
    if absent := set(args.chips) - set(SLICES):
        parser.error(f"no chip {' '.join(sorted(absent))}; there are {', '.join(SLICES)}")
    main(args.chips)
