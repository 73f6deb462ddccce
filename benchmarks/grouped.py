"""Grouped products of the recipes, compiled for machines that are not here: what runs, and how many rows it multiplies.

    python benchmarks/grouped.py v5e v5p v6e        # needs libtpu
    python benchmarks/grouped.py h100 b200          # needs JAX's CUDA plugin
    python benchmarks/grouped.py cpu                # runs here

For each shape the products of experts forward, by their rows' gradient and by their weights': kernels of the compiled
program, dense products (there are to be none), and temporaries beside the closed form: gradients of the rows and of the
weights are results, so that what is left are tables of tiles. `rows` is what our own kernels multiply, whole tiles,
over the rows there are: where the load is even, and where experts' shares are drawn (Dirichlet's distribution with 1
for each, so that the fullest of 8 gets a third). libtpu's kernel for the product forward on TPUs counts tiles of 128
rows from the sizes likewise.

On a CPU each product runs, for loads that are nearly even, beside two others, called in turn; the least processor time
counts, over that of each of these. The first is one product of as many rows with a single matrix, the bound, which no
grouped product can reach where there are many groups, because their matrices have to be read. The second has as many
matrices: a product batched over groups of the same size. In huge pages, where Linux gives them, as `trellis train`.
"""

import argparse
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis as tr
import trellis_start
from trellis.nn.moe import grouped_matmul

# Rows of a device's buffer, inner, columns, experts on a device, rows of an even load.
SHAPES = {
    "mixtral_8x7b, one expert a device": (24_576, 4096, 14_336, 1, 16_384),
    "mixtral_8x7b, all on each device": (16_384, 4096, 14_336, 8, 16_384),
    "qwen3_30b_a3b": (196_608, 2048, 768, 128, 196_608),
}
# On a CPU: rows, inner, columns, groups.
HERE = ((4096, 256, 512, 8), (16_384, 256, 512, 8), (8192, 256, 256, 64), (16_384, 256, 256, 128))
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
    """Rows of whole tiles over rows, of each kernel that says its tile, and how many tiles more than rows fill.

    On a grid of tiles each boundary between groups inside a tile makes one more; tiles of one group each are one more
    for each group at most.
    """
    said = re.findall(r"grouped\((product|gradient) \d+ rows \d+ \d+ in \d+ groups by (\d+)\)", text)
    on_grid = "tpu_custom_call" in text  # tiles lie on a grid, and two groups may share one
    found = []
    for form, tile in sorted({(form, int(tile) // (1 + on_grid)) for form, tile in said}):
        ends = np.cumsum(sizes)
        begins = ends - sizes
        if on_grid:
            count = np.where(sizes > 0, -(-ends // tile) - begins // tile, 0).sum()
        else:
            count = (-(-sizes // tile)).sum()
        besides = count - sizes.sum() / tile
        found.append(f"{form} {count * tile / sizes.sum():.3f} ({besides:.4g} tiles of {tile} besides)")
    return ", ".join(found)


def measured(dtype: str, rows: int, inner: int, columns: int, groups: int, times: int = 25) -> str:
    """The three products here, each over that with one matrix and over that batched over even groups."""
    shapes = (rows, inner), (groups, inner, columns), (rows, columns)
    x, weights, d = (jax.random.normal(jax.random.key(i), s).astype(dtype) / 16 for i, s in enumerate(shapes))
    drawn = np.random.default_rng(0)
    sizes = jnp.array(drawn.multinomial(rows, drawn.dirichlet(np.full(groups, 50.0))), jnp.int32)
    product = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(dtype)
    turned = lambda x: jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2))
    even = lambda x: x.reshape(groups, rows // groups, -1)
    ways = {
        "forward": (
            lambda x, w, d: grouped_matmul(x, w, sizes),
            lambda x, w, d: product(x, w[0]),
            lambda x, w, d: product(even(x), w),
        ),
        "rows": (
            lambda x, w, d: jax.vjp(lambda x: grouped_matmul(x, w, sizes), x)[1](d),
            lambda x, w, d: product(d, w[0].T),
            lambda x, w, d: product(even(d), jnp.swapaxes(w, 1, 2)),
        ),
        "weights": (
            lambda x, w, d: jax.vjp(lambda w: grouped_matmul(x, w, sizes), w)[1](d),
            lambda x, w, d: product(turned(x), d),
            lambda x, w, d: product(turned(even(x)), even(d)),
        ),
    }
    shown = []
    for name, fns in ways.items():
        fns, least = [jax.jit(fn) for fn in fns], [float("inf")] * 3
        for turn in range(times + 1):
            for i, fn in enumerate(fns):
                begun = time.process_time()
                jax.block_until_ready(fn(x, weights, d))
                least[i] = min(least[i], time.process_time() - begun) if turn else least[i]
        shown.append(f"{name} {least[0] / least[1]:.2f} and {least[0] / least[2]:.2f}")
    return ", ".join(shown)


def on_cpu() -> None:
    print(f"JAX {jax.__version__}; processor time over that of one product, and of one batched over even groups\n")
    for dtype in ("float32", "bfloat16"):
        for rows, inner, columns, groups in HERE:
            title = f"{rows} rows, {inner} to {columns}, {groups} groups"
            print(f"{dtype:9} {title:35} {measured(dtype, rows, inner, columns, groups)}", flush=True)


def main(chips: list[str]) -> None:
    print(f"JAX {jax.__version__}; compiled, nothing ran. Rows multiplied over rows: even load; uneven load\n")
    print(f"{'':35} {'on':5} {'kernels':>7}  {'dense':>5}  {'temporaries':>11}  rows")
    for title, (rows, inner, columns, groups, even) in SHAPES.items():
        for chip in chips:
            done = compiled(ONE[chip], rows, inner, columns, groups)
            text = done.as_text()
            kernels = len(
                re.findall(r"%(?:ragged-dot-none|grouped_product|grouped_gradient|pallas_call)[\w.]* = ", text)
            )
            dense = len(re.findall(r"= \S+ (?:dot|convolution)\(", text)) + text.count("cublas")
            size = done.memory_analysis().temp_size_in_bytes / 2**20
            spread = np.full(groups, even // groups)
            drawn = np.random.default_rng(0)
            uneven = drawn.multinomial(even, drawn.dirichlet(np.ones(groups)))
            shown = "; ".join(multiplied(text, sizes) for sizes in (spread, uneven))
            print(f"{title:35} {chip:5} {kernels:7}  {dense:5}  {size:7.1f} MiB  {shown}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="+", choices=("cpu", *ONE))
    where = parser.parse_args().where
    if "cpu" in where:
        if where != ["cpu"]:
            parser.error("cpu is measured by itself")
        trellis_start.use_huge_pages()
    jax.config.update("jax_platforms", "cpu")
    on_cpu() if where == ["cpu"] else main(where)
