"""Overlapped matrix multiplications on TPU slices that are not here: what the compiler's schedule says.

    python benchmarks/overlap_tpu.py [--slices v5e:2x4] [--products chapter]

Compiles ahead of time for v5e:2x4, v5p:2x2x2 and v6e:2x4 (needs libtpu, no TPU) and prints, for each product, the
scheduled cycles of

    compute     one device's share without any communication: the bound
    plain       all-gather, or reduce-scatter, and a product, as `reshard` and `einsum` in manual mode write them
    compiler    whole arrays with shardings: XLA may choose its own windowed form
    ours        rings of `trellis.collectives`, one way and both ways

Cycles are the compiler's own estimates of each scheduled fusion; collectives have none. What they cost is printed
beside them: how many collectives run at the same time as a product (`hidden`, from the schedule: a product between a
start and its done), how many do not (`exposed`), and their bytes. A step takes at least the cycles plus what the
exposed bytes take on one link (`wire us`). `hidden` says what the schedule runs side by side, not that the product is
the longer of the two: a slice of the chapter's shapes takes 11.7 us for a hop on v5e, 5.8 us for halves both ways.
"""

import argparse
import dataclasses
import platform
import re
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import trellis as tr
from trellis import bf16
from trellis.collectives import Ring, feed_forward, gather_matmul, matmul_scatter
from trellis.inspect import scheduled_cycles
from trellis.inspect.hlo import parse_program
from trellis.mesh.topology import slice_devices

# Clock in Hz, and bytes per second of one link in one direction (published figures).
SLICES = {"v5e:2x4": (1.5e9, 45e9), "v5p:2x2x2": (1.75e9, 90e9), "v6e:2x4": (1.75e9, 90e9)}
PRODUCTS = {
    # The JAX chapter of "How To Scale Your Model": B, D, F over a mesh of 2 x 4.
    "chapter": {"batch": 1024, "embed": 2048, "mlp": 8192},
    # A feed-forward block of Llama 3 8B, 4 sequences of 2,048 on 8 devices.
    "llama 8B": {"batch": 8192, "embed": 4096, "mlp": 14336},
}
RINGS = {"ours": Ring(axis="y"), "ours, both ways": Ring(axis="y", both_ways=True)}
X, INTO, OUT = "batch/x embed/y", "embed mlp/y", "mlp/y embed"


@tr.shard_map
def plain_gather(x: bf16["batch/x embed/y"], w: bf16["embed mlp/y"]) -> bf16["batch/x mlp/y"]:
    whole = tr.all_gather("batch/x embed/y -> batch/x embed", x)
    return tr.einsum("batch/x embed, embed mlp/y -> batch/x mlp/y", whole, w)


@tr.shard_map
def plain_scatter(h: bf16["batch/x mlp/y"], w: bf16["mlp/y embed"]) -> bf16["batch/x embed/y"]:
    partial = tr.einsum("batch/x mlp/y, mlp/y embed -> batch/x embed +y", h, w)
    return tr.reduce_scatter("batch/x embed +y -> batch/x embed/y", partial)


@tr.shard_map
def plain_block(x: bf16["batch/x embed/y"], w: bf16["embed mlp/y"], v: bf16["mlp/y embed"]) -> bf16["batch/x embed/y"]:
    whole = tr.all_gather("batch/x embed/y -> batch/x embed", x)
    h = jax.nn.relu(tr.einsum("batch/x embed, embed mlp/y -> batch/x mlp/y", whole, w))
    partial = tr.einsum("batch/x mlp/y, mlp/y embed -> batch/x embed +y", h, v)
    return tr.reduce_scatter("batch/x embed +y -> batch/x embed/y", partial)


def overlapped(ring: Ring) -> dict:
    @tr.shard_map
    def gather(x: bf16["batch/x embed/y"], w: bf16["embed mlp/y"]) -> bf16["batch/x mlp/y"]:
        return gather_matmul(f"{X}, {INTO} -> batch/x mlp/y", x, w, ring=ring)

    @tr.shard_map
    def scatter(h: bf16["batch/x mlp/y"], w: bf16["mlp/y embed"]) -> bf16["batch/x embed/y"]:
        return matmul_scatter(f"batch/x mlp/y, {OUT} -> {X}", h, w, ring=ring)

    @tr.shard_map
    def block(x: bf16["batch/x embed/y"], w: bf16["embed mlp/y"], v: bf16["mlp/y embed"]) -> bf16["batch/x embed/y"]:
        return feed_forward(f"{X}, {INTO}, {OUT}", x, [w], v, jax.nn.relu, ring=ring)

    return {"gather": gather, "scatter": scatter, "block": block}


WHOLE = {
    "gather": lambda x, w: x @ w,
    "scatter": lambda h, w: h @ w,
    "block": lambda x, w, v: jax.nn.relu(x @ w) @ v,
}
ARGUMENTS = {"gather": (X, INTO), "scatter": ("batch/x mlp/y", OUT), "block": (X, INTO, OUT)}
RESULT = {"gather": "batch/x mlp/y", "scatter": X, "block": X}
PLAIN = {"gather": plain_gather, "scatter": plain_scatter, "block": plain_block}


