"""`python -m tests.fuzz.trainings`: random trainings, stopped and resumed on another mesh, as one device trains.

A training is drawn as a user would write it at the command line: a family, how texts become sequences, sizes of batches
and lengths of sequences that grow, an optimizer, a schedule, what is evaluated and when; two meshes with their layouts,
and the step after which the first gives way to the second. Every line of its metrics equals that of a single device
that was never stopped, or an error of ours refuses it.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import yaml

import conftest  # noqa: F401  before anything imports JAX: eight CPU devices, the tests' strictness and their compiler
from tests.fuzz.runs import Found, mesh_sizes, told
from tests.models.small import CONFIGS
from tests.train.small import VOCAB, make_run
from trellis.commands import line
from trellis.recipes import load_run
from trellis.run.run_file import to_yaml
from trellis.train.trackers import read_lines

Options = dict[str, Any]
STEPS = 6
ALONE: Options = {"mesh.data": 1, "layout.preset": "single", "microbatches": 1}
# What a line of metrics says, as apart as it may be: losses by so much, and other numbers by this share. Where products
# or what the optimizer keeps are rounded, each device rounds parts of its own.
_EXACT, _NEAR, _NEAR_NARROW = 1e-7, (1e-4, 3e-3), (3e-2, 0.15)
_COUNTS = ("step", "epoch", "tokens", "learning_rate")
_COMPARED = (*_COUNTS, "grad_norm", "param_norm", "router_balance", "router_z")


class Training(NamedTuple):
    """A family's name; what is trained, and how; two meshes with their layouts; how many devices each has; and the step
    after which the first gives way to the second."""

    family: str
    options: Options
    meshes: tuple[Options, Options]
    devices: tuple[int, int]
    until: int


def draw(seed: int) -> Training:
    """The training that a seed stands for."""
    r = random.Random(f"training {seed}")
    family = r.choice(sorted(CONFIGS))
    length = r.choice((24, 32))
    options = _data(r, length) | _sizes(r, length) | _optimizer(r) | _precision(r, hasattr(CONFIGS[family], "routing"))
    options |= {"steps": STEPS, "logging.every": 1, "checkpoints.every": r.choice((2, 3))}
    options |= {"evaluation.every": r.choice((2, 3)), "evaluation.batches": r.choice((1, 2, None))}
    several = r.choice((1, 1, 2))
    meshes, devices = zip(*(_mesh(r, hasattr(CONFIGS[family], "routing"), several) for _ in range(2)))
    if r.random() < 0.2:
        meshes[0]["guard.every"] = 2
    if r.random() < 0.3:
        meshes, devices = (meshes[0], ALONE), (devices[0], 1)
    return Training(family, options, meshes, devices, r.randint(1, STEPS - 1))


def _data(r: random.Random, length: int) -> Options:
    options = {"data.sequence_length": length, "data.mask_documents": r.random() < 0.7}
    options["data.packing"] = r.choice(("concatenate", "concatenate", "pack", "pad"))
    return options | ({"data.shuffle_block": r.choice((2, 5))} if r.random() < 0.3 else {})


def _sizes(r: random.Random, length: int) -> Options:
    """Batches of one size and length, or one of both grows."""
    size, grows, at = r.choice((12, 24)), r.choice(("nothing", "nothing", "size", "length")), r.choice((2, 3, 4))
    if grows == "size":
        return {"batch_size": [{"step": 0, "size": size}, {"step": at, "size": size * 2}]}
    fewer = {"batch_size": 12} if r.random() < 0.5 else {}
    return {"batch_size": size} | (
        {"lengths": [{"step": at, "length": 2 * length} | fewer]} if grows == "length" else {}
    )


def _optimizer(r: random.Random) -> Options:
    kind = r.choice(("adamw", "adamw", "lion", "muon", "adafactor"))
    options = {"optimizer.kind": kind, "optimizer.learning_rate": 3e-4 if kind == "lion" else 1e-3}
    options["schedule.kind"] = r.choice(("constant", "linear", "cosine", "inverse_sqrt"))
    options |= {"schedule.warmup_steps": r.choice((1, 2)), "clip_norm": r.choice((0.5, 1.0, None))}
    options |= {"z_loss": r.choice((0.0, 1e-3)), "skip_nonfinite": r.choice((0, 3))}
    return options | ({"ema": 0.9} if r.random() < 0.3 else {})


def _precision(r: random.Random, experts: bool) -> Options:
    options: Options = {}
    if r.random() < 0.15:
        options |= {"precision.params": "bfloat16", "precision.updates": r.choice(("nearest", "random"))}
    if r.random() < 0.15:
        options["precision.moments"] = {"mlp": "mxfp8"}
    if r.random() < 0.2:
        options["precision.products"] = {"mlp": r.choice(("fp8", "int8"))}
        options |= {"precision.amax_history": 2} if not experts and r.random() < 0.5 else {}
    return options


def _mesh(r: random.Random, experts: bool, several: int) -> tuple[Options, int]:
    """Options of a mesh and of its layout, and how many devices it has."""
    count = r.choice((2, 4, 4, 4, 6, 8, 8, 8))
    sizes = mesh_sizes(r, count, experts)
    options: Options = {f"mesh.{axis}": size for axis, size in sizes.items() if size > 1 or axis == "data"}
    options["layout.preset"] = r.choice(("auto", "hybrid")) if sizes["replica"] > 1 else "auto"
    if sizes["context"] > 1:
        options["layout.context"] = r.choice(("ring", "gather", "exchange"))
    if sizes["stage"] > 1:
        options["layout.pipeline_microbatches"] = r.choice((2, 4))
    elif r.random() < 0.15:
        options["layout.mode"] = "auto"
    if r.random() < 0.3:
        options["remat.policy"] = r.choice(("full", "saved", "dots"))
    if experts and sizes["expert"] * sizes["expert_y"] > 1:
        options["model.routing.way"] = r.choice(("auto", "auto", "gather", "slots"))
    return options | {"microbatches": several if r.random() < 0.8 else None}, count


def judge(seed: int, folder: Path) -> Found:
    """Trains what a seed stands for twice, in a folder that has the texts (`make_run`)."""
    training, own = draw(seed), folder / str(seed)
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    model = dataclasses.replace(CONFIGS[training.family], vocab=VOCAB)
    file = own / "run.yaml"
    file.write_text(to_yaml(dataclasses.replace(load_run(str(folder / "run.yaml")), model=model)))

    def train(to: str, devices: int, options: Options) -> str:
        said = io.StringIO()
        texts = {name: yaml.safe_dump(value, default_flow_style=True, width=999) for name, value in options.items()}
        arguments = [f"--{name}={text.splitlines()[0]}" for name, text in texts.items()]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = line.main(["train", str(file), "--run-dir", str(own / to), "--devices", str(devices), *arguments])
        return said.getvalue() if code else ""

    (first, second), (before, after) = training.meshes, training.devices
    if refused := train("stopped", before, training.options | first | {"until": training.until}):
        return Found("refused", _short(refused))
    if refused := train("stopped", after, training.options | second):
        return Found("refused", f"on the second mesh: {_short(refused)}")
    if refused := train("through", 1, training.options | ALONE):
        return Found("wrong", f"one device refuses it: {_short(refused)}")
    through, stopped = (list(read_lines(own / name / "metrics.jsonl")) for name in ("through", "stopped"))
    narrow = any(name.startswith("precision.") for name in training.options)
    return compared(through, stopped, *(_NEAR_NARROW if narrow else _NEAR))


def compared(wanted: list[dict], found: list[dict], loss: float, share: float) -> Found:
    """Whether two files of metrics say the same."""
    if [each["step"] for each in wanted] != [each["step"] for each in found]:
        return Found("wrong", f"{len(wanted)} lines of metrics, and {len(found)} of other steps")
    worst, wrong = 0.0, []
    for one, other in zip(wanted, found, strict=True):
        for name in sorted(name for name in one | other if "loss" in name or name in _COMPARED):
            here, there = one.get(name), other.get(name)
            if here is None or there is None:
                apart, most = float(here is not there), 0.0
            else:
                apart = abs(here - there) / (1 if "loss" in name else max(abs(here), 1e-9))
                most = _EXACT if name in _COUNTS else loss if "loss" in name else share
            worst = max(worst, apart)
            if not apart <= most:
                wrong.append(f"{name} of step {one['step']} is {there}, of one device {here}")
    return Found("wrong", "; ".join(wrong[:4])) if wrong else Found("right", f"apart by {worst:.1e} at most")


def _short(said: str) -> str:
    return " | ".join(line.strip() for line in said.splitlines() if line.strip())[-400:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.trainings", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="how many trainings (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; a seed is one training")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    jax.devices()  # eight for all: a command that is run first would ask for another number
    with tempfile.TemporaryDirectory() as name:
        make_run(Path(name))
        return told(seeds, functools.partial(judge, folder=Path(name)), draw)


if __name__ == "__main__":
    sys.exit(main())
