"""Grouped products of the recipes, compiled for machines that are not here: what runs, and how many rows it multiplies.

    python benchmarks/grouped.py v5e v5p v6e        # needs libtpu
    python benchmarks/grouped.py h100 b200          # needs JAX's CUDA plugin

For each shape the products of experts forward, by their rows' gradient and by their weights': kernels of the compiled
program, dense products (there are to be none), and temporaries beside the closed form: gradients of the rows and of the
weights are results, so that what is left are tables of tiles. `rows` is what our own kernels multiply, whole tiles,
over the rows there are: where the load is even, and where experts' shares are drawn (Dirichlet's distribution with 1
for each, so that the fullest of 8 gets a third). libtpu's kernel for the other two products on TPUs counts tiles of 128
rows from the sizes likewise.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
from trellis.nn.moe import grouped_matmul

# Rows of a device's buffer, inner, columns, experts on a device, rows of an even load.
SHAPES = {
    "mixtral_8x7b, one expert a device": (24_576, 4096, 14_336, 1, 16_384),
    "mixtral_8x7b, all on each device": (16_384, 4096, 14_336, 8, 16_384),
    "qwen3_30b_a3b": (196_608, 2048, 768, 128, 196_608),
}
ONE = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "h100": "h100:1", "b200": "b200:1"}


def compiled(on: str, rows: int, inner: int, columns: int, groups: int):
    """The three products on one device."""
    mesh = jax.sharding.Mesh(tr.target_devices(on)[:1], "x", axis_types=(AxisType.Explicit,))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
    given = (
        put(jnp.bfloat16, rows, inner),
        put(jnp.bfloat16, groups, inner, columns),
        put(jnp.int32, groups),
        put(jnp.bfloat16, rows, columns),
    )

    def all_three(rows, weights, sizes, d):
        made, pull = jax.vjp(lambda rows, weights: grouped_matmul(rows, weights, sizes), rows, weights)
        return made, pull(d)

    with jax.set_mesh(mesh):
        return jax.jit(jax.shard_map(all_three, in_specs=P(), out_specs=P())).lower(*given).compile()


def multiplied(text: str, sizes: np.ndarray) -> str:
    """Rows of whole tiles over rows, of each kernel that says its tile."""
    tiles = {
        int(tile) // (2 if form == "gradient" and "tpu_custom_call" in text else 1): form
        for form, tile in re.findall(r"grouped\((product|gradient) \d+ rows \d+ \d+ in \d+ groups by (\d+)\)", text)
    }
    found = []
    for tile, form in sorted(tiles.items()):
        ends = np.cumsum(sizes)
        begins = ends - sizes
        if "tpu_custom_call" in text:  # tiles lie on a grid, and two groups may share one
            count = np.where(sizes > 0, -(-ends // tile) - begins // tile, 0).sum()
        else:
            count = (-(-sizes // tile)).sum()
        found.append(f"{form} {count * tile / sizes.sum():.3f}")
    return ", ".join(found)


def main() -> None:
    print(f"JAX {jax.__version__}; compiled, nothing ran. Rows multiplied over rows: even load; uneven load\n")
    print(f"{'':35} {'on':5} {'kernels':>7}  {'dense':>5}  {'temporaries':>11}  rows")
    for title, (rows, inner, columns, groups, even) in SHAPES.items():
        for chip in sys.argv[1:]:
            done = compiled(ONE[chip], rows, inner, columns, groups)
            text = done.as_text()
            kernels = len(re.findall(r"%(?:ragged-dot-none|grouped_gradient|pallas_call)[\w.]* = ", text))
            dense = len(re.findall(r"= \S+ (?:dot|convolution)\(", text)) + text.count("cublas")
            size = done.memory_analysis().temp_size_in_bytes / 2**20
            spread = np.full(groups, even // groups)
            drawn = np.random.default_rng(0)
            uneven = drawn.multinomial(even, drawn.dirichlet(np.ones(groups)))
            shown = "; ".join(multiplied(text, sizes) for sizes in (spread, uneven))
            print(f"{title:35} {chip:5} {kernels:7}  {dense:5}  {size:7.1f} MiB  {shown}", flush=True)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    jax.config.update("jax_platforms", "cpu")
    main()
