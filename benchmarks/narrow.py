"""What eight bits bring: planned for accelerators, and trained, emulated, on this machine.

    python benchmarks/narrow.py plan [--recipe llama_8b] [--on 8xH100 ...]
    python benchmarks/narrow.py compiled [--on b200:8 v5e:2x4 ...]
    python benchmarks/narrow.py train [--recipe tiny] [--seeds 3] [--kinds ...] [--options ...]

`plan` predicts a step with the products of attention and feed-forward in the compute type, fp8, fp8 with delayed
scales, fp8 with the unembedding's (`head`), int8, mxfp8 and nvfp4, and with what the optimizer keeps of the layers in
mxfp8, with parameters kept in bfloat16, and, of mixtures, with tokens that go to experts in mxfp8 (`dispatch`).
`compiled` says what a compiler makes of a feed-forward layer's loss and gradients on a four by two mesh, and of a
language model's loss (`head`): its products, and what it gathers.
`train` runs the recipe in each for several seeds, in processes of their own, and compares the mean loss of the last
tenth of the steps, and the validation loss after them: a line a run as it ends, then a line a kind. Losses of eight-bit
runs on a CPU are those of the types (`ml_dtypes` to the bit), not of any chip's units, which sum in another order.
"""

import argparse
import collections
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
from train_speed import processor

import trellis as tr
from trellis.nn import next_token_loss

KINDS = {
    "bfloat16": [],
    "fp8": ["--precision.products.attention", "fp8", "--precision.products.mlp", "fp8"],
    "delayed": [
        "--precision.products.attention",
        "fp8",
        "--precision.products.mlp",
        "fp8",
        "--precision.amax_history",
        "16",
    ],
    "head": [
        "--precision.products.attention",
        "fp8",
        "--precision.products.mlp",
        "fp8",
        "--precision.products.vocab",
        "fp8",
    ],
    "int8": ["--precision.products.attention", "int8", "--precision.products.mlp", "int8"],
    "mxfp8": ["--precision.products.attention", "mxfp8", "--precision.products.mlp", "mxfp8"],
    "nvfp4": ["--precision.products.attention", "nvfp4", "--precision.products.mlp", "nvfp4"],
    "dispatch": ["--model.routing.dispatch", "mxfp8"],  # of a mixture
    "moments": ["--precision.moments.layers", "mxfp8"],
    "nearest": ["--precision.params", "bfloat16"],
    "random": ["--precision.params", "bfloat16", "--precision.updates", "random"],
}
PRODUCTS = ("bfloat16", "fp8", "int8", "mxfp8", "nvfp4")
HEADS = ("bfloat16", "fp8", "mxfp8")
COMPILED = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
TARGETS = ("8xA100", "8xH100", "8xB200", "v5e:4x4", "v5p:2x2x2", "v6e:4x4")


def trellis(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "trellis_start", *words], capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(done.stderr)
    return done.stdout


def plans(recipe: str, targets: list[str], kinds: list[str]) -> None:
    print(
        f"{recipe}: a step as planned, the bytes that a device sends in it, and those that it holds of the optimizer\n"
    )
    print(f"{'target':10} {'kind':9} {'step':>8} {'change':>8} {'sent':>10} {'optimizer':>11}")
    for on in targets:
        first = None
        for kind in kinds:
            plan = json.loads(trellis("plan", recipe, "--on", on, "--json", *KINDS[kind]))["plan"]
            seconds, sent = plan["step_seconds"], sum(plan["communication"]["per_axis"].values())
            first = first or seconds
            change = f"{seconds / first - 1:+.1%}"
            held = plan["memory"]["kinds"]["optimizer"]
            print(f"{on:10} {kind:9} {seconds:7.2f}s {change:>8} {sent / 2**30:7.1f}GiB {held / 2**30:8.2f}GiB")


def compiled(targets: list[str], kinds: list[str]) -> None:
    print(f"{'target':10} {'of':5} {'kind':9} products, and what is gathered, forward and backward\n")
    for on in targets:
        for what, kind in [*(("layer", kind) for kind in kinds), *(("head", kind) for kind in kinds if kind in HEADS)]:
            text = program(on, kind, what)
            calls = re.findall(r'custom_call_target="(__cu[^"]*)"', text)
            calls += [f"convolution to {made}" for made in re.findall(r"= (\w+)\[[\d,]*\]\S* convolution\(", text)]
            gathers = [line for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)]
            types = {found for line in gathers for found in re.findall(r"(\w+)\[\d", line.partition(" all-gather")[0])}
            shown = ", ".join(f"{count} x {call}" for call, count in collections.Counter(calls).items())
            gathered = ", ".join(sorted(types)) or "nothing alone"
            print(f"{on:10} {what:5} {kind:9} {shown}; gathers {gathered}", flush=True)


