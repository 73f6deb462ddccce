"""Predicted against measured step time on this machine, for a dozen shapes.

    python benchmarks/plan_vs_measured.py

The machine's rates are measured first, as `trellis doctor` does (products, elementwise chains, copies, tiny
operations); then each shape is planned from types with these rates, and trained for a few steps with the run's own
train step. On a CPU everything runs on one core, and seconds are those that the process used of it: other work on the
machine then disturbs little. The error is the prediction over the measurement, less one: positive is pessimistic.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

if hasattr(os, "sched_setaffinity"):  # before JAX makes a thread for each core
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 1)

from tables import aligned  # noqa: E402
from train_speed import processor  # noqa: E402

from trellis.data import Batch  # noqa: E402
from trellis.plan import local_target, measure_machine, plan_of, prepare  # noqa: E402
from trellis.recipes import load_run  # noqa: E402
from trellis.train import CompiledStep, assemble, options_for  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "plan_vs_measured.txt"

# embed, layers, heads, mlp, vocab, positions, sequences, checkpointing
SHAPES = (
    (128, 2, 4, 512, 512, 128, 8, "none"),
    (256, 4, 4, 1024, 1024, 256, 8, "none"),
    (256, 4, 4, 1024, 1024, 256, 8, "full"),
    (256, 4, 4, 1024, 8192, 256, 8, "none"),
    (256, 8, 4, 1024, 1024, 256, 4, "none"),
    (512, 2, 8, 2048, 1024, 256, 4, "none"),
    (512, 4, 8, 1408, 4096, 512, 4, "none"),
    (512, 4, 8, 1408, 4096, 512, 4, "full"),
    (512, 4, 8, 1408, 4096, 1024, 2, "none"),
    (768, 2, 12, 2048, 4096, 256, 4, "none"),
    (1024, 2, 16, 4096, 1024, 128, 4, "none"),
    (1024, 1, 16, 4096, 8192, 256, 2, "none"),
)
STEPS = 3


def run_of(shape):
    """A small Llama of this shape, in the type that this machine is fast in."""
    embed, layers, heads, mlp, vocab, pos, batch, remat = shape
    compute = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return load_run(
        "llama_84m",
        {
            "model.embed": str(embed), "model.layers": str(layers), "model.heads": str(heads),
            "model.kv_heads": str(heads), "model.head_dim": str(embed // heads), "model.mlp": str(mlp),
            "model.vocab": str(vocab),
            "data.sequence_length": str(pos), "batch_size": str(batch), "remat.policy": remat,
            "precision.compute": compute, "layout.preset": "auto",
        },
    )  # fmt: skip


def measured(run, devices, clock) -> float:
    """Median seconds of a step."""
    made = assemble(run, devices)
    program = CompiledStep(made.step, options_for(devices[0].platform, run.compiler_options))
    size, length = run.batch_sizes()[0].size, run.data.sequence_length
    tokens = np.random.default_rng(0).integers(0, run.model.vocab, (size, length + 1), dtype=np.int32)
    arrays = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((size, length), np.float32),
        "segment_ids": np.zeros((size, length), np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (size, length)),
    }  # fmt: skip
    with made.layout:
        state = made.init()
        batch = Batch(**jax.device_put(arrays, made.batch_sharding))
        times = []
        for step in range(STEPS + 1):
            started = clock()
            state, metrics = program(state, batch)
            jax.block_until_ready((state, metrics))
            if step:
                times.append(clock() - started)
    return statistics.median(times)


def main() -> None:
    """Prints the table and writes it beside the other results."""
    devices = jax.devices()[:1]
    cpu = devices[0].platform == "cpu"
    clock = time.process_time if cpu else time.perf_counter
    rates = measure_machine(clock) if cpu else None
    target = local_target(devices, measured=rates)
    lines, errors = [], []
    for shape in SHAPES:
        run = run_of(shape)
        plan = plan_of(prepare(run, target, devices), target)
        seconds = measured(run, devices, clock)
        error = plan.seconds / seconds - 1
        errors.append(error)
        embed, layers, heads, mlp, vocab, pos, batch, remat = shape
        what = f"embed {embed} layers {layers} mlp {mlp} vocab {vocab} batch {batch}x{pos} {remat}"
        lines.append(
            (what, f"{plan.seconds * 1e3:.0f} ms", f"{seconds * 1e3:.0f} ms", f"{error:+.0%}", plan.times.binding)
        )
    table = aligned(("shape", "predicted", "measured", "error", "waits for"), lines, right=(1, 2, 3))
    machine = f"{processor()}, {devices[0].device_kind}, jax {jax.__version__}"
    said = "published peaks"
    if rates is not None:
        said = "one core, measured: " + ", ".join(f"{name} {value:.3g}" for name, value in rates._asdict().items())
    middle = statistics.median(abs(e) for e in errors)
    foot = f"median error {middle:.0%}, mean {statistics.mean(errors):+.0%}, worst {max(errors, key=abs):+.0%}"
    text = f"{machine}; {said}\n\n{table}\n\n{foot}; positive is pessimistic\n"
    print(text)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
