"""Overlapped matrix multiplications on TPU slices that are not here: what the compiler's schedule says.

    python benchmarks/overlap_tpu.py [--slices v5e:2x4] [--products "llama 8B"] [--parts gather] [--timeline]

Compiles ahead of time for v5e:2x4, v6e:2x4 and v5p:2x2x2 (needs libtpu, no TPU) and prints, for each product,

    compute     one device's share without any communication: the bound
    plain       all-gather, or reduce-scatter, and a product, as `reshard` and `einsum` in manual mode write them
    compiler    whole arrays with shardings: XLA may choose its own windowed form
    ours        rings of `trellis.collectives`: one way, both ways, both ways with sums or with all slices in 2 chunks
    layout      the block in named tensors under a layout with `overlap=["mlp"]`, no line of it changed

`products us` is the compiler's own estimate of everything but communication (cycles of each scheduled fusion, over
the chip's clock). `total us` replays the schedule in its order: a permute holds its direction of the link for its bytes
over the published bandwidth, a product takes its cycles, and a `done` waits for what has not arrived (`waits us`).
XLA's own gathers and reductions are given both directions at once. Latencies of links are not counted. `hidden` are
collectives of which the schedule waits for less than a tenth. `links us` is what the busier direction of the links
needs alone: no schedule is shorter than that, nor than the products. Neighbours along `y` are neighbours on the chip.
"""

import argparse
import dataclasses
import platform
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import trellis as tr
from trellis import bf16
from trellis.collectives import Ring, feed_forward, gather_matmul, matmul_scatter
from trellis.inspect import parse_program
from trellis.nn import swiglu
from trellis.plan import chips

SLICES = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2")


@dataclasses.dataclass(frozen=True)
class Product:
    """The types of a feed-forward block's activation, and its sizes."""

    sizes: dict
    x: str
    hidden: str
    gated: bool = False


PRODUCTS = {
    # The JAX chapter of "How To Scale Your Model": B, D, F over a mesh of 2 x 4, D sliced between blocks.
    "chapter": Product({"batch": 1024, "embed": 2048, "mlp": 8192}, "batch/x embed/y", "batch/x mlp/y"),
    # A feed-forward block of Llama 3 8B: 4 sequences of 2,048 on 8 devices, positions sliced between blocks.
    "llama 8B": Product(
        {"batch": 4, "pos": 2048, "embed": 4096, "mlp": 14336}, "batch/x pos/y embed", "batch/x pos mlp/y", gated=True
    ),
}
PARTS = ("gather", "scatter", "block")
INTO, OUT = "embed mlp/y", "mlp/y embed"
BOTH, IN_TWO = Ring(axis="y", both_ways=True), Ring(axis="y", both_ways=True, chunks=2)
# How slices of the activation travel, and how sums do.
RINGS = {
    "ours, one way": (Ring(axis="y"), Ring(axis="y")),
    "ours, both ways": (BOTH, BOTH),
    "ours, sums in 2": (BOTH, IN_TWO),
    "ours, all in 2": (IN_TWO, IN_TWO),
}


def bare(text: str) -> str:
    return " ".join(tr.parse(text).names)


def whole(text: str) -> str:
    return text.replace("/y", "")


def activation(*hidden):
    return jax.nn.relu(hidden[0]) if len(hidden) == 1 else jax.nn.silu(hidden[0]) * hidden[1]


def types(product: Product, part: str) -> tuple[list[str], str]:
    """Those of the operands, and of the result."""
    weights = [INTO] * (1 + product.gated if part == "block" else 1)
    return {
        "gather": ([product.x, INTO], product.hidden),
        "scatter": ([product.hidden, OUT], product.x),
        "block": ([product.x, *weights, OUT], product.x),
    }[part]


def annotated(fn, taken: list[str], given: str):
    """A manual function of as many arguments as there are types."""
    names = [f"a{i}" for i in range(len(taken))]
    space = {"fn": fn}
    exec(f"def program({', '.join(names)}): return fn({', '.join(names)})", space)
    space["program"].__annotations__ = {n: bf16[t] for n, t in zip(names, taken)} | {"return": bf16[given]}
    return tr.shard_map(space["program"])


def plain(product: Product, part: str):
    x, hidden = product.x, product.hidden

    def gather(x_, *into):
        all_of_it = tr.all_gather(f"{x} -> {whole(x)}", x_)
        return [tr.einsum(f"{whole(x)}, {INTO} -> {hidden}", all_of_it, w) for w in into]

    def scatter(h, w):
        partial = tr.einsum(f"{hidden}, {OUT} -> {whole(x)} +y", h, w)
        return tr.reduce_scatter(f"{whole(x)} +y -> {x}", partial)

    def block(x_, *weights):
        return scatter(activation(*gather(x_, *weights[:-1])), weights[-1])

    return {"gather": lambda *a: gather(*a)[0], "scatter": scatter, "block": block}[part]


