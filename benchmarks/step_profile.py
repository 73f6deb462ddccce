"""Where the time of a train step on one core of a CPU goes, by what the operations of the compiled program do.

    python benchmarks/step_profile.py [--shape nano small-llama starter] [--steps 12]
        [--out benchmarks/results/step_profile.txt]

Each shape is a process of its own on one core, set up as `trellis train` sets itself up, with one CPU device and the
microbatches that two would have together. JAX's profiler times every operation of every step; the mean of the fastest
quarter of an operation's times counts, so that other work on the machine counts little. Operations are sorted by the
names that XLA gives to fusions, which say what is in them. The column after them holds the products against the
peak that the same process measured: what a step of nothing but products at that peak would take.

Seconds hang on the processor's clock, which falls where all cores multiply, and on who else is at work. So the last
column holds the same in cycles: those of the cheapest step, kernel included, and how much of it are its products at the
cycles that a product of 1,024 cubed takes. It is left out where Linux does not count.
"""

import argparse
import collections
import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SHAPES = ("nano", "small-llama", "starter")
# By the first of the rows with a word of an operation's name.
KINDS = {
    "products": "ynn dot custom",
    "exponentials": "exponential tanh logistic log rsqrt power",
    "copies": "transpose copy concatenate slice bitcast gather scatter pad broadcast reverse",
    "arithmetic": "add subtract multiply divide select compare negate reduce maximum minimum convert iota and or",
}


def kind_of(operation: str) -> str | None:
    """What an operation of a compiled program does, by its name; None for loops and calls of jitted functions, whose
    operations count themselves."""
    words = set(re.split(r"[_.-]", operation))
    if words & {"while", "conditional", "call", "jit"}:
        return None
    return next((kind for kind, known in KINDS.items() if words & set(known.split())), "others")


def milliseconds(events: list[dict], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind, from a profile's events."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            times[event["args"]["hlo_op"]].append(event["dur"])
    found: dict[str, float] = collections.Counter()
    for operation, taken in times.items():
        kind = kind_of(operation)
        if kind is not None:
            fastest = sorted(taken)[: max(1, len(taken) // 4)]
            found[kind] += sum(fastest) / len(fastest) * len(taken) / steps / 1e3
    return dict(found)


def run_of(shape: str):
    """The run of a shape: those of `train_speed.py`, and the first run."""
    from trellis.models import GPT2Config, LlamaConfig
    from trellis.optim import AdamW, Constant
    from trellis.recipes import starter
    from trellis.train import Data, EmbeddedSource

    if shape == "starter":
        return dataclasses.replace(starter(), devices=1, microbatches=4)
    small = GPT2Config(
        vocab=1024, positions=256, embed=256, layers=4, heads=4, mlp=1024, norm_eps=1e-5, dropout=0.0,
        scale_by_inverse_layer=False, upcast_attention=True,
    )  # fmt: skip
    large = LlamaConfig(
        vocab=4096, embed=512, layers=6, heads=8, kv_heads=4, head_dim=64, mlp=1408, rope_theta=10_000.0,
        tie_embeddings=False,
    )  # fmt: skip
    model, (batch, length) = (small, (16, 256)) if shape == "nano" else (large, (8, 512))
    return dataclasses.replace(
        starter(),
        name=shape,
        model=model,
        data=Data(source=EmbeddedSource(vocab=model.vocab), sequence_length=length, mask_documents=False),
        batch_size=batch,
        optimizer=AdamW(learning_rate=3e-4),
        schedule=Constant(warmup_steps=0),
        devices=1,
        microbatches=4,
    )


def measure(shape: str, steps: int) -> dict:
    """Profiles a shape in this process, on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sys.path.insert(0, str(HERE))
    from cycles import Cycles

    try:
        counter = Cycles()  # before the threads that it is to count
    except OSError:
        counter = None
    import jax
    import jax.numpy as jnp

    from trellis.train import CompiledStep, assemble, find_devices, flops_per_token, known_peak

    run = run_of(shape)
    devices = find_devices(run)
    assembled = assemble(run, devices)
    step = CompiledStep(assembled.step, assembled.compiler_options)
    tokens = run.batch_size * run.data.sequence_length
    with assembled.layout, tempfile.TemporaryDirectory() as folder:
        state = assembled.init()
        batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), assembled.abstract_batch())

        def once():
            nonlocal state
            state, metrics = jax.block_until_ready(step(state, batch))
            return metrics

        for _ in range(2):
            once()
        cycles = counted(counter, once, steps)
        with jax.profiler.trace(folder):
            for _ in range(steps):
                once()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.open(path).read())["traceEvents"]
    flops = flops_per_token(assembled.abstract.model, run.data.sequence_length) * tokens
    peak = max(known_peak(devices, "float32") for _ in range(3))
    found = {"shape": shape, "kinds": milliseconds(events, steps), "flops": flops, "peak": peak}
    return found | {"cycles": cycles and cycles[0], "flops_a_cycle": cycles and cycles[1]}


def counted(counter, step, steps: int) -> tuple[int, float] | None:
    """Cycles of the cheapest of several steps, and operations a cycle of a large product."""
    if counter is None:
        return None
    import jax
    import jax.numpy as jnp

    x, square = jnp.ones((1024, 1024)), jax.jit(lambda x: x @ x)
    jax.block_until_ready(square(x))
    return counter.least(step, steps), 2 * 1024**3 / counter.least(lambda: square(x), 60)


def in_cycles(found: dict) -> str:
    """Words for a step's cycles, and for their share that its products take at the peak; "" where none were counted."""
    if found["cycles"] is None:
        return ""
    share = found["flops"] / found["flops_a_cycle"] / found["cycles"]
    return f"{found['cycles'] / 1e6:,.0f}M, {share:.1%} at {found['flops_a_cycle']:.1f} a cycle"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--one", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.steps)))
        return
    import jax
    from train_speed import processor

    kinds = [*KINDS, "others"]
    lines = [
        f"{processor()}, one core, float32, JAX {jax.__version__}; milliseconds of a step, of its operations by kind",
        "",
        f"{'shape':12}"
        + "".join(f"{kind:>14}" for kind in kinds)
        + f"{'together':>12}{'products at peak':>38}{'cycles of a step, products at peak':>44}",
    ]
    for shape in args.shape:
        program = "import sys, trellis_start; trellis_start.use_huge_pages(); sys.argv.pop(0); import runpy; "
        program += "runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", program, str(Path(__file__)), "--one", shape, "--steps", str(args.steps)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(out.splitlines()[-1])
        taken, whole = found["kinds"], sum(found["kinds"].values())
        least = 1e3 * found["flops"] / found["peak"]
        cells = "".join(f"{taken.get(kind, 0.0):>14.1f}" for kind in kinds)
        at_peak = f"{least:.0f} ({least / whole:.0%} of it, {found['peak'] / 1e9:.0f} GFLOP/s)"
        lines.append(f"{shape:12}{cells}{whole:>12.1f}{at_peak:>38}{in_cycles(found):>44}")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