def program(on: str, kind: str, what: str) -> str:
    """The compiled gradients of a layer, or a head: weights sliced over four devices, and their widths over two."""
    devices = tr.target_devices(on)
    mesh = tr.make_mesh(devices, data=4, model=2)
    slices = {"embed": "data", "mlp": "model", "vocab": "model"}

    def abstract(spec, **axes):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return tr.NamedArray(jax.ShapeDtypeStruct(tuple(axes.values()), jnp.bfloat16, sharding=sharding), tuple(axes))

    def loss(weights, x):
        up, down = (w if kind == "bfloat16" else tr.Narrow(w, kind) for w in weights)
        out = tr.dot(tr.gelu(tr.dot(x, up, over="embed")), down, over="mlp")
        return ((out - x).astype(jnp.float32) ** 2).mean().array

    def head(weights, x):
        (unembed,) = (w if kind == "bfloat16" else tr.Narrow(w, kind) for w in weights)
        return next_token_loss(x, unembed, tr.named(jnp.zeros((8, 128), jnp.int32), "batch pos")).total

    up = abstract(("data", "model"), embed=512, mlp=1024)
    down = abstract(("model", "data"), mlp=1024, embed=512)
    x = abstract(("data", None, None), batch=8, pos=128, embed=512)
    # Ahead of time nothing is tried out, and XLA would take Triton's products without trying cuBLAS's.
    options = {"xla_gpu_enable_triton_gemm": False} if devices[0].platform == "gpu" else {}
    weights = (up, down) if what == "layer" else (abstract(("model", "data"), vocab=4096, embed=512),)
    with tr.Layout(mesh, params=slices, compute={"batch": "data", "mlp": "model", "vocab": "model"}):
        step = tr.named_jit(jax.grad(loss if what == "layer" else head, (0, 1)))
        return step.lower(weights, x).compile(compiler_options=options).as_text()


def last_losses(folder: pathlib.Path) -> tuple[float, float]:
    """The mean loss of the last tenth of the steps, and the validation loss after the last one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :]), rows[-1]["validation_loss"]


def losses(recipe: str, seeds: int, kinds: list[str], more: list[str]) -> None:
    print(
        f"{recipe} {' '.join(more)}: mean loss of the last tenth of the steps, on {processor()}, "
        "and the validation loss after them\n"
    )
    found = {kind: [] for kind in kinds}
    for seed in range(seeds):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                words = ["--seed", str(seed), "--precision.compute", "bfloat16", "--logging.every", "1"]
                trellis("train", recipe, "--run-dir", f"{folder}/run", *words, *KINDS[kind], *more)
                found[kind].append(last_losses(pathlib.Path(folder) / "run"))
            loss, validation = found[kind][-1]
            print(f"# {kind:9} seed {seed} {loss:8.4f} {validation:8.4f}", flush=True)
    columns = [" ".join([f"{name:>{9 * seeds}} {'mean':>8} {'change':>8}"]) for name in ("loss by seed", "validation")]
    print(f"\n{'kind':9} {'  '.join(columns)}")
    first = None
    for kind, runs in found.items():
        means = [statistics.fmean(column) for column in zip(*runs, strict=True)]
        first = first or means
        shown = []
        for column, mean, base in zip(zip(*runs, strict=True), means, first, strict=True):
            shown.append(f"{' '.join(f'{x:8.4f}' for x in column):>{9 * seeds}} {mean:8.4f} {mean / base - 1:+8.2%}")
        print(f"{kind:9} {'  '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "compiled", "train"))
    parser.add_argument("--recipe")
    parser.add_argument("--on", nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    if args.what == "plan":
        plans(args.recipe or "llama_8b", args.on or TARGETS, args.kinds)
    elif args.what == "compiled":
        compiled(args.on or COMPILED, [kind for kind in args.kinds if kind in PRODUCTS])
    else:
        losses(args.recipe or "tiny", args.seeds, args.kinds, args.options)


if __name__ == "__main__":
    main()