def overlapped(product: Product, part: str, rings: tuple[Ring, Ring]):
    x, hidden = product.x, product.hidden
    return {
        "gather": lambda a, w: gather_matmul(f"{x}, {INTO} -> {hidden}", a, w, ring=rings[0]),
        "scatter": lambda h, w: matmul_scatter(f"{hidden}, {OUT} -> {x}", h, w, ring=rings[1]),
        "block": lambda a, *w: feed_forward(f"{x}, {INTO}, {OUT}", a, w[:-1], w[-1], activation, ring=rings),
    }[part]


def unpartitioned(part: str):
    """The same on whole arrays, or on one device's share."""
    product = lambda a, w: jnp.einsum("...i,ij->...j", a, w)
    if part == "block":
        return lambda a, *w: product(activation(*(product(a, v) for v in w[:-1])), w[-1])
    return product


def by_name(product: Product):
    """The block as a model has it."""
    x, hidden = bare(product.x), bare(product.hidden)

    def block(a, *w):
        into = [tr.einsum(f"{x}, {bare(INTO)} -> {hidden}", a, v) for v in w[:-1]]
        mixed = swiglu(*into) if len(into) == 2 else tr.relu(into[0])
        return tr.einsum(f"{hidden}, {bare(OUT)} -> {x}", mixed, w[-1])

    return block


@dataclasses.dataclass
class Schedule:
    """Microseconds of products, of waiting, of the busiest direction of the links, and when everything is done."""

    products: float
    waits: float
    links: float
    total: float
    hidden: int
    exposed: int
    lines: list[str]


_COLLECTIVE = re.compile(r"^(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?$")
UP, DOWN = 1, 3  # how much further along the four devices of `y`


def replay(compiled, clock: float, link: float) -> Schedule:
    """Reads the entry computation in the order that it runs in."""
    text = compiled.as_text()
    program = parse_program(text)
    now = products = waits = 0.0
    busy = dict.fromkeys((UP, DOWN), 0.0)  # when each direction is free
    used = dict.fromkeys((UP, DOWN), 0.0)
    arrives: dict[str, tuple[float, float]] = {}
    hidden = exposed = 0
    lines = []
    for instruction in program.computations[program.entry]:
        if instruction.op == "while":
            raise SystemExit("a loop in the schedule: replay its body as often as it runs")
        cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
        if cycles:
            now, products = now + int(cycles[1]) / clock, products + int(cycles[1]) / clock
            lines.append(f"{now:9.1f}  {instruction.name}, {int(cycles[1]) / clock:.1f}")
        directions, size = sent(program, instruction)
        waited = None
        if directions:
            began, takes = max(now, *(busy[d] for d in directions)), size / link
            for d in directions:
                busy[d], used[d] = began + takes, used[d] + takes
            if instruction.op.endswith("-start"):
                arrives[instruction.name] = began + takes, takes
                lines.append(f"{now:9.1f}  {instruction.name} {'up' if directions == [UP] else 'down'}, {takes:.1f}")
            else:
                waited, now = takes, began + takes
        elif instruction.op.endswith("-done") and (
            start := next((o for o in instruction.operands if o in arrives), "")
        ):
            at, takes = arrives.pop(start)
            waited, now = max(0.0, at - now), max(now, at)
        if waited is not None:
            waits += waited
            hidden, exposed = hidden + (waited < takes / 10), exposed + (waited >= takes / 10)
            lines.append(f"{now:9.1f}  {instruction.name}, waited {waited:.1f}")
    return Schedule(products, waits, max(used.values()), now, hidden, exposed, lines)


def sent(program, instruction) -> tuple[list[int], float]:
    """The directions of the links that a collective (or a fusion of one) uses, and the bytes in each."""
    called = [name for names in instruction.called().values() for name in names]
    found = [instruction, *(i for name in called for i in program.computations.get(name, ()))]
    match = next((m for i in found if (m := _COLLECTIVE.match(i.op))), None)
    if match is None or not instruction.results:
        return [], 0
    size = max(array.num_bytes for array in instruction.results)
    if match[1] == "collective-permute":
        source, target = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", instruction.attributes).groups()
        by = (int(target) - int(source)) % 4
        return ([by], size) if by in (UP, DOWN) else ([UP], 2 * size)
    scattered = match[1] == "reduce-scatter" or (match[1] == "all-reduce" and instruction.op == "fusion")
    on_the_wire = size * 3 if scattered else size * 3 / 2 if match[1] == "all-reduce" else size * 3 / 4
    return [UP, DOWN], on_the_wire / 2


