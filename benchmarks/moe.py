"""The ways to experts against each other: time on a CPU, memory and schedule on TPU slices that are not here.

    python benchmarks/moe.py cpu
    python benchmarks/moe.py v5e:2x4 v5p:2x2x2 v6e:2x4

On a CPU: forward and backward of one mixture of 8 experts, 2 a token, in float32, all alternating in one process, over
the time of the bound: one SwiGLU block of the same width over as many rows as there are choices, which are the FLOPs
that a mixture cannot do without.

On TPUs: the same of a layer of Mixtral 8x7B in bfloat16, 8 experts on 8 chips, 2,048 tokens each, compiled ahead of
time (needs libtpu, no TPU). `other` is the compiler's own estimate of everything but collectives and its grouped
kernels, which have none, over the bound, in cycles of the chip's matrix units. The kernels are all products forward and
backward, which are the bound where the load is even; the products of the dense way are in `other`. `wire` is what one
chip sends, of a ragged exchange at most. Further rounds of an exchange, which run only where the load is uneven, are
left out of both.
"""

import argparse
import contextlib
import functools
import os
import platform
import re
import statistics
import time

import jax
import jax.numpy as jnp

import trellis as tr
from trellis.inspect import parse_program
from trellis.nn.moe import choose, mix, score
from trellis.plan import chips

EXPERTS, CHOICES = 8, 2
WAYS = ("dense", "grouped", "gather", "ragged", "slots")
LAYOUT = ({"experts": "expert"}, {"experts": "expert", "batch": "expert"})
NAMES = ("batch pos embed", "embed routes", "experts embed mlp", "experts embed mlp", "experts mlp embed")


def shapes(batch: int, pos: int, embed: int, mlp: int) -> list[tuple[int, ...]]:
    into = (EXPERTS, embed, mlp)
    return [(batch, pos, embed), (embed, EXPERTS), into, into, (EXPERTS, mlp, embed)]


def loss(way: str, x, router, *experts):
    out = mix(x, choose(score(x, router), CHOICES), *experts, way=way)
    return (out * out).sum().array.astype(jnp.float32)


def step(way: str):
    return jax.value_and_grad(functools.partial(loss, way), argnums=tuple(range(5)))


def bound(x, router, gate, up, down):
    """One expert for as many rows as there are choices."""
    rows = jnp.concatenate([x.array.reshape(-1, x.shape["embed"])] * CHOICES)
    weights = (gate.array[0], up.array[0], down.array[0])

    def summed(rows, gate, up, down):
        out = (jax.nn.silu(rows @ gate) * (rows @ up)) @ down
        return (out * out).sum()

    return jax.value_and_grad(summed, argnums=(0, 1, 2, 3))(rows, *weights)


def on_cpu(rounds: int) -> None:
    sizes = dict(batch=8, pos=256, embed=256, mlp=512)
    keys = jax.random.split(jax.random.key(0), 5)
    arrays = [tr.named(jax.random.normal(k, s) / 16, n) for k, s, n in zip(keys, shapes(**sizes), NAMES, strict=True)]
    runs = {"bound": (None, jax.jit(bound), arrays)}
    for way in ("dense", "grouped"):
        runs[f"{way}, one device"] = (None, jax.jit(step(way)), arrays)
    mesh = tr.make_mesh(jax.devices(), expert=2)
    for title, way in (
        ("grouped, gathered weights", "grouped"),
        ("gather", "gather"),
        ("slots", "slots"),
        ("dense", "dense"),
    ):
        layout = tr.Layout(mesh, *LAYOUT)
        with layout:
            x, *weights = arrays
            runs[f"{title}, 2 devices"] = (
                layout,
                jax.jit(step(way)),
                [tr.shard(x, "compute"), *tr.shard(weights, "params")],
            )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, (layout, fn, given) in runs.items():
            with layout or contextlib.nullcontext():
                begun = time.perf_counter()
                jax.block_until_ready(fn(*given))
            if turn:
                times[name].append(time.perf_counter() - begun)
    shown = " ".join(f"{k} {v}" for k, v in sizes.items())
    print(f"CPU, {os.cpu_count()} cores, {platform.machine()}, JAX {jax.__version__}: {shown}, {EXPERTS} experts,")
    print(f"{CHOICES} a token, float32, forward and backward; medians of {rounds}, alternating\n")
    least = statistics.median(times["bound"])
    for name, seconds in times.items():
        ratios = statistics.median(a / b for a, b in zip(seconds, times["bound"], strict=True))
        print(f"{name:28}  {1e3 * statistics.median(seconds):8.1f} ms  {ratios:5.2f} of the bound")
    print(f"\nThe dense way does {EXPERTS // CHOICES} times the bound's products ({1e3 * least:.1f} ms).\n")


