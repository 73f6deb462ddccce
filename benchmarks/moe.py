"""The ways to experts against each other: time on a CPU, memory and schedule on TPU slices that are not here.

    python benchmarks/moe.py cpu
    python benchmarks/moe.py v5e:2x4 v5p:2x2x2 v6e:2x4 [--layer deepseek_v3]

On a CPU: forward and backward of a mixture in float32, all alternating in one process on one core, in huge pages as
`trellis train`, over the bound: one SwiGLU block of the same width over as many rows as there are choices, which are
the FLOPs that a mixture cannot do without. Each is called twice in turn and timed the second time, since the first
takes memory that another gave back; the least processor time counts. 8 experts of 512 rows each, 128 of as many, and
128 of 128, whose matrices are as large as their rows.

On TPUs: the same of a layer of Mixtral 8x7B in bfloat16, 8 experts on 8 chips, 2,048 tokens each, of DeepSeek-V3, 4
experts on each chip, 8 for each of its 4,096 tokens, of GPT-OSS-20B or of Qwen3-30B-A3B, 8,192 tokens a chip; compiled
ahead of time (needs libtpu, no TPU). `other` is libtpu's own estimate of everything but collectives and kernels, which
have none, over the bound, in cycles of the chip's matrix units. The kernels are what experts do between their products,
and all products forward and backward, which are the bound where the load is even; the products of the dense way are in
`other`. `wire` is what one chip sends, of a ragged exchange at most.
Further rounds of an exchange, which run only where the load is uneven, are left out of both.
"""

import argparse
import contextlib
import functools
import os
import re
import time

import jax
import jax.numpy as jnp
from train_speed import processor

import trellis as tr
import trellis_start
from trellis.inspect import parse_program
from trellis.nn import ClampedSwiGLU
from trellis.nn.moe import Biases, choose, mix, score
from trellis.plan import chips

# On TPUs: sizes of a layer on 8 chips, how many experts a token chooses, and whether experts have biases.
LAYERS = {
    "mixtral_8x7b": (dict(experts=8, batch=8, pos=2048, embed=4096, mlp=14_336), 2, False),
    "deepseek_v3": (dict(experts=32, batch=8, pos=4096, embed=7168, mlp=2048), 8, False),
    "gpt_oss_20b": (dict(experts=32, batch=8, pos=8192, embed=2880, mlp=2880), 4, True),
    "qwen3_30b_a3b": (dict(experts=128, batch=8, pos=8192, embed=2048, mlp=768), 8, False),
}
# On a CPU: experts, choices, sequences of 256 tokens; ways on one device, and on two.
MIXTURES = {
    (8, 2, 8): (("dense", "grouped"), ("grouped", "gather", "slots", "dense")),
    (128, 8, 32): (("grouped",), ()),
    (128, 8, 8): (("grouped",), ()),
}
WAYS = ("dense", "grouped", "gather", "ragged", "slots")
LAYOUT = ({"experts": "expert"}, {"experts": "expert", "batch": "expert"})
NAMES = ("batch pos embed", "embed routes", "experts embed mlp", "experts embed mlp", "experts mlp embed")
OF_BIASES = ("experts mlp", "experts mlp", "routes embed")


def shapes(experts: int, batch: int, pos: int, embed: int, mlp: int) -> list[tuple[int, ...]]:
    into = (experts, embed, mlp)
    return [(batch, pos, embed), (embed, experts), into, into, (experts, mlp, embed)]


def loss(way: str, choices: int, x, router, gate, up, down, *biases):
    how = dict(biases=Biases(*biases), gated=ClampedSwiGLU(7.0)) if biases else {}
    out = mix(x, choose(score(x, router), choices), gate, up, down, way=way, **how)
    return (out * out).sum().array.astype(jnp.float32)


def step(way: str, choices: int, arrays: int = len(NAMES)):
    return jax.value_and_grad(functools.partial(loss, way, choices), argnums=tuple(range(arrays)))


def bound(choices: int, x, router, gate, up, down):
    """One expert for as many rows as there are choices."""
    rows = jnp.concatenate([x.array.reshape(-1, x.shape["embed"])] * choices)
    weights = (gate.array[0], up.array[0], down.array[0])

    def summed(rows, gate, up, down):
        out = (jax.nn.silu(rows @ gate) * (rows @ up)) @ down
        return (out * out).sum()

    return jax.value_and_grad(summed, argnums=(0, 1, 2, 3))(rows, *weights)