def in_a_ring(devices):
    """The devices as 2 x 4, each four in a ring of neighbours: over a square of the torus."""
    place = {tuple(d.coords): d for d in devices}
    corner = [(0, 0), (1, 0), (1, 1), (0, 1)]
    if any(z for *_, z in place):
        return np.array([[place[x, y, z] for x, y in corner] for z in (0, 1)])
    return np.array([[place[x, y + 2 * half, 0] for x, y in corner] for half in (0, 1)])


def compiled(fn, like, mesh, out=None):
    with jax.set_mesh(mesh):
        return jax.jit(fn, out_shardings=out).lower(*like).compile()


def programs(product: Product, part: str, devices, only=None):
    """The compiled programs, by title."""
    wanted = lambda title: not only or title in only
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.Mesh(in_a_ring(devices), ("x", "y"), axis_types=explicit)
    auto, one = jax.sharding.Mesh(mesh.devices, ("x", "y")), tr.make_mesh(x=1, y=1, devices=devices[:1])
    taken, given = types(product, part)

    def like(text: str, mesh, share: bool = False):
        dims, spec = tr.parse(text).dims, tr.parse(text).spec
        split = lambda dim: (2 if "x" in dim.axes else 1) * (4 if "y" in dim.axes and dim.name == "mlp" else 1)
        shape = tuple(product.sizes[d.name] // (split(d) if share else 1) for d in dims)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, jax.P() if share else spec))

    fn = unpartitioned(part)
    yield "compute", compiled(fn, [like(t, one, share=True) for t in taken], one)
    if wanted("plain"):
        yield "plain", compiled(annotated(plain(product, part), taken, given), [like(t, mesh) for t in taken], mesh)
    if wanted("compiler"):
        out = NamedSharding(auto, tr.parse(given).spec)
        yield "compiler", compiled(fn, [like(t, auto) for t in taken], auto, out)
    for title, rings in RINGS.items():
        if wanted(title):
            ours = annotated(overlapped(product, part, rings), taken, given)
            yield title, compiled(ours, [like(t, mesh) for t in taken], mesh)
    if part == "block" and wanted("layout"):
        dims = [dim for text in (product.hidden, product.x) for dim in tr.parse(text).dims if dim.axes]
        compute = {dim.name: dim.axes for dim in dims}
        layout = tr.Layout(mesh, params={"mlp": "y"}, compute=compute, overlap=["mlp"])
        arrays = [tr.NamedArray(like(t, mesh), tr.parse(t).names) for t in taken]
        with layout:
            yield "layout", tr.named_jit(by_name(product)).lower(*arrays).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", nargs="*", default=list(SLICES))
    parser.add_argument("--products", nargs="*", default=list(PRODUCTS))
    parser.add_argument("--parts", nargs="*", default=list(PARTS))
    parser.add_argument("--rows", nargs="*", help="only these rows, after `compute`")
    parser.add_argument("--timeline", action="store_true", help="print each schedule as it is replayed")
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, compiled on {platform.machine()} for TPUs that are not here; times in us")
    for name in options.slices:
        chip = chips()[name.partition(":")[0]]
        devices = tr.target_devices(name)
        for title in options.products:
            product = PRODUCTS[title]
            for part in options.parts:
                taken, given = types(product, part)
                sizes = " ".join(f"{name}={size}" for name, size in product.sizes.items())
                print(f"\n{name}, {title} ({sizes}), {part}: {', '.join(taken)} -> {given}")
                columns = ("products", "links", "waits", "total", "of compute", "hidden", "exposed")
                print(f"{'':16}" + "".join(f"{c:>{max(9, len(c) + 2)}}" for c in columns))
                bound = None
                for which, program in programs(product, part, devices, options.rows):
                    s = replay(program, chip.clock / 1e6, chip.link_bandwidth / 1e6)
                    bound = bound or s.total
                    print(
                        f"{which:16}{s.products:10.1f}{s.links:9.1f}{s.waits:9.1f}{s.total:9.1f}{s.total / bound:12.3f}"
                        f"{s.hidden:9}{s.exposed:9}",
                        flush=True,
                    )
                    if options.timeline:
                        print("\n".join(s.lines))


if __name__ == "__main__":
    main()
