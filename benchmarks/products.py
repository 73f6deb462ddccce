"""Single products on one core of a CPU: by XLA, by its older library, and by torch.

    python benchmarks/products.py [--dtype float32 bfloat16] [--out benchmarks/results/products_PROCESSOR.txt]

The shapes are those of products with weights in `train_speed.py`'s models: the rows of a microbatch, the channels that
are summed over, and those of the result. Every contestant is a process of its own on the same core; they take turns,
and the fastest call of each counts, in GFLOP/s. XLA multiplies with YNNPACK unless it is told otherwise, and with Eigen
where it is told to leave products out (`--xla_cpu_experimental_ynn_fusion_type`). In bfloat16 XLA's result is float32,
as Trellis asks for it (`named/backend.py`); Eigen converts operands to float32 first. The last line is a copy of 64 MiB
by NumPy on that core, read and written.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SHAPES = (
    (1024, 256, 1024),
    (1024, 1024, 256),
    (256, 1024, 1024),
    (2048, 512, 1408),
    (2048, 1408, 512),
    (512, 2048, 1408),
)
EIGEN = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"
CONTESTANTS = {"XLA, YNNPACK": ("xla", ""), "XLA, Eigen": ("xla", EIGEN), "torch": ("torch", "")}
ROUNDS, CALLS = 10, 20


def products(library: str, dtype: str):
    """A function of each shape that multiplies once and waits for the result."""
    if library == "torch":
        import torch

        torch.set_num_threads(1)
        pairs = [
            (torch.ones(m, k, dtype=getattr(torch, dtype)), torch.ones(k, n, dtype=getattr(torch, dtype)))
            for m, k, n in SHAPES
        ]
        return [lambda a=a, b=b: a @ b for a, b in pairs]
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    pairs = [(jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)) for m, k, n in SHAPES]
    return [lambda a=a, b=b: jax.block_until_ready(product(a, b)) for a, b in pairs]


def serve(library: str, dtype: str) -> None:
    """Answers each line of the input with the seconds of each shape's fastest call."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    calls = products(library, dtype)
    for _ in sys.stdin:
        found = []
        for call in calls:
            taken = []
            for _ in range(CALLS):
                started = time.perf_counter()
                call()
                taken.append(time.perf_counter() - started)
            found.append(min(taken))
        print(json.dumps(found), flush=True)


def race(dtype: str) -> dict[str, list[float]]:
    """Seconds of each contestant's fastest call by shape."""
    processes = {}
    for name, (library, flags) in CONTESTANTS.items():
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        command = [sys.executable, __file__, "--serve", library, dtype]
        processes[name] = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    best: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, process in processes.items():
            process.stdin.write("\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            best[name] = [min(pair) for pair in zip(found, best.get(name, found), strict=True)]
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return best


def copied() -> float:
    """Bytes a second that one core reads and writes together."""
    import numpy as np

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    source, target, taken = np.ones(2**26, np.uint8), np.ones(2**26, np.uint8), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - started)
    os.sched_setaffinity(0, before)
    return 2 * source.nbytes / min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="write the table there")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    import jax
    import torch
    from train_speed import processor

    lines = [f"{processor()}, one core, GFLOP/s; JAX {jax.__version__}, torch {torch.__version__}", ""]
    lines.append(f"{'dtype':10}{'rows, summed, columns':>24}" + "".join(f"{name:>16}" for name in CONTESTANTS))
    for dtype in args.dtype:
        best = race(dtype)
        for i, (m, k, n) in enumerate(SHAPES):
            cells = "".join(f"{2e-9 * m * k * n / best[name][i]:>16.0f}" for name in CONTESTANTS)
            lines.append(f"{dtype:10}{f'{m:,} x {k:,} x {n:,}':>24}{cells}")
    lines += ["", f"memory: {copied() / 1e9:.1f} GB/s"]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