@dataclasses.dataclass
class Schedule:
    """Cycles of products and other work; collectives that run beside a product, and that do not; bytes of those."""

    cycles: int
    hidden: int
    exposed: int
    exposed_bytes: int


_COLLECTIVE = re.compile(r"^(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?$")


def schedule_of(compiled) -> Schedule:
    """Reads the entry computation in the order that it runs in."""
    text = compiled.as_text()
    program = parse_program(text)
    hidden = exposed = size = 0
    under_way: dict[str, tuple[int, bool]] = {}  # bytes on the wire, and whether a product ran since the start
    for instruction in program.computations[program.entry]:
        wire = wire_of(program, instruction)
        if wire and instruction.op.endswith("-start"):
            under_way[instruction.name] = (wire, False)
        elif wire:
            exposed, size = exposed + 1, size + wire
        elif instruction.op.endswith("-done"):
            for operand in set(instruction.operands) & set(under_way):
                wire, covered = under_way.pop(operand)
                hidden, exposed, size = hidden + covered, exposed + (not covered), size + wire * (not covered)
        elif instruction.op in ("fusion", "dot", "convolution", "custom-call"):
            under_way = {name: (wire, True) for name, (wire, _) in under_way.items()}
    return Schedule(scheduled_cycles(text), hidden, exposed, size)


def wire_of(program, instruction) -> int:
    """Bytes that a device sends in a collective over the four devices of `y`, or in a fusion of one; 0 for others."""
    called = [name for names in instruction.called().values() for name in names]
    found = [instruction, *(i for name in called for i in program.computations.get(name, ()))]
    match = next((m for i in found if (m := _COLLECTIVE.match(i.op))), None)
    if match is None or not instruction.results:
        return 0
    largest = max(array.num_bytes for array in instruction.results)
    scattered = match[1] == "reduce-scatter" or (match[1] == "all-reduce" and instruction.op == "fusion")
    return largest * 3 if scattered else largest * 3 // 2 if match[1] == "all-reduce" else largest


def compiled(fn, like, mesh, out=None):
    with jax.set_mesh(mesh):
        return jax.jit(fn, out_shardings=out).lower(*like).compile()


def measure(name: str, which: str, sizes: dict, devices) -> dict[str, Schedule]:
    mesh = tr.make_mesh(x=2, y=4, devices=devices)
    texts = ARGUMENTS[which]

    def like(text: str, mesh, local: bool = False):
        shape = tr.parse(text)
        lengths = [sizes[n] // (2 if "x" in d.axes and local else 1) for n, d in zip(shape.names, shape.dims)]
        return jax.ShapeDtypeStruct(tuple(lengths), jnp.bfloat16, sharding=NamedSharding(mesh, shape.spec))

    given = [like(text, mesh) for text in texts]
    auto = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    found = {"plain": compiled(PLAIN[which], given, mesh)}
    whole = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(auto, a.sharding.spec)) for a in given]
    found["compiler"] = compiled(WHOLE[which], whole, auto, NamedSharding(auto, tr.parse(RESULT[which]).spec))
    for title, ring in RINGS.items():
        found[title] = compiled(overlapped(ring)[which], given, mesh)
    # One device's share of the products, with operands that are there already.
    one = tr.make_mesh(x=1, y=1, devices=devices[:1])
    own = {
        "gather": ("batch", "embed", "mlp/"),
        "scatter": ("batch", "mlp/", "embed"),
        "block": ("batch", "embed", "mlp/"),
    }
    part = {"batch": sizes["batch"] // 2, "embed": sizes["embed"], "mlp/": sizes["mlp"] // 4}
    a, b, c = (part[n] for n in own[which])
    shapes = [(a, b), (b, c)] + ([(c, b)] if which == "block" else [])
    local = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(one, jax.P())) for s in shapes]
    found["compute"] = compiled(WHOLE[which], local, one)
    return {title: schedule_of(program) for title, program in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slices", nargs="*", default=list(SLICES))
    parser.add_argument("--products", nargs="*", default=list(PRODUCTS))
    options = parser.parse_args()
    print(f"JAX {jax.__version__}, compiled on {platform.machine()} for TPUs that are not here; times in us")
    for name in options.slices:
        clock, link = SLICES[name]
        devices = slice_devices(name)
        for product in options.products:
            sizes = PRODUCTS[product]
            for which in ARGUMENTS:
                began = time.perf_counter()
                found = measure(name, which, sizes, devices)
                bound = found["compute"].cycles / clock * 1e6
                print(f"\n{name}, {product} {sizes}, {which} (compiled in {time.perf_counter() - began:.0f} s)")
                print(f"{'':18}{'cycles':>10}{'us':>8}{'of compute':>12}{'hidden':>8}{'exposed':>9}{'wire us':>9}")
                for title in ("compute", "plain", "compiler", *RINGS):
                    s = found[title]
                    us, wire = s.cycles / clock * 1e6, s.exposed_bytes / link * 1e6
                    print(
                        f"{title:18}{s.cycles:10,}{us:8.1f}{us / bound:12.2f}{s.hidden:8}{s.exposed:9}{wire:9.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