def on_cpu(rounds: int, experts: int, choices: int, batch: int) -> None:
    sizes = dict(batch=batch, pos=256, embed=256, mlp=512)
    keys, here = jax.random.split(jax.random.key(0), 5), shapes(experts, **sizes)
    x, *weights = [tr.named(jax.random.normal(k, s) / 16, n) for k, s, n in zip(keys, here, NAMES, strict=True)]
    alone, together = MIXTURES[experts, choices, batch]
    runs = {"bound": (None, jax.jit(functools.partial(bound, choices)), [x, *weights])}
    for way in alone:
        runs[f"{way}, one device"] = (None, jax.jit(step(way, choices)), [x, *weights])
    layout = tr.Layout(tr.make_mesh(jax.devices(), expert=2), *LAYOUT)
    for way in together:
        title = "grouped, gathered weights" if way == "grouped" else way
        with layout:
            given = [tr.shard(x, "compute"), *tr.shard(weights, "params")]
            runs[f"{title}, 2 devices"] = layout, jax.jit(step(way, choices)), given
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, (layout, fn, given) in runs.items():
            with layout or contextlib.nullcontext():
                jax.block_until_ready(fn(*given))  # memory that another gave back is taken again, as at a first step
                begun = time.process_time()
                jax.block_until_ready(fn(*given))
                least[name] = min(least[name], time.process_time() - begun)
    shown = " ".join(f"{k} {v}" for k, v in sizes.items())
    print(f"{processor()}, one core, JAX {jax.__version__}: {shown}, {experts} experts, {choices} a token,")
    print(f"float32, forward and backward; least processor time of {rounds}, alternating\n")
    for name, seconds in least.items():
        print(f"{name:36} {1e3 * seconds:8.1f} ms  {seconds / least['bound']:5.2f} of the bound")
    print(flush=True)


def on_tpu(chosen: str, layer: str, ways: list[str]) -> None:
    sizes, choices, biased = LAYERS[layer]
    experts, mlp, embed = (sizes[name] for name in ("experts", "mlp", "embed"))
    of_biases = [(experts, mlp), (experts, mlp), (experts, embed)] * biased
    names = (*NAMES, *OF_BIASES * biased)
    devices = tr.target_devices(chosen)
    mesh = tr.make_mesh(devices, expert=len(devices))
    tokens = sizes["batch"] * sizes["pos"] // len(devices)
    flops = 3 * 2 * 3 * tokens * choices * sizes["embed"] * sizes["mlp"]
    chip = chips()[chosen.partition(":")[0]]
    cycles = flops / (chip.bf16_flops / chip.clock)
    print(f"{chosen}, libtpu's schedule: {tokens} tokens a chip, {' '.join(f'{k} {v}' for k, v in sizes.items())},")
    print(f"bfloat16, forward and backward; the bound is {cycles / 1e6:.1f}M cycles\n")
    print(f"{'way':10}  other / bound  temporaries       wire          kernels  compiled in")
    for way in ways:
        with tr.Layout(mesh, *LAYOUT) as layout:
            given = [
                tr.named(jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=layout.sharding(n.split())), n)
                for s, n in zip([*shapes(**sizes), *of_biases], names, strict=True)
            ]
            made = step(way, choices, len(names))
            rows = tr.ledger(made, *given)
            wire = sum(row.wire * row.times for row in rows if "turn of a while" not in row.note)
            begun = time.perf_counter()
            try:
                compiled = jax.jit(made).lower(*given).compile()
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
    """Estimated cycles, and kernels, outside of loops whose number of turns is known only when they run."""
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
        kernels += times * instruction.name.startswith(("ragged-dot-none", "grouped_", "experts_gate_"))
    return cycles, kernels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="+", help="cpu, or TPU slices of 8 chips")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="on TPUs")
    parser.add_argument("--layer", default="mixtral_8x7b", choices=LAYERS, help="on TPUs")
    parser.add_argument("--rounds", type=int, default=20, help="measurements on the CPU")
    arguments = parser.parse_args()
    if "cpu" in arguments.where:
        trellis_start.use_huge_pages()
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    for place in arguments.where:
        if place != "cpu":
            on_tpu(place, arguments.layer, arguments.ways)
            continue
        for mixture in MIXTURES:
            on_cpu(arguments.rounds, *mixture)