def on_tpu(chosen: str, ways: list[str]) -> None:
    sizes = dict(batch=8, pos=2048, embed=4096, mlp=14_336)
    devices = tr.target_devices(chosen)
    mesh = tr.make_mesh(devices, expert=len(devices))
    tokens = sizes["batch"] * sizes["pos"] // len(devices)
    flops = 3 * 2 * 3 * tokens * CHOICES * sizes["embed"] * sizes["mlp"]
    chip = chips()[chosen.partition(":")[0]]
    cycles = flops / (chip.bf16_flops / chip.clock)
    print(f"{chosen}, libtpu's schedule: {tokens} tokens a chip, {' '.join(f'{k} {v}' for k, v in sizes.items())},")
    print(f"bfloat16, forward and backward; the bound is {cycles / 1e6:.1f}M cycles\n")
    print(f"{'way':10}  other / bound  temporaries       wire  grouped kernels  compiled in")
    for way in ways:
        with tr.Layout(mesh, *LAYOUT) as layout:
            given = [
                tr.named(jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=layout.sharding(n.split())), n)
                for s, n in zip(shapes(**sizes), NAMES, strict=True)
            ]
            rows = tr.ledger(step(way), *given)
            wire = sum(row.wire * row.times for row in rows if "turn of a while" not in row.note)
            begun = time.perf_counter()
            try:
                compiled = jax.jit(step(way)).lower(*given).compile()
            except jax.errors.JaxRuntimeError as error:
                print(f"{way:10}  {str(error).splitlines()[0][:90]}")
                continue
        took = time.perf_counter() - begun
        other, kernels = always_run(compiled.as_text())
        temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**30
        print(
            f"{way:10}  {other / cycles:13.2f}  {temporaries:7.2f} GiB  {wire / 2**20:6.0f} MiB  {kernels:15d}"
            f"  {took:9.0f} s",
            flush=True,
        )
    print()


def always_run(text: str) -> tuple[int, int]:
    """Estimated cycles, and grouped kernels, outside of loops whose number of turns is known only when they run."""
    program = parse_program(text)
    below: set[str] = set()
    loops = [i for i in program.by_name.values() if i.op == "while" and program.trip_count(i) is None]
    new = [name for loop in loops for name in loop.called().get("body", [])]
    while new:
        below |= set(new)
        inner = [i for name in new for i in program.computations.get(name, ())]
        new = [n for i in inner for names in i.called().values() for n in names if n not in below]
    cycles = kernels = 0
    for instruction, times, where in program.walk(fusions=False):
        if where in below:
            continue
        found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
        cycles += int(found[1]) * times if found else 0
        kernels += times * instruction.name.startswith(("ragged-dot-none", "grouped_gradient"))
    return cycles, kernels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="+", help="cpu, or TPU slices of 8 chips")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="on TPUs")
    parser.add_argument("--rounds", type=int, default=20, help="measurements on the CPU")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    for place in arguments.where:
        on_cpu(arguments.rounds) if place == "cpu" else on_tpu(place, arguments.ways)
